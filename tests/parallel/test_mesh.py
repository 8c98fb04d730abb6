"""Models split over a mesh and layers as a loop: the same numbers as on one device and one by one."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from groupax import GRPOConfig, init_model, load_model, save_model
from groupax.cli.main import main
from groupax.core.types import Row
from groupax.data.tokenizer import load_tokenizer
from groupax.models.decoder import PassOptions, forward
from groupax.models.execution import DIRECT, execution_for
from groupax.models.families import read_config
from groupax.models.lora import LoRAConfig
from groupax.models.weights.checkpoint import add_adapter, reshard
from groupax.parallel.mesh import decoding_mesh, make_mesh, slices_along
from groupax.runs.build import learner_settings
from groupax.satellites.planning.counting import count_program
from groupax.satellites.planning.run import trace_run
from groupax.training.learner import Learner
from tests.conftest import LATENTS, TINY, assert_trees_match, one_device_mesh
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_agreement import DELTA, LFM2

EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
MIXTURE = {**TINY, **EXPERTS, "model_type": "mixtral", "num_local_experts": 4}
DEEPSEEK = {**LATENTS, "model_type": "deepseek_v3", "n_routed_experts": 6, "n_group": 3, "topk_group": 2}
COMMAND = (
    "train --model model --dataset prompts.jsonl --eval_dataset prompts.jsonl --reward_funcs letters_reward:letters "
    "--prompts_per_step 2 --num_generations 4 --max_completion_length 8 --eval_steps 1 --save_steps 1 --optimizer sgd "
    "--learning_rate 1.0 --lr_scheduler_type constant --progress_bar none"
)
ROOT = Path(__file__).parents[2]
REWARD = "def letters(completions, **_):\n    return [text.count('a') for text in completions]\n"


def some_rows(num_words):
    rng = np.random.default_rng(0)
    rows = []
    for group in range(4):
        prompt = rng.integers(3, num_words, rng.integers(2, 20)).astype(np.int32)
        for _ in range(2):
            T = int(rng.integers(3, 20))
            words = rng.integers(3, num_words, T).astype(np.int32)
            advantages = np.full(T, rng.normal(), np.float32)
            rows.append(Row(group, prompt, words, np.ones(T, bool), advantages, np.full(T, -3.0, np.float32)))
    return rows


def after_updates(model, num=1, **settings):
    """Trained weights, and the gradient's norm, of an optimizer whose updates are as large as the gradients."""
    args = GRPOConfig(optimizer="sgd", learning_rate=1.0, lr_scheduler_type="constant", entropy_coef=0.01, **settings)
    learner = Learner(model, learner_settings(args), 10)
    for _ in range(num):
        metrics = learner.update(some_rows(model.config.vocab_size)).metrics
    return learner, metrics


def assert_same_update(model, shape, replicated=(), atol=2e-6, **settings):
    split = reshard(model, make_mesh(shape), replicated)
    one, on_one = after_updates(reshard(model, one_device_mesh()), **settings)
    many, on_many = after_updates(split, **settings)
    assert on_many["grad_norm"] == pytest.approx(on_one["grad_norm"], rel=1e-5)
    assert_trees_match(one.state.params, many.state.params, atol=atol, rtol=0)
    return many


