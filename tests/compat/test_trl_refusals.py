"""What TRL has takes part, warns, or is refused: fields, arguments, attributes, overrides, parsers, rewards."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from groupax.compat import hf, trl
from groupax.compat.fields import CompatWarning
from groupax.compat.trl import rewards
from groupax.compat.trl.overridden import REFUSED
from groupax.compat.trl.policy import resolve_model
from tests.training.test_trainer import PROMPTS

from .conftest import a_config

COMPAT = Path(trl.__file__).parents[1]


REFUSED_ARGUMENTS = [
    ({"optimizers": (None, SimpleNamespace())}, "set lr_scheduler_type"),
    ({"optimizers": (SimpleNamespace(), None)}, "set optim"),
    ({"reward_processing_classes": [None, None]}, "give None for those that need no tokenizer"),
    ({"reward_funcs": None}, "reward"),
    ({"train_dataset": []}, "train_dataset is empty"),
    ({"peft_config": {"r": 4, "use_dora": True}}, "use_dora"),
    ({"peft_config": {"r": 4, "lora_dropout": 0.1}, "args": {"disable_dropout": True}}, "set one of them to 0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_ARGUMENTS, ids=str)
def test_an_argument_that_cannot_be_honoured_is_refused_with_the_remedy(folder, tmp_path, arguments, message):
    config = trl.GRPOConfig(str(tmp_path), **arguments.pop("args", {}))
    given = {"reward_funcs": count_a, "train_dataset": PROMPTS, **arguments}
    with pytest.raises(ValueError, match=message):
        trl.GRPOTrainer(str(folder), args=config, **given)


def test_attributes_of_the_arguments_are_there_or_refused_with_the_remedy():
    config = trl.GRPOConfig(warmup_steps=0.1)
    assert (config.world_size, config.process_index, config.n_gpu, str(config.device)) == (1, 0, 0, "cpu")
    assert (config.train_batch_size, config.get_warmup_steps(15)) == (8, 2)
    with config.main_process_first(desc="map"):
        pass
    for name in trl.GRPOConfig.ABSENT:
        with pytest.raises(AttributeError, match=f"GRPOConfig has no {name}: "):
            getattr(config, name)


def test_every_field_takes_part_warns_or_is_refused():
    sources = "".join(path.read_text() for path in COMPAT.rglob("*.py"))
    own = trl.GRPOConfig.FIELDS
    for name in own.defaults.keys() - own.declared.keys():
        is_read = re.search(rf"(self|args|config)(\.|, \"){name}\b(?! = )", sources)
        assert is_read, f"{name} has no effect; declare it with the reason, or refuse it"


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_trainer_has_the_arguments_of_trl_and_the_config_its_attributes():
    theirs = pytest.importorskip("trl")
    expected = inspect.signature(theirs.GRPOTrainer.__init__).parameters
    own = inspect.signature(trl.GRPOTrainer.__init__).parameters
    assert {(each.name, each.default) for each in own.values()} == {(e.name, e.default) for e in expected.values()}
    fields = {field.name for field in dataclasses.fields(theirs.GRPOConfig)}
    for name in {name for name in dir(theirs.GRPOConfig) if not name.startswith("_")} - fields:
        assert hasattr(trl.GRPOConfig(), name) or name in trl.GRPOConfig.ABSENT, name


# Methods whose overrides take part in a run, or that only scripts call; then attributes that are no methods.
HONOURED = {
    *("_calculate_rewards", "log", "add_callback", "evaluate", "get_num_trainable_parameters"),
    *("is_local_process_zero", "is_world_process_zero", "log_metrics", "metrics_format", "pop_callback", "push_to_hub"),
    *("remove_callback", "save_metrics", "save_model", "save_state", "train"),
}
PLAIN = {"_name", "_paper", "_tag_names", "_template_file"}


def count_a(completions, **columns):
    """Rewards the letter a."""
    return [float(text.count("a")) for text in completions]


def trainer_of(cls, folder, tmp_path):
    small = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    return cls(str(folder), count_a, a_config(tmp_path, **small), PROMPTS)


class Doubled(trl.GRPOTrainer):
    """Doubles rewards and adds to the log."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.seen, self.lines = [], []

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.seen.append((inputs, prompts, completions, np.asarray(rewards)))
        return 2 * np.asarray(rewards) + 1

    def log(self, logs, start_time=None):
        self.lines.append(dict(logs))
        super().log({**logs, "own/metric": 7.5, "note": "text"}, start_time)


@pytest.mark.heavy
def test_overrides_of_rewards_and_of_the_log_take_part(folder, tmp_path):
    trainer = trainer_of(Doubled, folder, tmp_path)
    trainer.train()
    assert len(trainer.seen) == 2
    inputs, prompts, completions, rewards = trainer.seen[0]
    assert [row["prompt"] for row in inputs] == prompts == [each for each in prompts[::2] for _ in range(2)]
    assert rewards.tolist() == [[reward] for reward in count_a(completions)]
    first = trainer.state.log_history[0]
    assert first["reward"] == pytest.approx(2 * rewards.mean() + 1)
    assert [line["own/metric"] for line in trainer.state.log_history] == [7.5, 7.5, 7.5]
    assert first["note"] == "text"
    assert len(trainer.lines) == 3
    assert "train_runtime" in trainer.lines[-1]
    [metrics] = (tmp_path / "run").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["own/metric"] for line in lines] == [7.5, 7.5]


