"""The model of scripts for TRL and transformers."""

import pytest

from groupax import init_model, save_model
from tests.conftest import TINY, one_device_mesh
from tests.data.test_config_and_data import a_tokenizer


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    tokenizer = a_tokenizer(eos_token="<eos>", pad_token="<pad>")
    model = init_model({**TINY, "vocab_size": 13}, mesh=one_device_mesh())
    return save_model(model, tmp_path_factory.mktemp("models") / "model", tokenizer)