CASES = {
    "fsdp-tp": ({}, (1, 2, 1, 2, 1), {}),
    "fsdp": ({}, (1, 4, 1, 1, 1), {"gradient_checkpointing": "full"}),
    "tp-beyond-kv-heads": ({"model_type": "qwen2"}, (1, 1, 1, 4, 1), {"replicated": ["kv_heads"]}),
    "tp-sp": ({"model_type": "qwen3", "head_dim": 16}, (1, 1, 1, 2, 2), {}),
    "sp": ({}, (1, 1, 1, 1, 4), {}),
    "experts": (MIXTURE, (1, 2, 2, 1, 1), {"share_prefix": "never", "scan_layers": True}),
    "experts-tp-sp": (MIXTURE, (1, 1, 1, 2, 2), {"share_prefix": "never"}),
    "learned-positions": ({"model_type": "gpt2"}, (1, 2, 1, 2, 1), {}),
    "joint-matrix": ({"model_type": "gpt_neox", "attention_bias": True}, (1, 1, 1, 2, 2), {}),
    "convolutions": ({"model_type": "lfm2", **LFM2}, (1, 1, 1, 2, 2), {}),
    "delta-nets": ({"model_type": "qwen3_5_text", **DELTA}, (1, 2, 1, 2, 1), {"gradient_checkpointing": "full"}),
    "delta-nets-sp": ({"model_type": "qwen3_5_text", **DELTA}, (1, 1, 1, 2, 2), {"scan_layers": True}),
    "latent-vectors": (DEEPSEEK, (1, 2, 1, 2, 1), {"gradient_checkpointing": "full"}),
    "latent-vectors-scanned": (DEEPSEEK | {"first_k_dense_replace": 0}, (1, 2, 2, 1, 1), {"scan_layers": True}),
    "whole-heads": ({"model_type": "olmo2"}, (1, 2, 1, 2, 1), {"replicated": ["heads", "kv_heads"]}),
    **{
        f"adapter{number}": (change, shape, {"adapter": lora})
        for number, (change, shape, lora) in enumerate(
            [
                ({}, (1, 2, 1, 2, 1), {"use_dora": True, "init_lora_weights": "pissa"}),
                (DEEPSEEK, (1, 2, 1, 2, 1), {"use_dora": True}),
                ({}, (1, 1, 1, 2, 2), {}),
            ]
        )
    },
    "whole-vocabulary": ({"model_type": "cohere", "vocab_size": 97}, (2, 1, 1, 2, 1), {"replicated": ["vocab"]}),
}
HEAVY = ("fsdp-tp", "tp-sp", "experts", "latent-vectors", "adapter0", "adapter1")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("change", "shape", "settings"),
    [
        pytest.param(*CASES[name], id=name, marks=getattr(pytest.mark, "heavy" if name in HEAVY else "long"))
        for name in CASES
    ],
)
def test_meshes_and_families_give_the_gradients_of_one_device(change, shape, settings):
    model, settings = init_model({**TINY, **change}, mesh=one_device_mesh()), dict(settings)
    if (given := settings.pop("adapter", None)) is not None:
        lora = LoRAConfig(r=4, lora_alpha=8, bias="none", modules_to_save=["norm"], **given)
        model, rng = add_adapter(model, lora), np.random.default_rng(0)
        # equal factors would cancel in gradients, up to float32's rounding
        trained = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), model.adapter.trained)
        model = replace(model, adapter=replace(model.adapter, trained=trained))
    else:
        model = replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))
    assert_same_update(model, shape, **settings)


@pytest.mark.long
def test_gradients_may_be_added_up_in_bfloat16_which_sends_half_as_much():
    mesh = make_mesh((1, 4, 1, 1, 1))
    model = init_model(TINY, mesh=mesh)
    settings = {"prompts_per_step": 4, "max_prompt_length": 20, "max_completion_length": 20}
    params, sent = [], []
    for dtype in ("float32", "bfloat16"):
        params.append(after_updates(model, fsdp_reduce_dtype=dtype)[0].state.params)
        run = trace_run(model.config, mesh, GRPOConfig(fsdp_reduce_dtype=dtype, **settings))
        (update,) = (program for program in run.programs if program.name == "micro_step")
        sent.append(count_program(update.traced.jaxpr).exchanged["reduce-scatter"])
    assert sent[0] == 2 * sent[1] > 0
    differences = []
    for start, exact, rounded in zip(*map(jax.tree.leaves, (model.params, *params)), strict=True):
        differences.append(np.linalg.norm(rounded - exact) / np.linalg.norm(exact - start))
    assert 0 < max(differences) < 0.01


