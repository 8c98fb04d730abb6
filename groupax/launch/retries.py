"""What is started again after which end, how often and how soon."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Ending = Literal["done", "stopped", "mistake", "failed", "preempted"]
# done        all processes came to their end
# stopped     somebody asked for it
# mistake     the user's; it would be made again
# failed      a process failed or was killed
# preempted   a process saved its state to be started again, or its machine was lost

Value = TypeVar("Value")


@dataclass(frozen=True)
class Retries:
    """The budget.

    Attributes:
        failures: most times that a program is started again after it failed.
        preemptions: the same after it was preempted.
        first_wait_s: before it is started again for the first time; doubled each further time.
        longest_wait_s: bound of that.
    """

    failures: int = 3
    preemptions: int = 1000
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("failures", "preemptions", "first_wait_s", "longest_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of restarts must be 0 or more, got {getattr(self, name)}")

    def wait_s(self, num_restarts: int) -> float:
        """The pause before a restart that `num_restarts` others have gone before."""
        return min(self.first_wait_s * 2.0 ** min(num_restarts, 60), self.longest_wait_s)


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """How an attempt ended.

    Attributes:
        ending: the kind.
        why: what happened, in words.
        value: what came out.
    """

    ending: Ending
    why: str
    value: Value


def attempted(
    attempt: Callable[[], Outcome[Value]],
    retries: Retries,
    tell: Callable[[str], None],
    pause: Callable[[float], bool],
) -> Outcome[Value]:
    """The outcome of the last attempt that the budget allows, or that needs no other.

    Args:
        attempt: starts the program and waits for its end.
        retries: the budget.
        tell: gets a line for each restart, and one if there is none left.
        pause: waits so many seconds; False if a request to stop came meanwhile.
    """
    used = {"failed": 0, "preempted": 0}
    budget = {"failed": retries.failures, "preempted": retries.preemptions}
    while True:
        outcome = attempt()
        kind = outcome.ending
        if kind not in used:
            return outcome
        if used[kind] >= budget[kind]:
            if budget[kind]:
                tell(f"{outcome.why}; not started again, as that was done {budget[kind]} times")
            else:
                tell(outcome.why)
            return outcome
        wait_s = retries.wait_s(sum(used.values()))
        used[kind] += 1
        tell(f"{outcome.why}; started again in {wait_s:g} s ({used[kind]} of at most {budget[kind]} times)")
        if not pause(wait_s):
            return Outcome("stopped", "asked to stop while waiting to start again", outcome.value)
