"""`python -m groupax`."""

from groupax.cli import entry_point

entry_point()
