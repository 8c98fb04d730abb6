"""Errors that end a run through no fault of its settings. Imports nothing."""


class RunError(RuntimeError):
    """An error that ends a run; the message says why and what to do."""


class InfrastructureError(RuntimeError):
    """A tool or an environment cannot answer, through no fault of the model's.

    Tools and environments may raise it. The episode is then left out of its group's comparison and of the loss, where
    any other exception of a tool becomes a result that the model reads.
    """


class DivergedError(RunError):
    """Too many consecutive updates were not finite."""


class RewardError(RunError):
    """A reward function failed, and the settings ask that the run stops then."""


PREEMPTED = 75  # exit status: stopped from outside, to be started again (EX_TEMPFAIL of sysexits.h)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of the devices says that their memory is full."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


class PreemptedError(SystemExit):
    """The run was asked to stop and has saved its state. A program that does not catch this exits with status 75."""

    def __init__(self, message: str) -> None:
        super().__init__(PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message
