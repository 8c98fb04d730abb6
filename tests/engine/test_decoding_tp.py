"""Devices that share the weights to decode with sample what a device with all of them does."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import jax
import numpy as np
import pytest

from groupax import Engine, SamplingParams, init_model, load_model, save_model
from groupax.cli.main import main
from groupax.cli.serve import Serve, engine_of, models_of
from groupax.engine.batch import Batch
from groupax.engine.decode import DecodeSettings, decode_chunk
from groupax.models.lora import LoRAConfig
from groupax.models.specs import model_specs
from groupax.models.weights.checkpoint import add_adapter, reshard
from groupax.models.weights.saving import host_tensors, param_leaves, save_adapter
from groupax.parallel.mesh import make_mesh
from groupax.serve.loop import EngineLoop
from groupax.serve.remote import bytes_of
from groupax.serve.weights import Weights
from tests.conftest import LATENTS, TINY, assert_trees_match, one_device_mesh, rest_heavy
from tests.data.test_config_and_data import a_tokenizer
from tests.parallel.test_mesh import MIXTURE
from tests.training.test_trainer import PROMPTS as RUN_PROMPTS
from tests.training.test_trainer import lines_of, trained

PROMPTS = [np.random.default_rng(length).integers(2, 96, length) for length in (2, 17, 9, 30)]
PARAMS = SamplingParams(n=2, max_tokens=20, seed=7, temperature=0.9, logprobs=3, ignore_eos=True)
ONE_LAYER = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 4}


def sharpened(model):
    """With weights so large that it has preferences."""
    return replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))


def engine_on(model, num_devices, tp, **settings):
    devices = jax.devices()[:num_devices]
    model = reshard(model, make_mesh(devices=devices))
    settings = {"chunk_steps": 8, "kv_bytes": 1 << 26, **settings}
    return Engine(model.config, model.params, model.mesh, (1,), tp=tp, **settings)


def assert_same(groups, expected):
    for sequence, other in zip(chain(*groups), chain(*expected), strict=True):
        assert sequence.tokens == other.tokens
        for name in ("policy_logps", "sampler_logps"):
            np.testing.assert_allclose(getattr(sequence, name), getattr(other, name), atol=1e-5, rtol=0)
        for ours, theirs in zip(sequence.alternatives, other.alternatives, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], atol=1e-5, rtol=0)


def parts(array):
    """The shapes that devices have of an array."""
    return {shard.data.shape for shard in array.addressable_shards}


# -- the engine


TWO = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
SOFTCAPS = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
FAMILIES = {
    "plain": ({"vocab_size": 97}, 2),
    "one-head-each": ({"vocab_size": 97}, 4),
    "sliding-softcap": ({"model_type": "gemma2", **TWO, **SOFTCAPS}, 2),
    "parallel-block": ({"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5, "vocab_size": 97}, 4),
    "qk-norm": ({"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}, 2),
    "experts": ({**MIXTURE, "num_hidden_layers": 1}, 2),
    "learned-positions": ({"model_type": "gpt2"}, 2),
    "joint-matrix": ({"model_type": "gpt_neox"}, 2),
    "sinks": ({"model_type": "gpt_oss", **TWO, "num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "latent-vectors": ({"model_type": "deepseek_v3", **LATENTS, "moe_intermediate_size": 20}, 4),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=getattr(pytest.mark, "long" if "-" in each else "heavy")) for each in FAMILIES]
)
def test_devices_that_share_weights_sample_the_same(name):
    change, tp = FAMILIES[name]
    model = sharpened(init_model({**ONE_LAYER, **change}, mesh=one_device_mesh()))
    engine = engine_on(model, 4, tp)
    assert_same(engine.generate(PROMPTS, PARAMS), engine_on(model, 1, 1).generate(PROMPTS, PARAMS))
    if name == "plain":
        layer = engine.params["layers"][0]
        assert parts(layer["q"]) == {(32 // tp, 32)}
        assert parts(layer["down"]) == {(32, 64 // tp)}
        assert parts(engine.params["embed"]) == {(97, 32)}, "97 words do not divide"


EXCHANGES = ("psum", "pmax", "pmin", "all_gather", "all_to_all", "reduce_scatter", "ppermute")


def exchanges(jaxpr):
    """What devices exchange in a program, with the shapes of what each gives; of a loop, in one turn."""
    counts = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name in EXCHANGES:
            counts[equation.primitive.name, equation.invars[0].aval.shape] += 1
        for value in equation.params.values():
            for each in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(each, "jaxpr", each)
                counts += exchanges(inner) if hasattr(inner, "eqns") else {}
    return counts


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("mesh", "tp"),
    rest_heavy([((1, 2, 1, 2, 1), 2), ((1, 4, 1, 1, 1), 1), ((1, 2, 2, 1, 1), 1), ((1, 1, 1, 2, 2), 2)]),
    ids=str,
)
@pytest.mark.heavy
def test_a_token_takes_two_sums_per_layer_and_its_logits(mesh, tp):
    model = init_model(MIXTURE, mesh=make_mesh(mesh))
    engine = Engine(model.config, model.params, model.mesh, (1,), kv_bytes=1 << 26, tp=tp)
    assert dict(engine.mesh.shape) == {"dp": 4 // tp, "fsdp": 1, "ep": 1, "tp": tp, "sp": 1}
    batch = Batch(engine, engine.plan(), engine.sequences(PROMPTS, PARAMS), patience=0)
    settings = DecodeSettings(engine.config, engine.mesh, 8, "plain")
    decodes = decode_chunk.trace(engine.params, batch.cache, batch.slots, settings=settings)
    num_rows = batch.resizing.shape.num_slots
    rows, one_of_all, logits = ("psum", (num_rows, 32)), ("pmax", ()), ("all_gather", (num_rows, 48))
    embedding = 1
    expected = {rows: 2 * model.config.num_layers + embedding, one_of_all: 1, logits: 1} if tp > 1 else {}
    assert exchanges(decodes.jaxpr.jaxpr) == expected


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {"tp": 3}, "decoding with tp 3 needs a multiple of 3 devices, but the mesh has 4"),
        ({}, {"tp": 0}, "decoding with tp 0 needs a multiple"),
        ({}, {"tp": 4}, r"with tp 4: not divisible by it: kv_heads \(2\); choose a smaller tp"),
        ({"model_type": "olmo2"}, {"tp": 2}, r"heads \(1\) and kv_heads \(1\)"),
    ],
)
def test_what_devices_cannot_share_is_told(change, settings, message, tmp_path):
    hf_config = {**ONE_LAYER, "num_key_value_heads": 2, "vocab_size": 16, **change}
    model = init_model(hf_config)
    with pytest.raises(ValueError, match=message):
        Engine(model.config, model.params, model.mesh, (1,), **settings)
    folder = save_model(model, tmp_path / "model", a_tokenizer())
    if "weights" not in settings:  # told before the weights are read
        for file in folder.glob("*.safetensors"):
            file.unlink()
    with pytest.raises(ValueError, match=message):
        Engine.load(folder, **settings)


# -- commands and servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and an adapter of it that was trained with dropout and changes something."""
    folder = tmp_path_factory.mktemp("shared")
    model = sharpened(init_model({**ONE_LAYER, "vocab_size": 17}, mesh=one_device_mesh()))
    tokenizer = a_tokenizer(eos_token="<eos>")
    save_model(model, folder / "model", tokenizer)
    adapted = add_adapter(load_model(folder / "model"), LoRAConfig(r=2, lora_dropout=0.1))
    trained = jax.tree.map(lambda x: x + 0.3, adapted.adapter.trained)
    save_adapter(replace(adapted, adapter=replace(adapted.adapter, trained=trained)), folder / "adapter")
    return folder


