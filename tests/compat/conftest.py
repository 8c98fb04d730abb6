"""The model and the settings of scripts for TRL and transformers."""

import pytest

from groupax import init_model, save_model
from groupax.compat import trl
from tests.conftest import TINY, one_device_mesh
from tests.data.test_config_and_data import a_tokenizer

CHAT = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if shout %}j{% endif %}{% if add_generation_prompt %}i{% endif %}"
)


def chat_tokenizer():
    tokenizer = a_tokenizer(eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """A model's folder with a tokenizer that has a chat template."""
    model = init_model({**TINY, "vocab_size": 13}, mesh=one_device_mesh())
    return save_model(model, tmp_path_factory.mktemp("models") / "model", chat_tokenizer())


def a_config(tmp_path, **settings):
    own = {"max_completion_length": 8, "learning_rate": 1e-2, "disable_tqdm": True, "logging_steps": 1, "max_steps": 3}
    own |= {"output_dir": str(tmp_path / "run"), "save_strategy": "no"}
    return trl.GRPOConfig(**{**own, **settings})
