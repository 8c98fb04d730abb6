"""The program `python -m groupax.compat.easydel.scripts.finetune.gsm8k_grpo` for the recipe gsm8k."""

import sys
from collections.abc import Sequence

from groupax.cli.main import exit_status
from groupax.compat.easydel.scripts.finetune import run

# The reward of the right answer, and that of each of four tags that occurs exactly once.
WEIGHTS = {"--correctness_reward": ("gsm8k_accuracy", 1.0), "--xml_reward": ("xml_count", 4.0)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return exit_status("gsm8k_grpo", lambda: run("gsm8k", given, WEIGHTS))


if __name__ == "__main__":
    sys.exit(main())
