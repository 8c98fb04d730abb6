"""The program `python -m groupax.compat.easydel.scripts.finetune.gsm8k_grpo` for the recipe gsm8k."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from groupax.cli.main import exit_status
from groupax.compat.easydel.scripts.finetune.flags import Flags, run
from groupax.settings.command_line import parsed

NUM_TAGS = 4  # <think>, </think>, <answer>, </answer>


@dataclass(frozen=True, kw_only=True)
class GSM8KFlags(Flags):
    """Train a model with GRPO on GSM8K. Flags that are not given keep the values of the recipe gsm8k."""

    xml_reward: float = 0.125
    """Reward for each of the four tags that occurs exactly once."""
    correctness_reward: float = 2.0
    """Reward for the correct answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return exit_status("gsm8k_grpo", lambda: _run(parsed(GSM8KFlags, "gsm8k_grpo", given)))


def _run(flags: GSM8KFlags) -> None:
    weights = {"gsm8k_accuracy": flags.correctness_reward, "xml_count": NUM_TAGS * flags.xml_reward}
    run("gsm8k", flags, weights, ("xml_reward", "correctness_reward"))


if __name__ == "__main__":
    sys.exit(main())