@pytest.mark.drawn(4, "resume")
@pytest.mark.parametrize("lora", [pytest.param(0, marks=pytest.mark.heavy), pytest.param(4, marks=pytest.mark.long)])
def test_a_run_saved_on_one_mesh_goes_on_on_another(lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    hf_config = {**TINY, "vocab_size": 16, "num_hidden_layers": 1}
    save_model(init_model(hf_config, mesh=one_device_mesh()), tmp_path / "model", a_tokenizer(eos_token="<eos>"))
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("ab", "cd", "aef")))
    Path("letters_reward.py").write_text(REWARD)
    argv = [*COMMAND.split(), *(["--lora_r", str(lora)] if lora else [])]
    assert main([*argv, "--output_dir", "one", "--max_steps", "3"]) == 0
    assert main([*argv, "--output_dir", "run", "--max_steps", "2", "--mesh", "1,2,1,2,1"]) == 0
    assert main(["resume", "run", "--max_steps", "3", "--mesh", "1,-1,1,1,1"]) == 0
    states = [json.loads(Path("run", "checkpoints", f"step_00000{n}", "state.json").read_text()) for n in (2, 3)]
    assert [list(state["devices"]["mesh"].values()) for state in states] == [[1, 2, 1, 2, 1], [1, 4, 1, 1, 1]]
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    one, run = (load_file(Path(folder, "model", name)) for folder in ("one", "run"))
    assert one.keys() == run.keys()
    for tensor in one:
        np.testing.assert_allclose(one[tensor], run[tensor], atol=1e-5, rtol=0)
    lines = [
        [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        for folder in ("one", "run")
    ]
    for a, b in zip(*lines, strict=True):
        for name in ("reward", "grad_norm", "eval_reward", "eval_rollout/sampler_gap_mean"):
            assert (name in a) == (name in b)
            assert b.get(name, 0.0) == pytest.approx(a.get(name, 0.0), rel=1e-4)


MESHES = ["8,1,1,1,1", "1,8,1,1,1", "2,2,1,2,1", "1,2,1,2,2", "1,1,1,4,2"]
SPARSE = {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2, **EXPERTS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "flags", "meshes"),
    [
        ({}, "", MESHES),
        ({}, " --lora_r 4 --lora_alpha 8", MESHES),
        (SPARSE, " --share_prefix never", ["1,2,4,1,1"]),
    ],
    ids=["model", "adapter", "mixture"],
)
def test_runs_on_eight_devices_end_as_on_one(change, flags, meshes, stories, tmp_path):
    model = load_model(stories, mesh=one_device_mesh())
    if change:
        model = init_model({**model.hf_config, **change}, mesh=model.mesh)
        model = replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))
    save_model(model, tmp_path / "model", load_tokenizer(stories))
    lines = (json.dumps({"prompt": text}) for text in ("Once upon a time", "One day, a dog", "A big red ball", "Mom"))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "letters_reward.py").write_text(REWARD)
    command = COMMAND.replace("prompts_per_step 2", "prompts_per_step 4").replace(
        "max_completion_length 8", "max_completion_length 16"
    )
    found = {}
    for mesh in ("1,1,1,1,1", *meshes):
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1" if not found else "8", "PYTHONPATH": str(ROOT)}
        argv = [
            sys.executable,
            "-m",
            "groupax",
            *f"{command}{flags} --max_steps 3 --mesh {mesh} --output_dir {mesh}".split(),
        ]
        subprocess.run(argv, check=True, cwd=tmp_path, env=environment)
        [weights] = (tmp_path / mesh / "model").glob("*.safetensors")
        files = sorted((tmp_path / mesh / "rollouts").iterdir())
        found[mesh] = load_file(weights), [pyarrow.parquet.read_table(file)["completion"].to_pylist() for file in files]
    one, completions = found.pop("1,1,1,1,1")
    for weights, on_many in found.values():
        assert on_many == completions
        assert_trees_match(weights, one, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "shape", "replicated", "message"),
    [
        ({}, (1, 1, 1, 4, 1), (), r"kv_heads \(2\) is not divisible by tp=4.*mesh_replicate kv_heads"),
        ({"hidden_size": 34, "head_dim": 8}, (1, 4, 1, 1, 1), (), r"embed \(34\) is not divisible by fsdp=4"),
        ({}, (1, 1, 1, 4, 1), ("kv_head",), "names kv_head; dims that meshes shard are embed, latent, vocab, heads"),
        ({"model_type": "olmo2"}, (2, 1, 1, 2, 1), (), r"heads \(1\) is not divisible"),
        (
            {"num_attention_heads": 6, "head_dim": 8},
            (1, 1, 1, 1, 4),
            (),
            "the 6 heads of each device are not divisible",
        ),
        ({}, (3, 1, 1, 1, 1), (), "mesh 3,1,1,1,1 needs 3 devices, but there are 4"),
        ({}, (3, -1, 1, 1, 1), (), "mesh 3,-1,1,1,1 needs a multiple of 3 devices, but there are 4"),
    ],
)
def test_what_cannot_be_split_is_refused(change, shape, replicated, message):
    with pytest.raises(ValueError, match=message):
        init_model({**TINY, **change}, mesh=make_mesh(shape), replicated=replicated)


@dataclass(frozen=True)
class Device:
    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "some"
    process_index: int = 0


def devices_of_slices(num_slices, num_each):
    return [Device(number, number % num_slices) for number in range(num_slices * num_each)]


