"""The kernels, host visits and memory traffic of programs compiled for GPUs, read from what XLA writes about them."""

from pathlib import Path

import pytest

from groupax.models.families import read_config
from groupax.planning.kernels import (
    ACTIVATIONS,
    COPIES,
    LOGITS,
    Buffer,
    GpuProgram,
    bytes_by_kind,
    kind_by_shape,
    parse_temporaries,
    parse_thunks,
    read_gpu_program,
)
from tests.conftest import TINY

GOLDEN = Path(__file__).parents[1] / "golden"
# In the form of XLA's dumps, a chunk of decoding in miniature: in each iteration a product, a Triton kernel and an
# update of a cache, a sort in a branch, and a loop of four iterations in another.
HLO = (GOLDEN / "chunk.hlo.txt").read_text()
THUNKS = (GOLDEN / "chunk.thunks.txt").read_text()
NAMES = {1: "copy.9", 2: "while.1", 3: "compare.1", 4: "pallas_call.1", 5: "gemm.1", 6: "update.2", 7: "fusion.4"}
NAMES |= {8: "fusion.4", 9: "fusion.3", 10: "while.2", 15: "conditional.1", 17: "copy.1"}


def metadata(thunks, names):
    """XLA's dump of the instructions of thunks."""
    entries = []
    for line in thunks.splitlines():
        number, _, rest = line.strip().partition(": ")
        if rest.startswith("k") and int(number) in names:
            entries.append(
                f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{names[int(number)]}"\n'
                f'    thunk_id: {int(number)}\n  }}\n  thunk_kind: "{rest.split()[0]}"\n}}'
            )
    return "\n".join(entries)


@pytest.fixture
def chunk():
    return GpuProgram(HLO, parse_thunks(THUNKS, metadata(THUNKS, NAMES)))


def test_an_unknown_sequence_is_refused():
    with pytest.raises(ValueError, match="unknown line in XLA's sequence of thunks: 'thunks: 3'"):
        parse_thunks("thunks: 3", "")


def test_a_step_is_an_iteration_with_its_smallest_branches(chunk):
    step, others = chunk.work(loop_steps=32)
    # the comparison, three kernels in a graph, the two of the sort, and the copy in a slice
    assert step.num_launches == 7
    assert step.host_visits == 2, "for the loop's end and for the branch"
    assert step.dispatches == 5
    assert (others.num_launches, others.host_visits, others.dispatches) == (1, 0, 1)


def test_loops_of_known_length_count_as_often_as_they_run_and_need_no_host():
    known = HLO.replace("condition=%cond, body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"32"}}')
    program = GpuProgram(known, parse_thunks(THUNKS, metadata(THUNKS, NAMES)))
    step, others = program.work(loop_steps=32)
    assert (step.num_launches, step.host_visits) == (7, 1)
    assert others.num_launches == 1
    whole, others = program.work(loop_steps=8)
    assert whole.num_launches == 1 + 32 * 7
    assert whole.host_visits == 32, "for each of its branches"
    assert others.num_launches == 0


def test_what_is_in_a_graph_is_launched_at_once():
    lines = THUNKS.splitlines()
    in_graph = "000: kCommandBuffer [source | sink] \n" + "\n".join(
        line if line == "condition:" else f"    {line}" for line in lines
    )
    names = metadata(in_graph, NAMES)
    step, others = GpuProgram(HLO, parse_thunks(in_graph, names)).work(32)
    assert (step.num_launches, step.host_visits, step.dispatches) == (7, 0, 0)
    assert (others.num_launches, others.dispatches) == (1, 1)


def test_a_folder_without_a_program_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has 0 programs jit_chunk for GPUs"):
        read_gpu_program(tmp_path, "chunk")


# -- temporary memory

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
    assert parse_temporaries(DUMP) == [Buffer((10, 20), 0, 400), Buffer((3, 25), 300, 300)]
    assert parse_temporaries("") == []


def test_each_byte_belongs_to_the_largest_array_that_is_there():
    buffers = parse_temporaries(DUMP)
    assert bytes_by_kind(buffers, str) == {"(10, 20)": 400, "(3, 25)": 200}
    assert bytes_by_kind(buffers[::-1], lambda _: "all") == {"all": 600}
    assert bytes_by_kind([], str) == {}


def test_kinds_follow_from_shapes():
    config = read_config(
        {**TINY, "vocab_size": 1000, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
    )
    kind_of = kind_by_shape(config, 4)

    def kinds(*shapes):
        return [kind_of(shape) for shape in shapes]

    assert kinds((7, 1000), (7, 250), (500, 7, 1)) == [LOGITS] * 3
    assert kinds((1000, 32), (1, 32, 1000), (80, 32), (3, 32, 80), (20, 32)) == [COPIES] * 5
    assert kinds((7, 32), (7, 80), (), (7, 125)) == [ACTIVATIONS] * 4
