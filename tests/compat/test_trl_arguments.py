"""TRL's arguments as dataclasses: parsers of command lines, copies, subclasses, and what cannot be honoured."""

import copy
import dataclasses
import os
import pickle
import warnings
from dataclasses import dataclass

import pytest

from groupax.compat import hf, trl
from groupax.compat.fields import CompatWarning
from groupax.compat.trl.policy import resolve_model

YAML = """
env: {A_VARIABLE_OF_THE_SCRIPT: 3}
output_dir: from_file
learning_rate: 1e-3
use_peft: true
load_in_8bit: true
lora_target_modules: [all-linear]
dataset_name: my/data
"""


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


def test_what_follows_from_other_fields_is_derived():
    assert trl.GRPOConfig(metric_for_best_model="eval_loss").greater_is_better is False
    assert trl.GRPOConfig(generation_kwargs='{"top_k": 3}').generation_kwargs == {"top_k": 3}
    assert trl.GRPOConfig(vllm_importance_sampling_cap=2.0).vllm_importance_sampling_clip_max == 2.0


def test_command_lines_and_files_fill_dataclasses(tmp_path, monkeypatch):
    monkeypatch.setenv("A_VARIABLE_OF_THE_SCRIPT", "1")
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    parser = trl.TrlParser((trl.ScriptArguments, trl.GRPOConfig, trl.ModelConfig))
    script, config, model = parser.parse_args_and_config(
        ["--config", str(file), "--output_dir", "from_line", "--no_gradient_checkpointing"]
    )
    assert script.dataset_name == "my/data"
    assert config == trl.GRPOConfig("from_line", learning_rate=1e-3, gradient_checkpointing=False)
    assert (model.use_peft, model.lora_target_modules) == (True, "all-linear")
    assert os.environ["A_VARIABLE_OF_THE_SCRIPT"] == "3"
    assert "Has no effect in groupax: programs are compiled by XLA" in " ".join(parser.format_help().split())
    parser = trl.TrlParser(trl.GRPOConfig)
    for text, message in (
        ("learning_rte: 1", "no fields of GRPOConfig: --learning_rte 1; remove them"),
        ("- 1", "must contain settings as a YAML mapping, it contains list"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            parser.parse_args_and_config(["--config", str(file)])


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_a_model_config_describes_adapter_and_quantization():
    assert trl.get_peft_config(trl.ModelConfig()) is trl.get_quantization_config(trl.ModelConfig()) is None
    adapted = trl.ModelConfig(use_peft=True, load_in_8bit=True, lora_r=4)
    assert trl.get_peft_config(adapted).r == 4
    assert trl.get_quantization_config(adapted).load_in_8bit
    quantization = trl.get_quantization_config(trl.ModelConfig(load_in_4bit=True, use_bnb_nested_quant=True))
    assert hf.base_weights(quantization) == "nf4"
    with pytest.raises(ValueError, match="load_in_8bit and load_in_4bit are both set"):
        trl.ModelConfig(load_in_4bit=True, load_in_8bit=True)


@pytest.mark.heavy
def test_a_mixture_of_datasets_keeps_its_fractions(tmp_path):
    pytest.importorskip("datasets")
    for name, rows in (("a", 8), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(f'{{"prompt": "{name}{i}", "x": 1}}' for i in range(rows)))
    parts = [
        {"path": "json", "data_files": str(tmp_path / f"{name}.jsonl"), "columns": ["prompt"], "fraction": 0.5}
        for name in "ab"
    ]
    found = trl.get_dataset(trl.DatasetMixtureConfig(parts))
    assert found["train"]["prompt"] == ["a0", "a1", "b0", "b1"]
    assert set(trl.get_dataset(trl.DatasetMixtureConfig(parts, test_split_size=0.5))) == {"train", "test"}
    with pytest.raises(ValueError, match="fraction must be set for all"):
        trl.get_dataset(trl.DatasetMixtureConfig([parts[0], {**parts[1], "fraction": None}]))
    with pytest.raises(ValueError, match="no datasets"):
        trl.get_dataset(trl.DatasetMixtureConfig())


# -- model_init_kwargs


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


# -- with TRL's own


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
