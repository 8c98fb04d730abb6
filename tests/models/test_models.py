"""Loading, saving and running models."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from groupax import load_model, save_model
from groupax.core.storage.folders import resolve_folder
from groupax.models.attention import Prompts, attend, attend_with_prompt
from groupax.models.config import AttentionConfig
from groupax.models.families import read_config
from groupax.models.logprobs import token_logprobs
from groupax.parallel.mesh import make_mesh
from tests.conftest import TINY, assert_trees_match, one_device_mesh


def test_sharded_checkpoint_loads(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr("groupax.models.weights.saving.SHARD_BYTES", 20_000)
    save_model(tiny_model, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    loaded = load_model(tmp_path / "model")
    np.testing.assert_array_equal(tiny_model.params["embed"], loaded.params["embed"])


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rewritten(folder, change):
    """Returns the folder with other tensors, in two files."""
    tensors = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + (name == HEAD)}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 2, 1, 2, 1)])
def test_a_tied_head_may_have_the_heads_name(tmp_path, tiny_model, sizes):
    folder = rewritten(
        save_model(tiny_model, tmp_path / "model"),
        lambda tensors: {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()},
    )
    mesh = one_device_mesh() if sizes == (1, 1, 1, 1, 1) else make_mesh(sizes)
    loaded = load_model(folder, mesh=mesh)
    assert "head" not in loaded.params
    np.testing.assert_array_equal(loaded.params["embed"], tiny_model.params["embed"])
    saved = load_file(save_model(loaded, tmp_path / "again") / "model.safetensors")
    assert (EMBEDDING in saved, HEAD in saved) == (True, False)


def test_a_tied_head_that_is_there_too_and_the_same_is_the_embedding(tmp_path, tiny_model, caplog):
    folder = save_model(tiny_model, tmp_path / "model", dtype=jnp.bfloat16)
    rewritten(folder, lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].copy()})
    loaded = load_model(folder)
    assert "head" not in loaded.params
    assert loaded.hf_config["tie_word_embeddings"]
    assert str(folder) not in caplog.text


def test_a_tied_head_that_differs_is_refused(tmp_path, tiny_model):
    differ = f"{HEAD} and {EMBEDDING} differ; set tie_word_embeddings to false"
    for name, change, fault in (
        ("shorter", lambda head: head[:-1], r"lm_head.weight has shape \[95, 32\], config.json says \[96, 32\]"),
        ("other", lambda head: head + 1, differ),
        ("integers", lambda head: head.astype(np.int32), "lm_head.weight has dtype I32"),
    ):
        folder = save_model(tiny_model, tmp_path / name)
        rewritten(folder, lambda tensors, change=change: {**tensors, HEAD: change(tensors[EMBEDDING])})
        with pytest.raises(ValueError, match=fault):
            load_model(folder)


@pytest.mark.heavy
@pytest.mark.parametrize(("chunk", "softcap"), [(1 << 21, 3.0), (500, None)])
def test_token_logprobs_are_those_of_a_dense_softmax(chunk, softcap):
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((23, 8), (50, 8)))
    targets, weights = jnp.asarray(rng.integers(0, 50, 23), jnp.int32), jnp.asarray(rng.normal(size=23), jnp.float32)

    def dense(hidden, head):
        scores = hidden @ head.T
        logp = jax.nn.log_softmax((softcap * jnp.tanh(scores / softcap) if softcap else scores) / 0.7)
        return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def ours(hidden, head):
        return token_logprobs(hidden, head, targets, 0.7, softcap=softcap, chunk_logits=chunk)

    def loss(function):
        return lambda hidden, head: jnp.sum(function(hidden, head)[0] * weights + function(hidden, head)[1])

    assert_trees_match(ours(hidden, head), dense(hidden, head), atol=1e-5)
    assert_trees_match(*(jax.grad(loss(each), argnums=(0, 1))(hidden, head) for each in (ours, dense)), atol=1e-4)


def test_the_vocabulary_is_never_there_for_all_tokens():
    """Compiles 4 rows of 2,048 tokens with Qwen's vocabulary, without running them: a dense pass needs 5 GB."""
    M, D, V = 4 * 2048, 896, 151_936
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((M, D), (V, D), (M,))]
    targets = jax.ShapeDtypeStruct((M,), jnp.int32)

    def loss(hidden, head, weights, targets):
        return jnp.sum(token_logprobs(hidden, head, targets, 1.0, False)[0] * weights)

    for function, result_bytes in ((loss, 4), (jax.grad(loss, argnums=(0, 1)), 4 * (M * D + V * D))):
        memory = jax.jit(function).lower(*shapes, targets).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 0.2e9
        assert memory.output_size_in_bytes < result_bytes + 1000


