"""The temporary memory of a GPU program by kind, from the form of XLA's dump of its buffers."""

from groupax.models.families import read_config
from groupax.planning.buffers import (
    ACTIVATIONS,
    COPIES,
    LOGITS,
    Buffer,
    bytes_by_kind,
    kind_by_shape,
    parse_temporaries,
)
from groupax.planning.hlo import Array

from .conftest import TINY

DUMP = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <1 weights @0> (size=4096,offset=0): f32[1024]{0}
allocation 7: size 900, preallocated-temp:
 value: <2 fusion @0> (size=400,offset=0): bf16[10,20]{1,0}
 value: <3 fusion{} @0> (size=16,offset=700): (f32[4]{0}, f32[4]{0})
 value: <4 fusion{1} @0> (size=300,offset=300): f32[3,25]{1,0}
allocation 8: size 4, thread-local:
 value: <5 x @0> (size=4,offset=0): f32[]

Total bytes used: 5000
"""


def test_temporary_arrays_are_read_from_a_dump():
    assert parse_temporaries(DUMP) == [
        Buffer(Array("bf16", (10, 20)), 0, 400),
        Buffer(Array("f32", (3, 25)), 300, 300),
    ]
    assert parse_temporaries("") == []


def test_each_byte_belongs_to_the_largest_array_that_is_there():
    buffers = parse_temporaries(DUMP)
    assert bytes_by_kind(buffers, lambda array: array.dtype) == {"bf16": 400, "f32": 200}
    assert bytes_by_kind(buffers[::-1], lambda _: "all") == {"all": 600}
    assert bytes_by_kind([], str) == {}


def test_kinds_follow_from_shapes():
    config = read_config(
        {**TINY, "vocab_size": 1000, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
    )
    kind_of = kind_by_shape(config, 4)

    def kinds(*shapes):
        return [kind_of(Array("f32", shape)) for shape in shapes]

    assert kinds((7, 1000), (7, 250), (500, 7, 1)) == [LOGITS] * 3
    assert kinds((1000, 32), (1, 32, 1000), (80, 32), (3, 32, 80), (20, 32)) == [COPIES] * 5
    assert kinds((7, 32), (7, 80), (), (7, 125)) == [ACTIVATIONS] * 4
