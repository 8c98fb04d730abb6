"""Fields, arguments and attributes of TRL, by reflection: each takes part, warns, or is refused at construction."""

import inspect
from types import SimpleNamespace

import pytest

from groupax.compat import trl
from groupax.compat.fields import CompatWarning
from tests.training.test_sft import EXAMPLES
from tests.training.test_trainer import PROMPTS


def reward(completions, **columns):
    """Rewards nothing."""
    return [0.0 for _ in completions]


REFUSED_ARGUMENTS = [
    ({"optimizers": (SimpleNamespace(), None)}, "set optim"),
    ({"reward_processing_classes": [None, None]}, "give None for those that need no tokenizer"),
    ({"reward_funcs": None}, "reward"),
    ({"train_dataset": []}, "train_dataset is empty"),
    ({"peft_config": {"r": 4, "exclude_modules": ["q_proj"]}}, "exclude_modules"),
    (
        {"peft_config": {"r": 4, "lora_dropout": 0.1}, "args": {"disable_dropout": True, "max_completion_length": 8}},
        "set one of them to 0",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_ARGUMENTS, ids=str)
def test_an_argument_that_cannot_be_honoured_is_refused_with_the_remedy(folder, tmp_path, arguments, message):
    config = trl.GRPOConfig(str(tmp_path), **arguments.pop("args", {}))
    given = {"reward_funcs": reward, "train_dataset": PROMPTS, **arguments}
    with pytest.raises(ValueError, match=message):
        trl.GRPOTrainer(str(folder), args=config, **given)


def test_what_scripts_read_of_the_arguments():
    config = trl.GRPOConfig()
    assert (config.world_size, config.process_index, config.local_process_index, config.n_gpu) == (1, 0, 0, 0)
    assert (str(config.device), config.get_process_log_level()) == ("cpu", 20)
    assert config.should_log
    assert config.should_save


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "SFT"])
def test_every_field_takes_part_warns_or_is_refused(folder, tmp_path, kind):
    cls, read = getattr(trl, f"{kind}Config"), set()

    class Recorded(cls):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    config = Recorded(str(tmp_path), **({} if kind == "SFT" else {"max_completion_length": 8}))
    vllm = None if kind == "SFT" else Recorded(str(tmp_path), use_vllm=True, vllm_mode="server")
    read.clear()
    if vllm is not None:
        with pytest.warns(CompatWarning, match="sampled by the server"):
            vllm.to_native()
    arguments = {} if kind == "SFT" else {"reward_funcs": reward}
    getattr(trl, f"{kind}Trainer")(str(folder), args=config, train_dataset=EXAMPLES, **arguments)
    while_training = {"eval_on_start", "push_to_hub", "hub_model_id", "hub_private_repo", "resume_from_checkpoint"}
    while_training.add("vllm_importance_sampling_cap")  # which is read when the config is made
    fields = cls.FIELDS
    assert fields.defaults.keys() - fields.inert.keys() - fields.refused.keys() - read <= while_training


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_trainers_have_the_arguments_of_trl():
    theirs = pytest.importorskip("trl")
    for name in ("GRPOTrainer", "SFTTrainer"):
        pairs = [
            [
                (each.name, each.default)
                for each in inspect.signature(getattr(library, name).__init__).parameters.values()
            ]
            for library in (theirs, trl)
        ]
        assert pairs[0] == pairs[1]
