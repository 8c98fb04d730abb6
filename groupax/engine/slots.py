"""Slots on the host: a table with a row per slot, and its way to the devices."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from groupax.engine.decode import Slots
from groupax.engine.sampling import SamplingArrays
from groupax.engine.sequence import Sequence
from groupax.settings.sampling import SamplingParams

_DTYPES = {int: "i4", float: "f4"}
_ARRAYS = {each.name for each in fields(SamplingArrays)}
_NUMBERS = [each for each in fields(SamplingParams) if each.name in _ARRAYS]  # what the devices need of them


def slot_table(num_slots: int, num_stop_ids: int, num_biased: int) -> np.ndarray:
    """Idle slots on the host, a structured array with a field per field of `Slots` and `SamplingArrays`."""
    columns = [
        ("token", "i4"),
        ("position", "i4"),
        ("start", "i4"),
        ("key", "u4", 2),
        ("remaining", "i4"),
        ("stop_ids", "i4", num_stop_ids),
    ]
    numbers = [(each.name, _DTYPES[each.type]) for each in _NUMBERS]
    bias = [("bias_tokens", "i4", num_biased), ("bias", "f4", num_biased)]
    table = np.zeros(num_slots, columns + numbers + bias)
    table["stop_ids"] = table["bias_tokens"] = -1
    for each in _NUMBERS:
        table[each.name] = each.default
    return table


def fill(row: np.void, sequence: Sequence, column: int) -> None:
    """Enter a sequence that starts at this column of the cache."""
    row["token"] = sequence.prompt[-1]
    row["position"] = len(sequence.prompt) - 1
    row["start"] = column
    row["key"] = sequence.key
    row["remaining"] = sequence.params.max_tokens
    row["stop_ids"][: len(sequence.stop_ids)] = sequence.stop_ids
    for each in _NUMBERS:
        row[each.name] = getattr(sequence.params, each.name)
    for place, (token, bias) in enumerate(sequence.params.logit_bias.items()):
        row["bias_tokens"][place], row["bias"][place] = token, bias


def to_slots(table: np.ndarray, put: Callable[[np.ndarray], Any]) -> Slots:
    """The table's columns as `Slots`, each put where `put` puts it."""
    columns = {name: put(table[name]) for name in table.dtype.names or ()}
    settings = SamplingArrays(**{each.name: columns.pop(each.name) for each in fields(SamplingArrays)})
    return Slots(**columns, settings=settings)
