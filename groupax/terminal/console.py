"""The console that results are printed to. Imports rich."""

import os
import sys

from rich.console import Console

WIDE = 160  # columns of what is no terminal, such as a file


def output_console() -> Console:
    """Returns a console on standard output; without a terminal it is wide enough for the names in a table."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if has_width else WIDE)
