"""Slots on the host: a table with a row per slot, and its way to the devices."""

from collections.abc import Callable
from typing import Any

import numpy as np

from groupax.engine.decode import Slots
from groupax.engine.sampling import SamplingSettings
from groupax.engine.scheduler import Sequence

# Settings of a slot that are one number each, and its dtype.
SETTINGS = {
    "temperature": "f4",
    "top_k": "i4",
    "top_p": "f4",
    "min_p": "f4",
    "min_tokens": "i4",
    "repetition_penalty": "f4",
    "presence_penalty": "f4",
    "frequency_penalty": "f4",
    "logprobs": "i4",
}


def slot_table(num_slots: int, num_stop_ids: int, num_biased: int) -> np.ndarray:
    """Idle slots on the host, a structured array with a field per field of `Slots` and `SamplingSettings`."""
    fields = [
        ("token", "i4"),
        ("position", "i4"),
        ("start", "i4"),
        ("key", "u4", 2),
        ("remaining", "i4"),
        ("stop_ids", "i4", num_stop_ids),
    ]
    settings = list(SETTINGS.items())
    bias = [("bias_tokens", "i4", num_biased), ("bias", "f4", num_biased)]
    table = np.zeros(num_slots, fields + settings + bias)
    table["stop_ids"] = table["bias_tokens"] = -1
    table["repetition_penalty"] = 1.0
    return table


def fill(row: np.void, sequence: Sequence, column: int) -> None:
    """Enter a sequence that starts at this column of the cache."""
    row["token"] = sequence.prompt[-1]
    row["position"] = len(sequence.prompt) - 1
    row["start"] = column
    row["key"] = sequence.key
    row["remaining"] = sequence.params.max_tokens
    row["stop_ids"][: len(sequence.stop_ids)] = sequence.stop_ids
    for name in SETTINGS:
        row[name] = getattr(sequence.params, name)
    for place, (token, bias) in enumerate(sequence.params.logit_bias.items()):
        row["bias_tokens"][place], row["bias"][place] = token, bias


def slots_of(table: np.ndarray, put: Callable[[np.ndarray], Any]) -> Slots:
    """The table's columns as `Slots`, each put where `put` puts it."""
    fields = {name: put(table[name]) for name in table.dtype.names or ()}
    settings = SamplingSettings(**{name: fields.pop(name) for name in (*SETTINGS, "bias_tokens", "bias")})
    return Slots(**fields, settings=settings)
