"""The dataset's column `tools`: schemas that the chat template describes to the model. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupax.data.examples import Examples
from groupax.data.table_nulls import without_nulls

Schemas = list[Mapping[str, Any]]


def tools_of_rows(
    examples: Examples, of_run: Sequence[Sequence[Mapping[str, Any]]] | None, has_environment: bool, name: str
) -> Sequence[Sequence[Mapping[str, Any]]] | None:
    """Returns the tools that each row's prompt describes, as schemas in OpenAI's format; None if none has any.

    Without tools of the run they are those of a column `tools`, as a list or as JSON. Nothing runs them, so that an
    episode has one turn, and reward functions judge the calls.

    Args:
        examples: Rows of the dataset.
        of_run: Tools of the run for each row.
        has_environment: Whether the run has an environment.
        name: Name of a row in an error, before its index.

    Raises:
        ValueError: The run has tools or environments and the dataset a column `tools`, or its values are no schemas.
    """
    given = [examples[index].get("tools") for index in range(len(examples))] if "tools" in examples[0] else []
    if not any(value is not None for value in given):
        return of_run
    if of_run is not None or has_environment:
        raise ValueError(
            "the dataset has a column tools, whose tools nothing would run, and the run has tools or environments of "
            "its own; drop or rename the column"
        )
    return [_schemas(value, f"{name} {index}") for index, value in enumerate(given)]


def _schemas(value: Any, name: str) -> Schemas:
    if value is None:
        return []
    try:
        found = json.loads(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError, RecursionError):
        found = None
    schemas = found if isinstance(found, list) else [None]
    if not all(isinstance(each, Mapping) and isinstance(each.get("function", each), Mapping) for each in schemas):
        raise ValueError(
            f"{name}: the column tools must have a list of schemas in OpenAI's format, or the JSON of one, got "
            f"{value!r:.100}; rename the column if it is for something else"
        )
    return [without_nulls(each) for each in schemas]
