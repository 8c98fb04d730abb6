"""TRL's arguments as dataclasses: parsers of command lines, copies, subclasses, and what cannot be honoured."""

import copy
import dataclasses
import pickle
import warnings
from dataclasses import dataclass

import pytest

from groupax.compat import hf, trl
from groupax.compat.fields import CompatWarning
from groupax.compat.trl.policy import resolve_model


def test_a_config_is_a_dataclass():
    config = trl.GRPOConfig("here", num_generations=4)
    assert dataclasses.asdict(config)["output_dir"] == "here"
    assert dataclasses.replace(config, beta=0.1) == trl.GRPOConfig("here", num_generations=4, beta=0.1)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert repr(config) == "GRPOConfig(output_dir='here', num_generations=4)"
    assert '"num_generations": 4' in config.to_json_string()


def test_a_subclass_adds_fields_and_attributes():
    @dataclass
    class MyConfig(trl.GRPOConfig):
        curriculum: str = "easy"

        def __post_init__(self):
            super().__post_init__()
            self.level = 5

    config = MyConfig(curriculum="hard", beta=0.1)
    assert (config.curriculum, config.level, config.to_native().beta) == ("hard", 5, 0.1)
    with pytest.raises(TypeError, match="MyConfig has no field 'curiculum'; did you mean curriculum"):
        MyConfig(curiculum="hard")


def resolved(model, quantized=None, **kwargs):
    return resolve_model(model, trl.GRPOConfig(model_init_kwargs=kwargs), quantized)


def test_arguments_of_loading_are_taken_over_or_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved("owner/name", dtype="float32", device_map=None, trust_remote_code=False, use_cache=False, config=None)
    assert resolved("owner/name", revision="v1")[0] == "owner/name@v1"
    assert resolved(str(tmp_path), revision="v1")[0] == str(tmp_path)
    with pytest.warns(CompatWarning, match="master weights are float32"):
        resolved("owner/name", dtype="bfloat16")
    with pytest.warns(CompatWarning, match="cache_dir='here' changes nothing in groupax: .* HF_HUB_CACHE"):
        resolved("owner/name", cache_dir="here")


def test_arguments_of_loading_that_change_the_model_are_refused():
    config = hf.BitsAndBytesConfig(load_in_8bit=True)
    assert resolved("owner/name", config)[1] is resolved("owner/name", quantization_config=config)[1] is config
    for quantized, kwargs, message in (
        (None, {"subfolder": "model"}, "subfolder='model' is not supported: download the repository"),
        (None, {"rope_scaling": {"factor": 2.0}}, "has 'rope_scaling'.*load the model with transformers and pass the"),
        (config, {"quantization_config": config}, "quantization_config is given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            resolved("owner/name", quantized, **kwargs)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", ["trl", "transformers"])
def test_parsers_of_trl_and_transformers_fill_the_config(source):
    theirs = pytest.importorskip("trl")
    parser = theirs.TrlParser if source == "trl" else pytest.importorskip("transformers").HfArgumentParser
    line = ["--output_dir", "x", "--report_to", "none", "--model_init_kwargs", '{"dtype": "auto"}', "--top_k", "3"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompatWarning)
        [config, model] = parser((trl.GRPOConfig, theirs.ModelConfig)).parse_args_into_dataclasses(line)
    assert config == trl.GRPOConfig("x", model_init_kwargs={"dtype": "auto"}, top_k=3)
    assert trl.get_peft_config(model) is None


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_dataclasses_have_the_fields_of_trl_in_order_with_their_defaults():
    theirs = pytest.importorskip("trl")
    from trl.scripts.utils import DatasetConfig

    from groupax.compat.trl import scripts

    for own, other in (
        (trl.GRPOConfig, theirs.GRPOConfig),
        (trl.RLOOConfig, theirs.RLOOConfig),
        (trl.SFTConfig, theirs.SFTConfig),
        (trl.ScriptArguments, theirs.ScriptArguments),
        (trl.ModelConfig, theirs.ModelConfig),
        (trl.DatasetMixtureConfig, theirs.DatasetMixtureConfig),
        (scripts.DatasetConfig, DatasetConfig),
    ):
        known = {field.name: (field.default, field.default_factory) for field in dataclasses.fields(other)}
        in_order = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(own) if f.name in known}
        assert list(in_order.items()) == list(known.items())
