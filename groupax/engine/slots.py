"""The state of the slots: arrays on the devices, made from a table on the host with a row per slot."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from jaxtyping import Array, Int, UInt32

from groupax.engine.sampling import Options
from groupax.engine.sequence import Sequence
from groupax.parallel.pytree import pytree
from groupax.settings.sampling import SAMPLER

_DTYPES = {int: "i4", float: "f4"}


@pytree
class Slots:
    """The state of B slots.

    Attributes:
        token: Token that is fed next.
        position: Position of that token in its sequence; after images with positions in a grid it is not its column.
        length: Number of tokens that the slot has fed, each of which has a column in the cache.
        key: PRNG key of the slot (see `sampling.row_keys`).
        remaining: Number of tokens that the slot may still sample; 0 for an idle slot.
        stop_ids: Tokens that end the sequence, padded with -1.
        settings: Sampling parameters.
        adapter: Index of the adapter, -1 for the base; None for an engine without several adapters.
    """

    token: Int[Array, "B"]
    position: Int[Array, "B"]
    length: Int[Array, "B"]
    key: UInt32[Array, "B 2"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B E"]
    settings: Options
    adapter: Int[Array, "B"] | None = None


def slot_table(num_slots: int, num_stop_ids: int, num_biased: int, has_adapters: bool = False) -> np.ndarray:
    """Returns idle slots on the host, a structured array with a field per field of `Slots` and per array of `Options`.

    Args:
        num_slots: Number of slots.
        num_stop_ids: Number of stop tokens that a slot has room for.
        num_biased: Likewise of biased tokens.
        has_adapters: Whether each slot chooses one of several adapters.
    """
    columns = [
        ("token", "i4"),
        ("position", "i4"),
        ("length", "i4"),
        ("key", "u4", 2),
        ("remaining", "i4"),
        ("stop_ids", "i4", num_stop_ids),
    ]
    of_tokens = [name for name, default in SAMPLER.items() if isinstance(default, Mapping)]
    idle = {name: default for name, default in SAMPLER.items() if name not in of_tokens}
    columns += [(name, _DTYPES[type(default)]) for name, default in idle.items()]
    columns += [(f"{name}_tokens", "i4", num_biased) for name in of_tokens]
    columns += [(name, "f4", num_biased) for name in of_tokens] + [("adapter", "i4")] * has_adapters
    table = np.zeros(num_slots, columns)
    idle |= dict.fromkeys(["stop_ids", *(f"{name}_tokens" for name in of_tokens), *["adapter"] * has_adapters], -1)
    for name, value in idle.items():
        table[name] = value
    return table


def fill(row: np.void, sequence: Sequence) -> None:
    """Enters a sequence that starts."""
    row["token"] = sequence.prompt[-1]
    row["position"] = len(sequence.prompt) - 1 + (sequence.images.position_offset if sequence.images else 0)
    row["length"] = 0
    row["key"] = sequence.key
    row["remaining"] = sequence.params.max_tokens
    row["stop_ids"][: len(sequence.stop_ids)] = sequence.stop_ids
    for name in SAMPLER:
        value = getattr(sequence.params, name)
        if isinstance(value, Mapping):
            row[f"{name}_tokens"][: len(value)], row[name][: len(value)] = list(value), list(value.values())
        else:
            row[name] = value


def to_slots(table: np.ndarray, put: Callable[[np.ndarray], Any]) -> Slots:
    """Returns the table's columns as `Slots`, each transferred by `put`."""
    columns = {name: put(table[name]) for name in table.dtype.names or ()}
    own = {name: columns.pop(name) for name in columns.keys() & {each.name for each in fields(Slots)}}
    return Slots(**own, settings=columns)
