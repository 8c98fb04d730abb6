"""`python -m groupax`."""

from groupax.cli.main import entry_point

entry_point()