def test_slices_lie_along_the_axes_that_are_asked_for():
    devices = devices_of_slices(2, 4)
    assert [d.slice_index for d in make_mesh((2, 4, 1, 1, 1), devices).devices.flat] == [0, 1] * 4, "as they come"
    mesh = make_mesh((2, -1, 1, 2, 1), devices, dcn=(2, 1, 1, 1, 1))
    assert mesh.devices.shape == (2, 2, 1, 2, 1)
    assert [[d.slice_index for d in part.flat] for part in mesh.devices] == [[0] * 4, [1] * 4]
    mesh = make_mesh((1, -1, 1, 1, 1), devices, dcn=(1, 2, 1, 1, 1))
    assert [d.slice_index for d in mesh.devices.flat] == [0] * 4 + [1] * 4
    assert decoding_mesh(mesh, 4).devices.shape == (2, 1, 1, 4, 1)
    for dcn, message in (
        ((2, 1, 1, 1, 1), r"mesh 1,8,1,1,1: dp \(1\) is not divisible by 2 slices.*mesh_dcn"),
        ((1, 4, 1, 1, 1), r"mesh_dcn 1,4,1,1,1 needs 4 slices, but the devices belong to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make_mesh((1, -1, 1, 1, 1), devices, dcn)


def test_by_default_slices_lie_along_the_first_axis():
    assert slices_along((4, 8, 1, 1, 1), 2) == [2, 1, 1, 1, 1]
    assert slices_along((1, 8, 1, 1, 1), 1) == [1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"mesh 1,16,1,1,1: dp \(1\) is not divisible by 2 slices"):
        slices_along((1, 16, 1, 1, 1), 2)


# -- layers as a loop


# a first layer that is dense, and windows that alternate; a last layer that is odd
ODD_MIXTURE = {**EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 5, "mlp_only_layers": [0]}
ODD_MIXTURE |= {"num_experts": 4, "moe_intermediate_size": 16}
SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 4, "query_pre_attn_scalar": 8}
ALTERNATING |= {"layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING]}


@pytest.mark.parametrize(("change", "compiled"), [(ALTERNATING, 4), (ODD_MIXTURE, 2)], ids=["windows", "experts"])
def test_alike_layers_are_compiled_once(change, compiled):
    config = read_config({**TINY, **change})
    params = jax.eval_shape(lambda: init_model({**TINY, **change}, mesh=one_device_mesh()).params)

    def layers_in(execution):
        def states(params):
            tokens = jnp.arange(5)
            return forward(
                config, params, tokens, tokens, lambda attn, cache, q, k, v: (q, cache), options=PassOptions(execution)
            )

        return str(jax.make_jaxpr(lambda params: states(params).hidden)(params)).count("name=layer")

    assert layers_in(DIRECT) == config.num_layers
    assert layers_in(execution_for("cpu", "none", scan_layers=True)) == compiled


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("change", "scale", "settings"),
    [(ALTERNATING, 32, {"gradient_checkpointing": "full"}), (ODD_MIXTURE, 4, {"share_prefix": "never"})],
    ids=["windows", "experts"],
)
def test_a_loop_gives_the_gradients_of_single_layers(change, scale, settings):
    # Small weights give small outputs of attention, and the norm behind them multiplies rounding: at a scale of 4 the
    # last bits of the weights alone moved the windows' gradient by 1.4e-5.
    model = init_model({**TINY, **change}, mesh=one_device_mesh())
    model = replace(model, params=jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, model.params))
    assert_same(model, **settings)


@pytest.mark.long
def test_of_adapters_too_with_the_same_inputs_left_out():
    lora = LoRAConfig(r=4, lora_alpha=8, lora_dropout=0.3, modules_to_save=["norm"])
    model = add_adapter(init_model({**TINY, "num_hidden_layers": 4}, mesh=one_device_mesh()), lora)
    ones = jax.tree.map(lambda x: x + 0.1, model.adapter.trained)
    assert_same(replace(model, adapter=replace(model.adapter, trained=ones)))


def assert_same(model, **settings):
    direct, of_direct = after_updates(model, **settings)
    scanned, of_scanned = after_updates(model, scan_layers=True, **settings)
    assert of_scanned["grad_norm"] == pytest.approx(of_direct["grad_norm"], rel=1e-5)
    assert_trees_match(*(learner.state.params for learner in (direct, scanned)), atol=5e-6, rtol=0)