@pytest.mark.heavy
def test_rewards_of_another_shape_and_of_other_completions_are_refused(folder, tmp_path):
    class Wrong(trl.GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return [0.0] * len(completions)

    class Stripped(trl.GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards(
                inputs, prompts, [f"{each}!" for each in completions], completion_ids_list
            )

    for kind, message in (
        (Wrong, r"_calculate_rewards of Wrong must return .* \[4, 1\], got \[4\]"),
        (Stripped, "the completions that were sampled; call it with these"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(kind, folder, tmp_path).train()


def test_overrides_that_would_never_be_called_are_refused_by_name():
    for name, remedy in REFUSED.items():
        cls = type("MyTrainer", (trl.GRPOTrainer,), {name: lambda self, *arguments, **named: None})
        message = f"MyTrainer overrides {name}, which groupax would never call: {remedy}"
        with pytest.raises(ValueError, match=re.escape(message)):
            cls("no/model", count_a, trl.GRPOConfig("x"), PROMPTS)


def test_an_override_of_a_mixin_is_refused_by_name():
    mixin = type("Mixin", (), {"compute_loss": lambda self, model, inputs: 0.0})
    with pytest.raises(ValueError, match="Mixin overrides compute_loss"):
        type("Mixed", (mixin, trl.GRPOTrainer), {})("no/model", count_a, trl.GRPOConfig("x"), PROMPTS)


@pytest.mark.parametrize(("name", "setting"), [("evaluate", "eval_strategy"), ("save_model", "save_strategy")])
def test_an_override_that_only_the_script_calls_is_refused_where_the_run_would(name, setting):
    cls = type("MyTrainer", (trl.GRPOTrainer,), {name: lambda self: None})
    with pytest.raises(ValueError, match=f"MyTrainer overrides {name}, .*{setting} is 'steps'"):
        cls("no/model", count_a, trl.GRPOConfig("x", **{setting: "steps"}), PROMPTS)


def test_methods_that_only_scripts_call(folder, tmp_path):
    trainer = trainer_of(trl.GRPOTrainer, folder, tmp_path)
    assert trainer.get_num_trainable_parameters() > 1000
    callback = object()
    trainer.add_callback(callback)
    assert trainer.pop_callback(callback) is callback
    assert trainer.pop_callback(callback) is None
    trainer.log({"mine": 1})
    assert trainer.state.log_history[-1]["mine"] == 1
    with pytest.raises(AttributeError, match="compute_loss of GRPOTrainer is assigned"):
        trainer.compute_loss = lambda *_: 0.0
    trainer.note = "an attribute of the script's own"


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_every_method_of_trls_trainer_is_honoured_or_refused():
    theirs = pytest.importorskip("trl").GRPOTrainer
    names = {name for name in dir(theirs) if not name.startswith("__")}
    assert names == HONOURED | REFUSED.keys() | PLAIN
    assert not HONOURED & REFUSED.keys()
    assert all(callable(getattr(trl.GRPOTrainer, name)) for name in HONOURED)


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


TEXTS = (r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", "<think>\na\n</think>\n$\\boxed{4}$", "4", "<think>x", "")
SOLUTIONS = (r"\frac{1}{3}", r"\frac{1}{3}", "$4$", "4", "hello", "$4$")
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]
IDS = [[1] * 50, [5, 6, 7], [1, 2, 1, 2, 1, 2], [1] * 90, [1] * 101, []]


def _results(module):
    logged = {}
    results = {
        "accuracy": module.accuracy_reward(COMPLETIONS, list(SOLUTIONS), log_extra=logged.__setitem__),
        "reasoning": module.reasoning_accuracy_reward(COMPLETIONS, list(SOLUTIONS), task="unknown columns are ignored"),
        "delimiters": module.reasoning_accuracy_reward(COMPLETIONS, list(SOLUTIONS), [r"\boxed", "a"]),
        "format": module.think_format_reward(COMPLETIONS),
        "cosine": module.get_cosine_scaled_reward(100)(COMPLETIONS, list(SOLUTIONS), IDS),
        "repetition": module.get_repetition_penalty_reward(2)(IDS),
        "overlong": module.get_soft_overlong_punishment(100, 20)(IDS),
        "overlong at once": module.get_soft_overlong_punishment(100, 0)(IDS),
    }
    return results, logged


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_rewards_equal_those_of_trl():
    theirs = pytest.importorskip("trl.rewards")
    assert _results(rewards) == _results(theirs)


def test_a_name_that_groupax_does_not_have_is_refused_with_the_remedy():
    with pytest.raises(ImportError, match="preferences; train with trl"):
        from groupax.compat.trl import DPOTrainer  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="import it from trl itself"):
        from groupax.compat.trl import extract_prompt  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="HarborSpec and OpenRewardSpec need no change"):
        import groupax.compat.trl.experimental  # noqa: F401
    assert not hasattr(trl, "never_heard_of")


@pytest.mark.parity
def test_every_public_name_of_trl_is_there_or_refused():
    structure = pytest.importorskip("trl")._import_structure
    refused = {}
    for name in [each for names in structure.values() for each in names]:
        try:
            assert getattr(trl, name) is not None
        except ImportError as error:
            refused[name] = str(error)
    assert refused
    assert [name for name, reason in refused.items() if len(reason) <= 60] == []
