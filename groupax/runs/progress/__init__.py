"""Displays of a run on a terminal, in a log, or as JSON lines."""
