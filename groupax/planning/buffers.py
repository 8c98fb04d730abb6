"""The temporary memory of a program compiled for a GPU, by what lies there."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from groupax.models.config import ModelConfig
from groupax.models.specs import model_specs
from groupax.planning.hlo import Array

ACTIVATIONS, LOGITS, COPIES = "activations", "logits", "weights' copies"
_ALLOCATION = re.compile(r"^allocation \d+: size \d+, (.*):$")
_VALUE = re.compile(r"\(size=(\d+),offset=(\d+)\): ([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Buffer:
    """An array in the temporary memory of a program, which it may share with others at other times.

    Attributes:
        array: Its type.
        start: Its first byte.
        num_bytes: Its size.
    """

    array: Array
    start: int
    num_bytes: int


def parse_temporaries(text: str) -> list[Buffer]:
    """Parses the arrays in a program's temporary memory from XLA's dump of its buffer assignment."""
    buffers, is_temporary = [], False
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            is_temporary = allocation[1] == "preallocated-temp"
        elif is_temporary and (value := _VALUE.search(line)):
            shape = tuple(int(dim) for dim in value[4].split(",") if dim)
            buffers.append(Buffer(Array(value[3], shape), int(value[2]), int(value[1])))
    return buffers


def bytes_by_kind(buffers: Sequence[Buffer], kind_of: Callable[[Array], str]) -> dict[str, float]:
    """Returns the bytes of temporary memory by kind, each byte by the largest array that is ever there."""
    edges = np.unique([edge for each in buffers for edge in (each.start, each.start + each.num_bytes)])
    widths, is_free = np.diff(edges), np.ones(max(len(edges) - 1, 0), bool)
    found: dict[str, float] = {}
    for each in sorted(buffers, key=lambda each: each.num_bytes, reverse=True):
        first, last = np.searchsorted(edges, (each.start, each.start + each.num_bytes))
        kind, own = kind_of(each.array), slice(first, last)
        found[kind] = found.get(kind, 0.0) + float(widths[own][is_free[own]].sum())
        is_free[own] = False
    return found


def kind_by_shape(config: ModelConfig, num_devices: int) -> Callable[[Array], str]:
    """Returns a function that tells by an array's shape what it probably is.

    Arrays with a dim for the vocabulary and none for the model are logits. Those with as many elements as a matrix of
    the model, or those of all its layers, are copies of weights or gradients. All others are activations. The
    vocabulary and the matrices may be split among a power of two of devices.
    """
    splits = [1 << power for power in range(num_devices.bit_length())]
    vocab = {config.vocab_size // split for split in splits}
    matrices = [math.prod(spec.shape) for spec in jax.tree.leaves(model_specs(config)) if len(spec.shape) > 1]
    sizes = {layers * size // split for size in matrices for layers in (1, config.num_layers) for split in splits}

    def kind_of(array: Array) -> str:
        if vocab & set(array.shape) and config.hidden_size not in array.shape:
            return LOGITS
        return COPIES if math.prod(array.shape) in sizes else ACTIVATIONS

    return kind_of