@pytest.mark.heavy
def test_attention_in_blocks_is_attention(monkeypatch):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k, v = draw(2, 50, 4, 8), draw(2, 50, 2, 8), draw(2, 50, 2, 8)
    prompt_k, prompt_v, starts = draw(2, 16, 2, 8), draw(2, 16, 2, 8), jnp.array([3, 9])

    def outputs(q, k, v, prompt_k, prompt_v):
        attn = AttentionConfig(8**-0.5)
        behind = k, v, Prompts(prompt_k, prompt_v, starts), attn
        return attend(q, k, v, starts, attn), *(attend_with_prompt(q[:, first:], *behind) for first in (0, 10, 42))

    def total(*arrays):
        return sum(jnp.sum(jnp.sin(out)) for out in outputs(*arrays))

    arrays = (q, k, v, prompt_k, prompt_v)
    whole = jax.tree.leaves((outputs(*arrays), jax.grad(total, argnums=(0, 1, 2, 3, 4))(*arrays)))
    monkeypatch.setattr("groupax.models.attention.MAX_UNBLOCKED_COLUMNS", 16)
    monkeypatch.setattr("groupax.models.attention.QUERY_BLOCK", 16)
    blocks = jax.tree.leaves((outputs(*arrays), jax.grad(total, argnums=(0, 1, 2, 3, 4))(*arrays)))
    assert_trees_match(blocks, whole, atol=1e-5)


# -- refusals


def test_a_folder_that_is_not_a_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"no config\.json \(it contains notes\.txt\)"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="neither a model folder nor a hub id"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="it cannot be downloaded from the hub"):
        load_model("nobody/nothing")


def test_the_hub_gives_weights_once_and_all_of_a_tokenizer(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        *("config.json", "adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("tokenizer.model", "tokenizer.model.v3", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt"),
        *("merges.txt", "additional_chat_templates/tool.jinja", "README.md"),
    ]
    others = [
        *("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"),
        *("original/consolidated.00.pth", "original/params.json", "original/tokenizer.model", "onnx/model.safetensors"),
        *("checkpoint-10/model.safetensors", "pytorch_model.bin", "model.gguf", "LICENSE.txt", "onnx/README.md"),
    ]

    def download(name, revision, **patterns):
        revisions.append((name, revision))
        assert sorted(filter_repo_objects([*wanted, *others], **patterns)) == sorted(wanted)
        return str(tmp_path)

    revisions = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("owner/name") == tmp_path
    assert resolve_folder("owner/name@refs/pr/1") == tmp_path
    assert revisions == [("owner/name", None), ("owner/name", "refs/pr/1")]


def test_a_run_folder_is_no_model_folder_and_the_message_names_its_model(tmp_path):
    for name in ("config.json", "run.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="the folder of a run, not of a model; it has none yet"):
        resolve_folder(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=f"its model is {tmp_path}/model"):
        resolve_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' of config.json lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "sections": [1]}}, "sections=.* not apply"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "needs 4 factors"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "glm4", "partial_rotary_factor": 1e9}, "need 2 to 128 dims of a head"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": [6]}, r"sliding_window_pattern=\[6\]"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types has \['sliding_attention'\]; supported for llama are full",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "kinds of 1 layers, but num_hidden_layers is 2"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"model_type": "cohere2", "position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "lacks num_experts_per_tok"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "between 1 and 4, got 5"),
        ({"head_dim": 7}, "even number of dims"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_attention_heads": 3}, "multiple of num_kv_heads"),
        ({"vocab_size": 0}, "vocab_size=0; it must be a whole number from 1"),
    ],
)
def test_unsupported_features_of_a_family_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read_config({**TINY, **change})


def test_unknown_config_keys_cause_a_warning():
    with pytest.warns(UserWarning, match="value_residual_scale"):
        read_config({**TINY, "value_residual_scale": 2.0})


@pytest.fixture
def saved(tmp_path, tiny_model):
    return save_model(tiny_model, tmp_path / "model")


def test_a_save_that_fails_leaves_the_old_model(saved, tiny_model):
    class BrokenTokenizer:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    before = shutil.copytree(saved, saved.with_name("copy"))
    with pytest.raises(OSError, match="disk full"):
        save_model(tiny_model, saved, BrokenTokenizer())
    assert sorted(path.name for path in saved.parent.iterdir()) == ["copy", "model"]
    for path in before.iterdir():
        assert (saved / path.name).read_bytes() == path.read_bytes()
