"""The program `python -m groupax.compat.easydel.scripts.finetune.numinamath_grpo` for the recipe numinamath."""

import sys
from collections.abc import Sequence

import tyro

from groupax.cli.main import exit_status
from groupax.compat.easydel.scripts.finetune.flags import Flags, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    flags = tyro.cli(Flags, prog="numinamath_grpo", args=arguments, use_underscores=True)
    return exit_status("numinamath_grpo", lambda: run("numinamath", flags))


if __name__ == "__main__":
    sys.exit(main())
