"""Reading the completions of a recorded step, which somebody else may have written."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupax.replay.foreign import memory_limit

# Columns that replays read: those that every file has, then those that some have. The latter may have nulls.
ALWAYS = {
    "prompt_index": "int32",
    "sample_index": "int32",
    "prompt": "string",
    "completion": "string",
    "finish_reason": "string",
    "policy_version": "int32",
    "advantage": "float",
    "prompt_ids": "[int32]",
    "completion_ids": "[int32]",
    "policy_logps": "[float]",
    "sampler_logps": "[float]",
}
SOMETIMES = {
    "mask": "[bool]",
    "turns": "string",
    "messages": "string",
    "environment_reward": "double",
    "branches": "string",
    "turn_advantages": "[float]",
    "row_values": "string",
    "experts": "[int16]",
    "adapter": "string",
    "trainer_logps": "[float]",
    "entropies": "[float]",
}
REWARDS = "rewards/"
# Bytes that reading may take: log-probs hardly compress, so that an honest file stays far below this.
LEAST_BYTES, BYTES_PER_BYTE = 2**30, 100


def read_completions(path: Path, is_foreign: bool) -> dict[str, list[Any]]:
    """Returns the columns of a file of the rollout log.

    Args:
        path: The file.
        is_foreign: Whether somebody else has made it.

    Raises:
        ValueError: It is damaged, lacks a column, or, if it is foreign, becomes too large.
    """
    import pyarrow as pa
    import pyarrow.parquet

    num_bytes = LEAST_BYTES + BYTES_PER_BYTE * path.stat().st_size
    try:
        with memory_limit(num_bytes) if is_foreign else contextlib.nullcontext():
            table = pyarrow.parquet.read_table(path)
            _check(path, {field.name: field.type for field in table.schema})
            lacking = [name for name in ALWAYS if table[name].null_count]
            if lacking:
                raise ValueError(f"{path} is damaged: {lacking[0]} has no value in some row")
            return table.to_pydict()
    except MemoryError as error:
        raise ValueError(f"{path} needs more than {num_bytes / 1e9:.1f} GB of memory, so it is refused") from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _check(path: Path, types: Mapping[str, Any]) -> None:
    """Checks the columns of a file.

    Raises:
        ValueError: One is missing, or of another type.
    """
    wanted = ALWAYS | {name: kind for name, kind in SOMETIMES.items() if name in types}
    wanted |= dict.fromkeys((name for name in types if name.startswith(REWARDS)), "double")
    for name, kind in wanted.items():
        found = _type_name(types[name]) if name in types else "missing"
        if found != kind:
            raise ValueError(f"{path} is damaged: its column {name} is {found}, not {kind}")


def _type_name(kind: Any) -> str:
    inner = getattr(kind, "value_type", None)
    return str(kind) if inner is None else f"[{inner}]"
