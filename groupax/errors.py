"""Errors that end a run through no fault of its settings. Imports nothing."""


class RunError(RuntimeError):
    """A run cannot go on; the message says why and what to do."""


class DivergedError(RunError):
    """Too many updates in a row were not finite."""


class RewardError(RunError):
    """A reward function failed, and the run is to stop for it."""
