"""Nulls that a table adds to the arguments of tool calls, where other rows have more keys. Imports no jax.

Arrow and Parquet give all rows of a column the same keys, so `{"city": "Paris"}` becomes `{"city": "Paris",
"query": None}` as soon as another row calls a tool with a query. Whether a null was meant cannot be seen, so it is kept
if

* the tool is among the row's `tools`, and its schema requires the key and allows null, or
* no row has a value for the key, which then comes from a row with null; not if the tool's schema refuses that.

Otherwise it is left out. Nulls in lists, in arguments that are JSON texts and in JSON files are kept.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from groupax.data.tool_arguments import convert_arguments

Shape = dict[str, Any]  # the keys of a table's structs, each with the shape of its value; None for a column of nulls


class TableRows:
    """Rows of a `datasets.Dataset` without the nulls that it has added. Anything else is as in the dataset.

    Args:
        dataset: The dataset.
        shape: Its shape (see `shape_of`).
    """

    def __init__(self, dataset: Any, shape: Shape) -> None:
        self._dataset, self._shape = dataset, shape

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: Any, /) -> Any:
        if not isinstance(index, str):
            return without_added_nulls(self._dataset[index], self._shape)
        if index not in self._shape:
            return self._dataset[index]
        tools = self._dataset["tools"] if "tools" in self._dataset.column_names else [None] * len(self)
        rows = zip(self._dataset[index], tools, strict=True)
        return [without_added_nulls({index: value, "tools": own}, self._shape)[index] for value, own in rows]


def shape_of(kind: Any) -> Any:
    """Returns the shape of a schema or a type of pyarrow."""
    import pyarrow

    if isinstance(kind, pyarrow.Schema) or pyarrow.types.is_struct(kind):
        return {field.name: shape_of(field.type) for field in kind}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return shape_of(kind.value_type)
    return None if pyarrow.types.is_null(kind) else {}


def without_added_nulls(row: Mapping[str, Any], shape: Shape) -> Mapping[str, Any]:
    """Returns a row without the nulls that the table has added to the arguments of its messages' calls."""
    found = dict(row)
    for column, messages in row.items():
        keys = shape.get(column)
        if isinstance(messages, list) and isinstance(keys, dict) and isinstance(keys.get("tool_calls"), dict):
            found[column] = [_message(message, keys["tool_calls"], row.get("tools")) for message in messages]
    return found


def _message(message: Any, shape: Shape, tools: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call(call, shape, tools) for call in calls]}


def _call(call: Any, shape: Shape, tools: Any) -> Any:
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], shape.get("function") or {}, tools)}
    keys = shape.get("arguments")
    if not isinstance(call, Mapping) or not isinstance(call.get("arguments"), Mapping) or not isinstance(keys, dict):
        return call
    tool, arguments = _tool(tools, call.get("name")), dict(call["arguments"])
    kept = {key: _value(value, keys.get(key)) for key, value in arguments.items() if value is not None}
    for key in [key for key in arguments if key not in kept]:
        faults = [len(convert_arguments(tool, each)[1]) if tool else 0 for each in (kept, {**kept, key: None})]
        if faults[1] < faults[0] or (faults[1] == faults[0] and key in keys and keys[key] is None):
            kept[key] = None
    return {**call, "arguments": {key: kept[key] for key in arguments if key in kept}}


def _value(value: Any, shape: Any) -> Any:
    """Returns a value without the nulls of keys that other rows have a value for."""
    if isinstance(value, list):
        return [_value(each, shape) for each in value]
    if not isinstance(value, Mapping) or not isinstance(shape, dict):
        return value
    kept = {key: each for key, each in value.items() if each is not None or shape.get(key, {}) is None}
    return {key: _value(each, shape.get(key)) for key, each in kept.items()}


def _tool(tools: Any, name: Any) -> Mapping[str, Any] | None:
    """Returns the schema of a tool among a row's tools, which may be JSON; None if it is not there."""
    if isinstance(tools, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    for each in tools if isinstance(tools, list) else ():
        function = each.get("function", each) if isinstance(each, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            return {"function": without_nulls(function)}
    return None


def without_nulls(value: Any) -> Any:
    """Returns a value without the nulls that a table has where other rows have more."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
