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
    assert config.to_dict()["num_generations"] == 4


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
    with pytest.warns(CompatWarning, match="model_init_kwargs revision, dtype change nothing: the model is already"):
        assert resolved(hf.CausalLM, revision="v1", dtype="float32", attn_implementation="eager")[0] is hf.CausalLM


def test_arguments_of_loading_that_change_the_model_are_refused():
    config = hf.BitsAndBytesConfig(load_in_8bit=True)
    assert resolved("owner/name", config)[1] is resolved("owner/name", quantization_config=config)[1] is config
    for quantized, kwargs, message in (
        (None, {"subfolder": "model"}, "has 'subfolder'.*load the model with transformers and pass the object"),
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
    parser = parser((trl.GRPOConfig, theirs.ModelConfig))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompatWarning)
        [config, model] = parser.parse_args_into_dataclasses([*line, "--no_gradient_checkpointing"])
    assert config == trl.GRPOConfig("x", model_init_kwargs={"dtype": "auto"}, top_k=3, gradient_checkpointing=False)
    assert trl.get_peft_config(model) is None
    assert "Has no effect in groupax: programs are compiled by XLA" in " ".join(parser.format_help().split())
    with pytest.warns(CompatWarning, match="ddp_timeout=9 changes nothing"):
        parser.parse_args_into_dataclasses(["--ddp_timeout", "9"])


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["GRPOConfig", "RLOOConfig", "SFTConfig"])
def test_configs_have_the_fields_of_trl_with_their_defaults(name):
    theirs, own = (
        {field.name: (field.default, field.default_factory) for field in dataclasses.fields(getattr(library, name))}
        for library in (pytest.importorskip("trl"), trl)
    )
    assert {each: own.get(each) for each in theirs} == theirs
