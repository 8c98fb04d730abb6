"""`groupax plan`: counts against closed forms, planned programs against those of a real engine and learner."""

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from rich.console import Console

import groupax.engine.batch
import groupax.engine.core
import groupax.training.learner
from groupax import GRPOConfig, SamplingParams, add_adapter, init_model
from groupax.cli.main import main
from groupax.core.terminal.activities import Activities
from groupax.core.types import Row
from groupax.models.families import read_config
from groupax.models.flops import forward_flops
from groupax.models.kernels.triton_matmul import grouped_matmul
from groupax.models.lora import LoRAConfig
from groupax.models.params import shard_params
from groupax.models.specs import model_specs
from groupax.models.weights.nf4 import quantization_config, quantize_nf4
from groupax.parallel.accelerators import Chip
from groupax.parallel.mesh import make_mesh
from groupax.runs.build import engine_for, learner_settings, lora_for
from groupax.satellites.planning import fitting
from groupax.satellites.planning.abstract import DoesNotFitError, Program, device_bytes, host_bytes
from groupax.satellites.planning.counting import Counts, bytes_between_hosts, count_program
from groupax.satellites.planning.devices import Target, find_target, prepare
from groupax.satellites.planning.fitting import Plan, Request, find_fitting_plan, make_plan
from groupax.satellites.planning.measured import OTHER, Compiler, Extrapolation, Measured, few_layers, whole_program
from groupax.satellites.planning.run import trace_run
from groupax.satellites.planning.tables import verdict
from groupax.training.learner import Learner
from tests.conftest import TINY, one_device_mesh

SMALL = {**TINY, "num_hidden_layers": 1}
MIXTURE = {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def activities():
    return Activities(Console(file=io.StringIO()))


# -- counting


def counted(function, *shapes, loop_steps=1):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_program(jax.jit(function).trace(*arrays).jaxpr, loop_steps)


@pytest.mark.parametrize("matmul", [lambda rows, w, sizes: lax.ragged_dot(rows, w.mT, sizes), grouped_matmul])
def test_products_are_counted_with_the_bytes_that_they_touch(matmul):
    counts = counted(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (3, 5, 7), (3, 11, 7))
    assert counts == Counts(2.0 * 3 * 5 * 7 * 11, 4.0 * 3 * (5 * 7 + 11 * 7 + 5 * 11))
    assert counted(lambda a: jnp.tanh(a) + a.sum(), (3, 5)) == Counts()
    sizes = jnp.array([3, 0, 5], jnp.int32)

    def loss(rows, matrices):
        return jnp.sum(matmul(rows, matrices, sizes) ** 2)

    shapes, flops = ((8, 5), (3, 7, 5)), 2 * 8 * 5 * 7
    assert counted(loss, *shapes).flops == flops
    assert counted(jax.grad(loss, argnums=(0, 1)), *shapes).flops == 3 * flops


def test_loops_count_as_often_as_they_run_and_of_branches_the_largest():
    def product(x):
        return x @ x

    def until(x):
        return lax.while_loop(lambda y: y[0, 0] < 9, product, x)

    once = 2.0 * 6**3
    assert counted(lambda x: lax.fori_loop(0, 5, lambda _, y: product(y), x), (6, 6)).flops == 5 * once
    assert counted(lambda x: lax.scan(lambda y, _: (until(y), None), x, length=4)[0], (6, 6), loop_steps=3) == (
        Counts(once, 3.0 * 4 * 36).times(12)
    )
    branches = jax.jit(lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, product, x) @ x)
    assert counted(branches, (6, 6)).flops == 3 * once


