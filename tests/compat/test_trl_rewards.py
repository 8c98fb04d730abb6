"""The rewards of `groupax.compat.trl.rewards`, which are those of `trl.rewards`."""

import pytest

from groupax.compat import trl
from groupax.compat.trl import rewards

TEXTS = (r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", "<think>\na\n</think>\n$\\boxed{4}$", "4", "<think>x", "")
SOLUTIONS = (r"\frac{1}{3}", r"\frac{1}{3}", "$4$", "4", "hello", "$4$")
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]


def _results(module):
    logged = {}
    results = {
        "accuracy": module.accuracy_reward(COMPLETIONS, list(SOLUTIONS), log_extra=logged.__setitem__),
    }
    return results, logged


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_rewards_equal_those_of_trl():
    theirs = pytest.importorskip("trl.rewards")
    assert _results(rewards) == _results(theirs)


def test_trainers_that_groupax_does_not_have_are_refused():
    with pytest.raises(ImportError, match="no DPOTrainer, but GRPOTrainer, RLOOTrainer and SFTTrainer"):
        from groupax.compat.trl import DPOTrainer  # noqa: F401


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_other_names_are_those_of_the_installed_trl():
    theirs = pytest.importorskip("trl")
    for names in theirs._import_structure.values():
        for name in names:
            if not name.endswith(("Trainer", "Callback", "Config")):
                assert getattr(trl, name) is getattr(theirs, name)
    assert trl.ModelConfig is theirs.ModelConfig
    assert trl.rewards is rewards
    assert rewards.think_format_reward is theirs.rewards.think_format_reward
    assert not hasattr(trl, "never_heard_of")