@pytest.mark.heavy
def test_commands_load_weights_split(folder, capsys, tmp_path):
    argv = ["generate", "--model", str(folder / "adapter"), "--prompt", "ab", "--max_tokens", "12", "--seed", "3"]
    texts = []
    for tp in ("1", "2"):
        assert main([*argv, "--tp", tp]) == 0
        texts.append(capsys.readouterr().out.rpartition("\n\n")[0])
    assert texts[0] == texts[1] != ""
    assert main([*argv, "--tp", "8"]) == 2
    assert "groupax generate: decoding with tp 8 needs a multiple of 8 devices" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n')
    argv = ["eval", "--model", str(folder / "model"), "--dataset", str(tmp_path / "rows.jsonl"), "--tp", "2"]
    argv += ["--reward_funcs", "think_answer_format", "--max_tokens", "8", "--output_dir", str(tmp_path / "out")]
    assert main(argv) == 0


@pytest.mark.long
def test_a_server_holds_its_models_in_parts(folder):
    command = Serve(
        model=str(folder / "model"), name="base", adapter=(f"adapted={folder / 'adapter'}",), kv_cache_gb=0.1, tp=2
    )
    models, one_each = models_of(command), models_of(replace(command, tp=1))
    engine, expected = engine_of(command, models), engine_of(replace(command, tp=1), one_each)
    assert dict(models["base"].mesh.shape) == {"dp": 2, "fsdp": 1, "ep": 1, "tp": 2, "sp": 1}
    prompts, names = engine.encode(["ab", "cab"]), (None, "adapted")
    assert parts(engine.params["layers"][0]["down"].base) == {(32, 32)}
    for name in names:
        assert_same(*(each.generate(prompts, PARAMS, adapter=name) for each in (engine, expected)))

    weights, base = Weights(EngineLoop(engine, "base", 8), models["base"]), one_each["base"].params
    specs = model_specs(models["base"].config)
    tensors = host_tensors(specs, param_leaves(specs, base))
    metadata = {"version": "5", "replaces": str(weights.state)}
    upload = weights.read(np.frombuffer(b"".join(bytes_of(tensors, metadata)), np.uint8))
    weights.take_over(upload, weights.prepared(upload))
    assert parts(engine.params["layers"][0]["down"]) == {(32, 32)}
    assert engine.version == 5


# -- whole runs


@pytest.mark.optimized
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("1,2,1,2,1", marks=pytest.mark.heavy),
        *(pytest.param(mesh, marks=pytest.mark.long) for mesh in (None, "1,-1,1,1,1")),
    ],
)
def test_a_run_is_the_same(mesh, tmp_path):
    def run(name, **options):
        model = init_model({**ONE_LAYER, "vocab_size": 16}, mesh=make_mesh())
        given = {"optimizer": "sgd", "learning_rate": 1.0, "eval_steps": 1, "max_steps": 2, **options}
        trainer = trained(tmp_path / name, model=model, eval_dataset=RUN_PROMPTS, **given)
        return trainer.learner.state.params, lines_of(tmp_path / name)

    (weights, lines), (shared, shared_lines) = run("plain"), run("shared", decoding_tp=2, mesh=mesh)
    for line, other in zip(shared_lines, lines, strict=True):
        assert line.get("rollout/logp_diff_max", 0.0) < 1e-5
        for name in ("reward", "grad_norm", "eval_reward", "completions/mean_length"):
            assert (name in line) == (name in other)
            assert line.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-4)
    assert_trees_match(weights, shared, atol=1e-5, rtol=0)