def test_a_kernels_blocks_count_as_often_as_they_are_multiplied_and_moved():
    from jax.experimental import pallas

    def product(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    def blocks(x, y):
        return pallas.pallas_call(
            product,
            grid=(3, 2),
            in_specs=[pallas.BlockSpec((8, 16), lambda i, j: (i, 0)), pallas.BlockSpec((16, 32), lambda i, j: (0, j))],
            out_specs=pallas.BlockSpec((8, 32), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((24, 64), x.dtype),
        )(x, y)

    # rows of x stay while all columns of y go by; those come again for each of them
    moved = 4.0 * (3 * 8 * 16 + 6 * 16 * 32 + 6 * 8 * 32)
    assert counted(blocks, (24, 16), (16, 64)) == Counts(2.0 * 24 * 16 * 64, moved)


def exchange(function, shape, out):
    mesh = make_mesh((1, 2, 1, 2, 1))
    program = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=out, check_vma=False)
    traced = jax.jit(program).trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    return dict(count_program(traced.jaxpr).exchanged)


WHOLE, ALONG = PartitionSpec(), PartitionSpec("tp")
BOTH = ("fsdp", "tp")


@pytest.mark.parametrize(
    ("function", "out", "expected"),
    [
        (lambda x: lax.psum(x, "tp"), WHOLE, {"all-reduce": 2 * 128 * 1 / 2}),
        (lambda x: lax.psum(x, BOTH), WHOLE, {"all-reduce": 2 * 128 * 3 / 4}),
        (lambda x: lax.psum([x, x], ("dp", "tp")), [WHOLE, WHOLE], {"all-reduce": 2 * 256 * 1 / 2}),
        (lambda x: lax.pmax(x, "tp"), WHOLE, {"all-reduce": 128}),
        (lambda x: lax.all_gather(x, BOTH, tiled=True), WHOLE, {"all-gather": 128 * 3}),
        (lambda x: lax.psum_scatter(x, BOTH, tiled=True), ALONG, {"reduce-scatter": 128 * 3 / 4}),
        (lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True), ALONG, {"all-to-all": 128 * 1 / 2}),
        (lambda x: lax.psum(x, ("dp", "sp")), WHOLE, {}),
        (lambda x: lax.all_gather(x, "ep"), WHOLE, {}),
        (lambda x: x + lax.axis_index("tp").astype(x.dtype), ALONG, {}),
        (lambda x: lax.psum(lax.all_gather(x, "tp"), "tp"), WHOLE, {"all-gather": 128, "all-reduce": 256}),
    ],
)
def test_exchanges_have_their_closed_forms(function, out, expected):
    assert exchange(function, (8, 8), out) == expected


def test_exchanges_that_are_not_counted_are_an_error():
    with pytest.raises(NotImplementedError, match=r"ppermute over .*tp.*is not counted"):
        exchange(lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]), (8, 8), ALONG)


def test_what_hosts_send_each_other_is_shared_by_their_devices():
    for hosts, expected in (((0, 0, 0, 0), 0), ((0, 0, 1, 1), 12), ((0, 1, 2, 3), 24)):  # 12: two rings, a port each
        assert bytes_between_hosts(24.0, [SimpleNamespace(process_index=host) for host in hosts]) == expected


@pytest.mark.heavy
def test_a_models_programs_count_its_matrices_as_its_table_of_weights_does():
    args = GRPOConfig(
        prompts_per_step=2, num_generations=4, max_prompt_length=33, max_completion_length=32, dtype="float32", beta=0.1
    )

    def of(**change):
        """Operations of scoring, of a micro-batch, and of a forward pass by the formula."""
        config = read_config({**TINY, **change})
        run = trace_run(config, one_device_mesh(), args)
        assert (run.num_micro_batches, run.micro_batch_cells) == (1, 320), "2 x (32 + 4 x 32): nothing is padded"
        found = {each.name: count_program(each.traced.jaxpr, each.loop_steps).flops for each in run.programs}
        return np.array([found["score"], found["micro_step"], forward_flops(config, [(32, [32] * 4)] * 2)])

    few, wide, wordy = of(), of(intermediate_size=192), of(vocab_size=1120)
    scored, stepped, expected = wide - few
    assert scored == expected
    assert stepped == 3 * expected
    scored, stepped, expected = wordy - few
    # there is room for a quarter more completions, and the sum over a vocabulary is two more columns of 32
    assert 1 <= scored / expected <= 1.25 * (1 + 2 / 32)
    assert 3.8 < stepped / scored <= 4, "logits are computed again"
    assert few[2] < few[0] < few[1] / 3


# -- models with a few layers

DEEP = {**TINY, "num_hidden_layers": 9}


