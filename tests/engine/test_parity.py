"""Against PyTorch: what we save, `transformers` loads and computes alike."""

import jax.numpy as jnp
import numpy as np
import pytest

from groupax import init_model, load_model, save_model
from groupax.models.decoder import logits
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.rewards.test_rewards import rollouts_of

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = [
    {},
    {"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "num_key_value_heads": 1},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False},
    {"model_type": "qwen3", "head_dim": 16},
    {"model_type": "qwen3", "head_dim": 10, "attention_bias": True, "tie_word_embeddings": False},
]


def torch_logits(folder, tokens):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("change", CONFIGS, ids=str)
def test_saved_models_compute_the_same_in_transformers(tmp_path, change):
    model = init_model({**TINY, **change}, seed=3)
    # weights of a size at which biases, norms and rotations all matter
    params = {**model.params, "layers": [{k: 8.0 * v for k, v in layer.items()} for layer in model.params["layers"]]}
    rng = np.random.default_rng(0)
    for layer in params["layers"]:
        for name in layer:
            if name.endswith("_bias"):
                layer[name] = jnp.asarray(rng.normal(size=layer[name].shape), jnp.float32)
    scaled = type(model)(model.config, params, model.mesh, model.hf_config, {})
    folder = save_model(scaled, tmp_path / "model")
    tokens = rng.integers(0, 96, (3, 50))
    ours = logits(scaled.config, scaled.params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(ours, torch_logits(folder, tokens), atol=1e-4, rtol=1e-4)
    again = load_model(folder)
    np.testing.assert_array_equal(logits(again.config, again.params, jnp.asarray(tokens, jnp.int32)), ours)


def test_the_real_model_survives_load_save_load(stories, tmp_path):
    reference = np.load(stories / "greedy_reference.npz")
    folder = save_model(load_model(stories), tmp_path / "model")
    out = torch_logits(folder, reference["tokens"][None].astype(np.int64))[0]
    np.testing.assert_allclose(out, reference["logits"], atol=1e-4)
    np.testing.assert_allclose(out, torch_logits(stories, reference["tokens"][None].astype(np.int64))[0], atol=1e-6)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_reward_model_scores_as_in_transformers(tmp_path, model_type):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    from groupax.rewards.model import RewardModel

    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    config = {**TINY, "model_type": model_type, "head_dim": 8, "vocab_size": 13, "pad_token_id": 0}
    config |= {
        "architectures": [f"{architecture}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "reward"},
    }
    model = init_model(config, seed=4)
    params = {**model.params, "score": 50.0 * model.params["score"]}
    params["layers"] = [{k: 8.0 * v for k, v in layer.items()} for layer in params["layers"]]
    tokenizer = a_tokenizer(eos_token="<eos>")
    folder = save_model(
        type(model)(model.config, params, model.mesh, model.hf_config, {}), tmp_path / "model", tokenizer
    )
    rows = rollouts_of(["abc", "b", "cab" * 30, "hig" * 7, ""])
    # given, because transformers reads any tokenizer in the folder of a Qwen 2 model as its own kind
    ours = RewardModel(folder, tokenizer).rewards(rows)

    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = [tokenizer(row.prompt + row.text)["input_ids"] for row in rows]
    longest = max(map(len, ids))
    with torch.no_grad():
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        hidden = theirs.model(input_ids=padded, attention_mask=mask).last_hidden_state
        expected = theirs.score(hidden)[torch.arange(len(ids)), mask.sum(1) - 1, 0].numpy()
        alone = [theirs(input_ids=torch.tensor([row])).logits[0, 0].item() for row in ids]
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    np.testing.assert_allclose(ours, alone, atol=1e-4)
    assert np.ptp(ours) > 0.1
