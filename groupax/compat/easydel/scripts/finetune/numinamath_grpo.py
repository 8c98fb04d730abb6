"""The program `python -m groupax.compat.easydel.scripts.finetune.numinamath_grpo` for the recipe numinamath."""

import sys
from collections.abc import Sequence

from groupax.cli.main import exit_status
from groupax.compat.easydel.scripts.finetune import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return exit_status("numinamath_grpo", lambda: run("numinamath", given))


if __name__ == "__main__":
    sys.exit(main())
