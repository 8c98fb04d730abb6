"""Calls that two processes make in turns: python -m tests.episodes.calls_run."""

import sys
import threading
import time

from groupax.episodes.record import Question, Record
from groupax.episodes.scheduler import Calls, Task
from groupax.parallel import processes
from groupax.parallel.runtime import configure_jax
from groupax.tools.runner import ToolRunner


def number(own):
    assert own % 2 == processes.process_index()
    time.sleep((4 - own) / 100)
    return own


def lock(own):
    assert own == processes.process_index() == 1
    return threading.Lock()


def gone(own):
    raise OSError("gone")


def outcomes():
    """The numbers of calls with their values or errors, in the order in which they are delivered."""
    found = []

    async def call(own, function):
        outcome = await calls.call(Question((own, 0), 0, "act"), lambda: (function, {"own": own}), lambda value: value)
        error = f"{outcome.kind}: {outcome.message}".split(": cannot")[0] if outcome.kind else ""
        found.append((own, outcome.value, error))

    with ToolRunner(8, 5.0, 1000) as runner:
        calls = Calls(runner, Record())
        for own, function in enumerate((number, lock, gone, number)):
            Task(call(own, function))
        while len(found) < 4:
            calls.deliver(waits=True)
    return found


if __name__ == "__main__":
    configure_jax()
    print(outcomes(), file=sys.stderr)