def layers_of(models):
    return [(model.config.num_layers, model.weight) for model in models]


def test_an_adapter_of_some_layers_only_is_planned_with_all_of_them():
    config = read_config(DEEP)
    assert len(few_layers(config, LoRAConfig(r=4))) == 2
    for modules in (r".*layers\.7\..*q_proj", ["8.self_attn.q_proj"]):
        assert layers_of(few_layers(config, LoRAConfig(r=4, target_modules=modules))) == [(9, 1.0)]


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{}, {"lora_r": 4, "beta": 0.1, "dtype": "bfloat16"}])
def test_what_all_layers_count_follows_from_a_few(settings):
    config = replace(read_config(DEEP), windows=(None, 8, 8, None, 8, 8, 8, 8, 8))
    args = GRPOConfig(prompts_per_step=4, num_generations=4, max_completion_length=32, max_prompt_length=32, **settings)
    lora, mesh = lora_for(args, None), make_mesh((1, 4, 1, 1, 1))
    run, few = trace_run(config, mesh, args, lora), few_layers(config, lora)
    runs = [trace_run(model.config, mesh, args, lora, like=run) for model in few]
    for index, program in enumerate(run.programs):
        parts = Extrapolation(program, few, [each.programs[index] for each in runs])
        assert parts.counts == whole_program(config, program).counts, program.name


# -- programs


def shapes_of(arguments):
    return [(tuple(np.shape(x)), jnp.result_type(x)) for x in jax.tree.leaves(arguments)]


def planned_shapes(program):
    return [(tuple(x.shape), x.dtype) for x in jax.tree.leaves(program.traced.args_info)]


class Recorded(Exception):
    """Enough is known."""


def recording(monkeypatch, module, name, last=True):
    """The arguments of calls of a program; the last of what is wanted is not run."""
    calls, program = [], getattr(module, name)

    def record(*arguments, **static):
        calls.append((arguments, shapes_of(arguments)))
        if last:
            raise Recorded
        return program(*arguments, **static)

    monkeypatch.setattr(module, name, record)
    return calls


