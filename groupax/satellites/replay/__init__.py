"""Replays of recorded steps: the same step again, under changes, and the step that a metric went wrong in."""
