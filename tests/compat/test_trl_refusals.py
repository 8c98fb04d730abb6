"""Fields, arguments and attributes of TRL, by reflection: each takes part, warns, or is refused at construction."""

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupax import GRPOConfig
from groupax.compat import trl
from tests.training.test_trainer import PROMPTS

COMPAT = Path(trl.__file__).parents[1]


def reward(completions, **columns):
    """Rewards nothing."""
    return [0.0 for _ in completions]


REFUSED_ARGUMENTS = [
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
    given = {"reward_funcs": reward, "train_dataset": PROMPTS, **arguments}
    with pytest.raises(ValueError, match=message):
        trl.GRPOTrainer(str(folder), args=config, **given)


def test_what_scripts_read_of_the_arguments():
    config = trl.GRPOConfig()
    assert (config.world_size, config.process_index, config.local_process_index, config.n_gpu) == (1, 0, 0, 0)
    assert (str(config.device), config.get_process_log_level()) == ("cpu", 20)
    assert config.should_log
    assert config.should_save


def test_every_field_takes_part_warns_or_is_refused():
    sources = "".join(path.read_text() for path in COMPAT.rglob("*.py"))
    own, native = trl.GRPOConfig.FIELDS, {field.name for field in dataclasses.fields(GRPOConfig)}
    for name in own.defaults.keys() - own.inert.keys() - own.refused.keys() - native:
        is_read = re.search(rf"(self|args|config)(\.|, \"){name}\b(?! = )", sources)
        assert is_read, f"{name} has no effect; declare it with the reason, or refuse it"


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_trainer_has_the_arguments_of_trl():
    theirs = pytest.importorskip("trl")
    expected = inspect.signature(theirs.GRPOTrainer.__init__).parameters
    own = inspect.signature(trl.GRPOTrainer.__init__).parameters
    assert {(each.name, each.default) for each in own.values()} == {(e.name, e.default) for e in expected.values()}
