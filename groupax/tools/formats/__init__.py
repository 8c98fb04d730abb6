"""Formats in which models write tool calls, each with a reader of a turn's text."""
