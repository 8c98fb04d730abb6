"""The kernels, host visits and memory traffic of programs compiled for GPUs, read from what XLA writes about them."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

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


@pytest.fixture(scope="module")
def gate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("gpu_programs")


@pytest.fixture(scope="module")
def hlo(gate):
    return importlib.import_module("hlo")


@pytest.fixture(scope="module")
def kernels(gate):
    return importlib.import_module("gpu_kernels")


@pytest.fixture
def chunk(kernels):
    return kernels.GpuProgram(HLO, kernels.parse_thunks(THUNKS, metadata(THUNKS, NAMES)))


def test_instructions_have_their_types_and_origins(hlo):
    module = hlo.parse_hlo(HLO)
    call = module.computations["body"]["pallas_call.1"]
    assert (call.opcode, call.target) == ("custom-call", "__gpu$xla.gpu.triton")
    assert call.op_name == "jit(chunk)/while/body/pallas_call"
    assert module.lines[call.frame] == "/repo/groupax/engine/decode.py:77"
    assert call.arrays == (hlo.Array("bf16", (64, 8)),)
    assert call.operands == ("cache.1", "weight.1")
    loop = module.computations["main"]["while.1"]
    assert [str(array) for array in loop.arrays] == ["s32[]", "bf16[64,1024]", "bf16[1024,1024]"]
    assert loop.trip_count is None
    assert module.computations["many"]["while.2"].trip_count == 4
    assert module.computations["fused_update"]["update.1"].operands == ("param_0", "slice.1", "constant_1", "param_2")


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("pred", 24), ("s4", 12), ("bf16", 48), ("f8e4m3fn", 24), ("f32", 96), ("c64", 192), ("token", 0)],
)
def test_arrays_have_the_bytes_of_their_dtypes(dtype, num_bytes, hlo):
    assert hlo.Array(dtype, (2, 3, 4)).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("scope", "name", "read", "written"),
    [
        ("body", "gemm.1", 2 * (64 * 1024 + 1024 * 1024), 4 * 64 * 1024),
        ("body", "pallas_call.1", 2 * (64 * 1024 + 1024 * 1024), 2 * 64 * 8),
        ("body", "copy.1", 2 * 64 * 1024, 2 * 64 * 1024),
        ("body", "update.2", 2 * 64 + 4, 2 * 64),  # one of eight columns, into the cache in place, and an index
        ("few", "fusion.4", 4 * 64 * 1024, 8 * 64 * 1024),
        ("many", "fusion.3", 4 * 64 * 1024, 4),
        ("body", "weight.1", 0, 0),
    ],
)
def test_slices_and_updates_in_place_move_only_their_elements(scope, name, read, written, hlo):
    module = hlo.parse_hlo(HLO)
    computation = module.computations[scope]
    assert module.traffic(computation[name], computation) == (read, written)


def test_what_a_kernel_updates_in_place_is_not_written(hlo):
    aliased = HLO.replace('triton", ', 'triton", output_to_operand_aliasing={{1}: (0, {})}, ', 1)
    aliased = aliased.replace(
        "pallas_call.1 = bf16[64,8]{1,0}", "pallas_call.1 = (bf16[64,8]{1,0}, bf16[64,1024]{1,0})"
    )
    body = hlo.parse_hlo(aliased).computations["body"]
    assert len(body["pallas_call.1"].arrays) == 2
    assert hlo.parse_hlo(aliased).traffic(body["pallas_call.1"], body)[1] == 2 * 64 * 8


def test_matmuls_within_fusions_are_counted(hlo):
    module = hlo.parse_hlo(HLO)
    body = module.computations["body"]
    assert module.flops(body["gemm.1"], body) == 2 * 64 * 1024 * 1024
    assert module.flops(body["copy.1"], body) == 0


def test_a_text_that_is_not_hlo_is_refused(hlo, kernels):
    with pytest.raises(ValueError, match="not the text of an HLO module: 'module @jit_f'"):
        hlo.parse_hlo("module @jit_f")
    with pytest.raises(ValueError, match="unknown line in XLA's sequence of thunks: 'thunks: 3'"):
        kernels.parse_thunks("thunks: 3", "")


def test_a_step_is_an_iteration_with_its_smallest_branches(chunk, hlo, gate):
    step, others = chunk.work(loop_steps=32)
    # the comparison, three kernels in a graph, the two of the sort, and the copy in a slice
    assert step.num_launches == 7
    assert step.host_visits == 2, "for the loop's end and for the branch"
    assert step.dispatches == 5
    assert (others.num_launches, others.host_visits, others.dispatches) == (1, 0, 1)
    module = hlo.parse_hlo(HLO)
    counts = gate.counted(module, step)
    assert (counts["copies"], counts["sorts"], counts["calls"]) == (1, 1, {"__gpu$xla.gpu.triton": 1})
    assert counts["GFLOP of XLA's matmuls"] == 2 * 64 * 1024 * 1024 / 1e9
    assert any(
        "pallas_call.1  __gpu$xla.gpu.triton  engine/decode.py:77  bf16[64,8]" in line
        for line in gate.described(module, step)
    )


def test_loops_of_known_length_count_as_often_as_they_run_and_need_no_host(kernels):
    known = HLO.replace("condition=%cond, body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"32"}}')
    program = kernels.GpuProgram(known, kernels.parse_thunks(THUNKS, metadata(THUNKS, NAMES)))
    step, others = program.work(loop_steps=32)
    assert (step.num_launches, step.host_visits) == (7, 1)
    assert others.num_launches == 1
    whole, others = program.work(loop_steps=8)
    assert whole.num_launches == 1 + 32 * 7
    assert whole.host_visits == 32, "for each of its branches"
    assert others.num_launches == 0


def test_what_is_in_a_graph_is_launched_at_once(kernels):
    lines = THUNKS.splitlines()
    in_graph = "000: kCommandBuffer [source | sink] \n" + "\n".join(
        line if line == "condition:" else f"    {line}" for line in lines
    )
    names = metadata(in_graph, NAMES)
    step, others = kernels.GpuProgram(HLO, kernels.parse_thunks(in_graph, names)).work(32)
    assert (step.num_launches, step.host_visits, step.dispatches) == (7, 0, 0)
    assert (others.num_launches, others.dispatches) == (1, 1)


def test_a_folder_without_a_program_is_an_error(tmp_path, kernels):
    with pytest.raises(ValueError, match="has 0 programs jit_chunk for GPUs"):
        kernels.read_gpu_program(tmp_path, "chunk")


def test_products_of_widened_operands_are_found(gate):
    def products(weight, x):
        inner = jax.jit(lambda weight, x: jnp.dot(weight.T, x))
        looped, _ = jax.lax.scan(lambda x, _: (x @ weight.astype(jnp.float32), None), x, None, length=3)
        narrow = jnp.dot(weight, weight, preferred_element_type=jnp.float32)
        return inner(weight.astype(jnp.float32), x), looped, x @ x, narrow

    arrays = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    assert gate.count_widened_products(jax.jit(products).lower(*arrays)) == 2


# -- the table


def test_worse_numbers_are_said_with_both_values(gate):
    known = {"kernels of a layer": 21, "temporary MB": 233.6, "calls": {"__cudnn$fmhaSoftmax": 2}, "host visits": 2}
    found = {"kernels of a layer": 22, "temporary MB": 233.7, "calls": {}, "host visits": 0, "sorts": 1}
    worse, better = gate.differences(found, known)
    assert worse == [
        "kernels of a layer: 21 in the table, now 22",
        "calls: {'__cudnn$fmhaSoftmax': 2} in the table, now {}",
        "sorts: None in the table, now 1",
    ]
    assert better == ["host visits: 2 in the table, now 0"]


def test_what_a_layer_adds_is_the_difference(gate):
    numbers = [{"kernels": n, "temporary MB": m, "MB moved": 2.0 * m, "sorts": 0} for n, m in ((83, 5.0), (104, 6.5))]
    split = gate.by_layer(*numbers, layers=2)
    assert (split["kernels of a layer"], split["kernels outside layers"]) == (21, 41)
    assert (split["temporary MB of a layer"], split["temporary MB outside layers"]) == (1.5, 2.0)
    assert "kernels" not in split
