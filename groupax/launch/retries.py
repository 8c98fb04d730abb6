"""The policy of restarts: after which ends a program is started again, how often and how soon."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Ending = Literal["done", "stopped", "mistake", "failed", "preempted"]
# done        all processes finished
# stopped     a stop was requested
# mistake     of the user, which would be repeated
# failed      a process failed or was killed
# preempted   a process saved its state to be started again, or its machine was lost

Value = TypeVar("Value")


@dataclass(frozen=True)
class Retries:
    """A budget of restarts.

    Attributes:
        failures: Maximum number of restarts after failures.
        preemptions: Maximum number of restarts after preemptions.
        first_wait_s: Pause before the first restart; it doubles with each restart.
        max_wait_s: Longest pause.
    """

    failures: int = 3
    preemptions: int = 1000
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("failures", "preemptions", "first_wait_s", "max_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of restarts must be 0 or more, got {getattr(self, name)}")

    def wait_s(self, num_restarts: int) -> float:
        """Returns the pause after `num_restarts` restarts."""
        return min(self.first_wait_s * 2.0 ** min(num_restarts, 60), self.max_wait_s)


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """Command-line options of launchers that restart a program."""

    restarts: int = 3
    """Maximum number of restarts after a process or host failed."""
    preemptions: int = 1000
    """Maximum number of restarts after one saved its state to be started again (status 75), or its host was lost."""
    backoff_s: float = 1.0
    """Seconds before the first restart; doubled with each restart, up to a minute."""
    grace_s: float = 60.0
    """Seconds that the other processes have to stop after one has failed, before they are killed."""

    @property
    def retries(self) -> Retries:
        """The budget of restarts."""
        return Retries(self.restarts, self.preemptions, self.backoff_s)


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """The end of an attempt.

    Attributes:
        ending: Kind of end.
        why: Description of what happened.
        value: Result of the attempt.
    """

    ending: Ending
    why: str
    value: Value


def run_with_retries(
    attempt: Callable[[], Outcome[Value]],
    retries: Retries,
    log: Callable[[str], None],
    pause: Callable[[float], bool],
) -> Outcome[Value]:
    """Repeats an attempt while its outcome calls for it and the budget allows; returns the last outcome.

    Args:
        attempt: Starts the program and waits for its end.
        retries: The budget.
        log: Receives a line for each restart, and one when the budget is spent.
        pause: Waits for a number of seconds; returns False if a stop was requested meanwhile.
    """
    used = {"failed": 0, "preempted": 0}
    budget = {"failed": retries.failures, "preempted": retries.preemptions}
    while True:
        outcome = attempt()
        kind = outcome.ending
        if kind not in used:
            return outcome
        if used[kind] >= budget[kind]:
            log(f"{outcome.why}; not restarted again after {budget[kind]} restarts" if budget[kind] else outcome.why)
            return outcome
        wait_s = retries.wait_s(sum(used.values()))
        used[kind] += 1
        log(f"{outcome.why}; restarting in {wait_s:g} s ({used[kind]} of at most {budget[kind]} times)")
        if not pause(wait_s):
            return Outcome("stopped", "a stop was requested during the pause before a restart", outcome.value)