def placed_bytes(tree, kind="device"):
    """Of arrays on the first device, or of its host; numbers of the host are none."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.sharding.memory_kind == kind]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def pointers(tree):
    return {x.addressable_data(0).unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}


def real_kinds(learner):
    """What a learner has on its devices, by the names that plans have for it."""
    kinds = {"masters": learner.state.params, "optimizer": learner.state.opt_state}
    if learner.dtype != jnp.float32:
        kinds["policy"] = learner.trained()
    if learner.frozen:
        kinds["base"] = learner.frozen
    elif learner.reference is not None:
        kinds["reference"] = learner.reference
    return kinds


CASES = {
    "data": ((4, 1, 1, 1, 1), {}),
    "fsdp": ((1, 4, 1, 1, 1), {"beta": 0.1, "dtype": "bfloat16"}),
    "tp": ((1, 2, 1, 2, 1), {"updates_per_rollout": 2, "optimizer": "muon"}),
    "sp": ((1, 1, 1, 1, 4), {"top_entropy_quantile": 0.5, "num_iterations": 2}),
    "adapter": ((4, 1, 1, 1, 1), {"lora_r": 4, "lora_dropout": 0.1}),
    "split-adapter": ((1, 2, 1, 1, 2), {"lora_r": 4, "beta": 0.1, "dtype": "bfloat16", "updates_per_rollout": 2}),
    "quantized": ((4, 1, 1, 1, 1), {"lora_r": 4, "base_weights": "nf4"}),
    "bfloat16": ((4, 1, 1, 1, 1), {"decoding_weights": "bfloat16", "rollout_correction": "token_truncate"}),
    "shared": ((4, 1, 1, 1, 1), {"decoding_tp": 2, "kv_cache_dtype": "bfloat16"}),
    "shared-as-trained": ((2, 1, 1, 2, 1), {"decoding_tp": 2}),
    "experts": ((1, 2, 2, 1, 1), {"share_prefix": "never"}),
    "offloaded": (
        (1, 4, 1, 1, 1),
        {"beta": 0.1, "dtype": "bfloat16", "offload_optimizer": True, "offload_reference": True},
    ),
    "small-cache": ((4, 1, 1, 1, 1), {"kv_cache_gb": 1e-3, "micro_batch_tokens": 128}),
}
QUICK = ("split-adapter",)


@pytest.mark.drawn(3)
@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.heavy) for name in CASES]
)
def test_what_is_planned_is_what_a_real_run_has(name, monkeypatch):
    shape, settings = CASES[name]
    quick = name in QUICK
    longest = (20, 24 if quick else 90)
    args = GRPOConfig(
        **{
            "prompts_per_step": 4,
            "num_generations": 4,
            "max_prompt_length": longest[0],
            "max_completion_length": longest[1],
            **settings,
        }
    )
    mesh = make_mesh(shape)
    model = init_model(MIXTURE if name == "experts" else SMALL, mesh=mesh)
    lora = lora_for(args, None)
    run = trace_run(model.config, mesh, args, lora)
    programs = {program.name: program for program in run.programs}
    if args.base_weights == "nf4":
        specs = model_specs(model.config)
        quantized = jax.tree.map(lambda spec, x: quantize_nf4(x) if spec.is_layer_matrix else x, specs, model.params)
        model = replace(model, params=shard_params(model.config, mesh, quantized))
    model = add_adapter(model, lora) if lora else model
    learner = Learner(model, learner_settings(args), 10, longest)

    kinds = real_kinds(learner)
    assert {kind: device_bytes({kind: tree}) for kind, tree in run.residents.items()} == {
        kind: placed_bytes(tree) for kind, tree in kinds.items()
    }

    assert {kind: host_bytes({kind: tree}) for kind, tree in run.residents.items()} == {
        kind: placed_bytes(tree, "pinned_host") for kind, tree in kinds.items()
    }

    admits = recording(monkeypatch, groupax.engine.batch, "admit", last=False)
    chunks = recording(monkeypatch, groupax.engine.batch, "decode_chunk", last=quick)
    engine = engine_for(args, model, learner, (1,))
    prompts = [np.arange(2, 2 + longest[0]) + index for index in range(run.num_rows // args.num_generations)]
    try:
        engine.generate(prompts, SamplingParams(n=args.num_generations, max_tokens=longest[1], ignore_eos=True))
    except Recorded:
        pass
    else:
        assert len(chunks) == programs["decode_chunk"].runs
    by_size = partial(max, key=lambda call: sum(math.prod(shape) for shape, _ in call[1]))
    (params, cache, *_), decoded = by_size(chunks)
    assert planned_shapes(programs["decode_chunk"]) == decoded
    planned = programs["decode_chunk"].arguments
    assert device_bytes({"": planned["kv cache"]}) == _bytes_of_shapes(cache, chunks)
    copied = not pointers(params) <= pointers(learner.policy)
    assert ("rollout weights" in planned) == copied
    decoded_with = {kind: tree for kind, tree in planned.items() if kind != "kv cache"}
    assert device_bytes(decoded_with) == placed_bytes(params)
    assert len(admits) == programs["admit"].runs
    if quick:
        assert planned_shapes(programs["admit"]) == admits[0][1]

    words, logp = np.full(longest[1], 5, np.int32), np.zeros(longest[1], np.float32)
    more = {
        "ref_logp": logp if args.beta else None,
        "old_logp": logp if run.num_updates > 1 else None,
        "sampler_logp": None if args.rollout_correction == "none" else logp,
    }
    groups = np.repeat(np.arange(4), 4).tolist()
    rows = [Row(g, prompts[g].astype(np.int32), words, words > 0, logp + 1, logp, **more) for g in groups]
    if args.top_entropy_quantile < 1:
        scored = recording(monkeypatch, groupax.training.learner, "score")
        with pytest.raises(Recorded):
            learner.update(rows)
        assert not {shape for shape, _ in scored[0][1]} - {shape for shape, _ in planned_shapes(programs["score"])}
        learner.shapes = {}
        rows = [replace(row, policy_mask=row.mask) for row in rows]
        monkeypatch.setattr(Learner, "_with_policy_masks", lambda self, rows: rows)
    steps = recording(monkeypatch, groupax.training.learner, "micro_step")
    with pytest.raises(Recorded):
        learner.update(rows)
    assert planned_shapes(programs["micro_step"]) == steps[0][1]
    assert device_bytes({"": programs["micro_step"].arguments["gradients"]}) == placed_bytes(steps[0][0][1])


def _bytes_of_shapes(cache, chunks):
    """Of the largest cache, which may be deleted by now."""
    shards = jax.tree.map(lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize, cache)
    assert chunks
    return sum(jax.tree.leaves(shards))


def test_what_no_device_can_hold_is_told_before_anything_is_compiled():
    config, args = read_config(SMALL), GRPOConfig(max_completion_length=32, prompts_per_step=4, num_generations=4)
    masters = 3.0 * 4 * sum(math.prod(spec.shape) for spec in jax.tree.leaves(model_specs(config)))
    for mesh, memory, message, in_rollout in (
        (make_mesh(), masters, "weights and optimizer alone need", False),
        (make_mesh(), masters + 50_000.0, "are left for a rollout's keys and values: a completion of 32", True),
        (make_mesh((1, 4, 1, 1, 1)), masters / 4 + 10_000, "the weights for decoding rollouts need", True),
    ):
        with pytest.raises(DoesNotFitError, match=message) as raised:
            trace_run(config, mesh, args, None, memory)
        assert raised.value.in_rollout == in_rollout
    assert trace_run(config, make_mesh(), args, None, masters + 10_000_000).cache.num_slots == 4


# -- devices


def test_slices_and_virtual_devices_have_names(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=3"})
    monkeypatch.setattr(sys, "path", [])
    prepare("cpu:8", tmp_path)
    assert os.environ["XLA_FLAGS"].split() == ["--a", "--xla_force_host_platform_device_count=8"]
    with pytest.raises(ValueError, match="cpu:8 was requested, but jax was started with 4 CPU devices"):
        find_target("cpu:8")
    library = tmp_path / "libtpu" / "libtpu.so"
    with pytest.raises(ValueError, match=rf"there is no {library}; get it with pip install --no-deps --target"):
        prepare("v4-64", tmp_path)
    library.parent.mkdir()
    library.touch()
    for name, slice_name in [("TPU v5e-32", "v5e-32"), ("v5litepod-32", "v5e-32"), ("tpu-v4-64", "v4-64")]:
        prepare(name, tmp_path)
        assert (os.environ["TPU_ACCELERATOR_TYPE"], os.environ["TPU_LIBRARY_PATH"]) == (slice_name, str(library))
        assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mi300-8",
            "no GPUs 'mi300-8'; kinds of GPUs are t4, .*; TPU slices are e.g. v4, v5e, v5p, v6e-8; virtual CPU",
        ),
        ("rtx4080-1", r"custom:24GB,1008GB/s,165TF-1; did you mean rtx4090"),
        ("custom:24,1008,165-1", "or your own figures, custom:24GB,1008GB/s,165TF-1"),
        ("custom:0GB,1008GB/s,165TF-1", "or your own figures"),
        ("h100:8", "no GPUs 'h100:8'; kinds of GPUs are t4, a10, .*, e.g. h100-8"),
        ("h100-12", "several hosts have 8 GPUs each, so that the number must be a multiple"),
        ("rtx4090-16", "plans for rtx4090 are limited to one host of at most 8 GPUs"),
        ("cpu:0", "virtual CPU devices are cpu:8"),
        ("v4-4", "'v4-4' is not a known size of a v4 slice; sizes are v4-8, v4-16, v4-32"),
        ("v6e-512", "the largest known v6e slice is v6e-256"),
    ],
)
def test_devices_that_do_not_exist_are_told(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare(name, tmp_path)


# -- what fits


def tiny_chip(memory):
    return Chip(("none",), 1e12, memory, 1e9, 1e9, 1e8)


@pytest.fixture
def few_bytes(monkeypatch):
    """Slices v5e-1, v5e-2 and v5e-4 are CPU devices here, with so little memory as is asked for."""

    def have(memory):
        def target(name):
            return Target(name, tuple(jax.devices()[: int(name.partition("-")[2])]), tiny_chip(memory))

        monkeypatch.setattr(fitting, "find_target", target)

    return have


TRAIN = GRPOConfig(
    prompts_per_step=4, num_generations=4, max_prompt_length=32, max_completion_length=64, micro_batch_tokens=1024
)


def a_plan(largest, args=TRAIN, devices="v5e-1", shape=(1, 1, 1, 1, 1), fault=None):
    """What is known when a program is too large."""
    mesh = make_mesh(shape, devices=jax.devices()[: math.prod(shape)])
    run = None if fault else trace_run(read_config(TINY), mesh, args)
    programs = tuple(
        Measured(name, 1, {OTHER: 2e9 if name == largest else 1e8}, Counts(), 0.0)
        for name in ("admit", "decode_chunk", "micro_step", "apply_update")
    )
    return Plan(
        Request(devices, args), Target(devices, tuple(mesh.devices.flat), tiny_chip(1e9)), mesh, run, programs, fault
    )


def changes(plan):
    return [change.changes[-1] for change in fitting._changes(read_config(TINY), plan)]


@pytest.mark.heavy
def test_the_nearest_change_comes_first():
    plan = a_plan("micro_step")
    assert not plan.fits
    half, offload = plan.run.micro_batch_cells // 2, ["--offload_optimizer"]
    assert changes(plan) == ["--gradient_checkpointing full", f"--micro_batch_tokens {half}", *offload, "v5e-2"]
    assert changes(a_plan("apply_update")) == [*offload, "v5e-2"], "one device splits nothing"
    two = a_plan("apply_update", shape=(2, 1, 1, 1, 1), devices="v5e-2")
    assert changes(two) == ["--mesh 1,-1,1,1,1", *offload, "v5e-4"]
    scored = a_plan("apply_update", replace(TRAIN, beta=0.1))
    assert changes(scored) == ["--offload_reference", *offload, "v5e-2"]
    small = replace(TRAIN, gradient_checkpointing="full", micro_batch_tokens=96, mesh="1,1,1,1,1")
    fixed = list(fitting._changes(read_config(TINY), a_plan("micro_step", small)))[-1]
    assert (fixed.devices, fixed.args.mesh) == ("v5e-2", "1,-1,1,1,1"), "the mesh of one device is none of two"


@pytest.mark.heavy
def test_settings_are_found_that_fit(few_bytes):
    config, compiler = read_config({**TINY, "vocab_size": 2048}), Compiler()
    few_bytes(1e12)
    whole = make_plan(config, Request("v5e-1", TRAIN), None, compiler, activities())
    assert whole.fits
    assert whole.largest.name == "micro_step"
    sizes = {program.name: program.total for program in whole.programs}
    for part in (0.95, 0.6, 0.45):
        few_bytes(part * whole.largest.total)
        plan = make_plan(config, Request("v5e-1", TRAIN), None, compiler, activities())
        assert {program.name: program.total for program in plan.programs} == sizes
        assert not plan.fits
        assert verdict(plan).startswith("DOES NOT FIT: the peak is ")
        found = find_fitting_plan(config, plan, None, compiler, activities())
        assert found.fits
        assert found.request.changes[0] == "--gradient_checkpointing full"
        assert found.largest.total <= part * whole.largest.total
    assert found.request.changes[1].startswith("--micro_batch_tokens")


class Uncompilable:
    """A traced function whose compilation fails."""

    def __init__(self, message):
        self.message = message

    def lower(self):
        return self

    def as_text(self):
        return self.message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def uncompilable(message):
    return Program("failing", lambda: Uncompilable(message), {}, 1)


def test_a_compiler_that_gives_up_says_how_much_memory_it_takes():
    compiler = Compiler()
    full = "RESOURCE_EXHAUSTED: x temporaries (1.50G) exceeds available HBM"
    compiled = compiler.compiled(uncompilable(full))
    assert compiled.temporary_bytes == 1.5 * 2**30
    assert compiler.compiled(uncompilable(full)) is compiled
    for message in ("INTERNAL: Mosaic failed", "RESOURCE_EXHAUSTED: of threads"):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            compiler.compiled(uncompilable(message))


# -- the command


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


LENGTHS = ["--max_completion_length", "16", "--prompts_per_step", "2", "--num_generations", "2"]


@pytest.mark.heavy
def test_a_plan_is_told_as_tables_and_as_numbers(config_file, tmp_path):
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "groupax", "plan", "--model", str(config_file), "--devices", "cpu:2", *LENGTHS]
    done = subprocess.run([*command, "--all_layers", "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cpu:2: 2 devices, dp 2\n4 completions of 16 tokens in each rollout, 1 update on them" in done.stdout
    [record] = json.loads(out.read_text())
    assert (record["fits"], record["fault"], record["mesh"]) == (True, None, [2, 1, 1, 1, 1])
    names = ["admit", "decode_chunk", "micro_step", "all_reduce", "apply_update"]
    assert [program["name"] for program in record["programs"]] == names
    lines = done.stdout.splitlines()
    for heading in ("memory of a device, MB", "work of a device in one run of each program"):
        first, last = (index for index, line in enumerate(lines) if line == heading)
        assert lines[first + 2].split()[0] == names[0], "an estimate comes first"
        assert [line.split()[0] for line in lines[last + 2 :][: len(names)]] == names
    largest = max(program["total"] for program in record["programs"])
    assert lines[-1] == f"the peak is {largest / 1e6:.2f} MB per device, in micro_step"
    assert all(program["total"] == sum(program["memory"].values()) for program in record["programs"])


@pytest.mark.heavy
def test_what_does_not_fit_ends_with_status_1(config_file, tmp_path, few_bytes, capsys, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "libtpu.so").touch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    few_bytes(0.9 * 12 * sum(math.prod(spec.shape) for spec in jax.tree.leaves(model_specs(read_config(SMALL)))))
    base = ["plan", "--model", str(config_file), "--libtpu", str(tmp_path), "--json", str(tmp_path / "plan.json")]
    assert main([*base, "--devices", "v5e-1", *LENGTHS]) == 1
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("does not fit: weights and optimizer alone need")
    [asked] = json.loads((tmp_path / "plan.json").read_text())
    assert (asked["fits"], asked["changes"], "programs" in asked) == (False, [], False)
    assert last == "no change of a few settings makes it fit", "activations take more than all weights"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base_weights", "nf4"], "base_weights 'nf4' quantizes the base of an adapter; set lora_r"),
        (["--rollout_servers", "http://a:1"], "is not supported by plans"),
        (
            ["--max_staleness", "1", "--rollout_correction", "token_truncate"],
            "max_staleness 1 is not supported by plans",
        ),
        (["--model", "nothing"], "nothing"),
        (["--mesh", "1,1,1,4,1"], "kv_heads (2) is not divisible by tp=4"),
        (["--recipe", "gsm8k", "--max_completion_length", "513"], "max_completion_length 513 leaves no room"),
    ],
)
def test_runs_that_are_not_planned_for_are_refused(config_file, words, message, capsys):
    assert main(["plan", "--devices", "cpu:4", "--model", str(config_file), *words]) == 2
    assert message in capsys.readouterr().err


def test_defaults_are_fitted_and_a_4_bit_base_is_planned_as_one(config_file, monkeypatch, capsys):
    planned = []

    def of_asked(config, request, *_, **__):
        planned.append((config, request.args.max_completion_length, request.args.base_weights))
        raise Recorded

    monkeypatch.setattr(fitting, "make_plan", of_asked)
    config_file.write_text(json.dumps({**SMALL, "quantization_config": quantization_config("bfloat16")}))
    command, positions = ["plan", "--devices", "cpu:4", "--model", str(config_file)], SMALL["max_position_embeddings"]
    with pytest.raises(Recorded):
        main([*command, "--recipe", "gsm8k", "--lora_r", "4"])
    assert planned == [(read_config(SMALL), positions // 2, "nf4")]
    told = capsys.readouterr().err
    assert f"completions have at most {positions // 2} tokens instead of the default 512" in told
    assert main(command) == 2
    assert "have 4 bits; train an adapter" in capsys.readouterr().err
