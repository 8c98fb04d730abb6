"""Several processes on this machine, watched until all have ended.

The first that fails stops all: SIGTERM, so that a run saves its state, and SIGKILL after a grace. Each is the head of a
process group of its own: a Ctrl-C reaches them once, through `Stop`, and what they have started goes with them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from groupax.errors import PREEMPTED
from groupax.launch import child
from groupax.launch.environment import environment_of, free_port
from groupax.launch.output import copied
from groupax.launch.retries import Outcome

MISTAKE = 2  # exit status of groupax, and of Python's parsers of arguments, for what the user can mend
LOOK_S = 0.05
DRAIN_S = 2.0  # for the last lines of processes that have ended


class Stop:
    """Requests to stop what was started. As a context it takes SIGTERM and SIGINT, in the main thread.

    Attributes:
        signals: those that came, in order.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._came = threading.Event()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def pause(self, seconds: float) -> bool:
        """Wait; False if there was a request before or meanwhile."""
        return not self._came.wait(seconds)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)
        self._came.set()


def attempt(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    prefixes: Sequence[str],
    stop: Stop,
    grace_s: float,
) -> Outcome[int]:
    """Start a process for each environment and wait for the end of all; the outcome's value is an exit status.

    What the processes have started and left behind is killed.

    Args:
        command: the program and its arguments.
        environments: variables of each process beside those of this one.
        prefixes: of the lines of each.
        stop: where requests to stop come in; they are passed on.
        grace_s: between SIGTERM and SIGKILL.
    """
    readers = []
    with contextlib.ExitStack() as running:
        processes = [running.enter_context(_started(command, each)) for each in environments]
        for process, prefix in zip(processes, prefixes, strict=True):
            assert process.stdout, "a pipe"
            assert process.stderr, "a pipe"
            readers += [copied(process.stdout, sys.stdout, prefix), copied(process.stderr, sys.stderr, prefix)]
        first = _watch(processes, stop, grace_s)
    for reader in readers:
        reader.join(DRAIN_S)
    return _outcome([process.returncode for process in processes], first, stop)


def local_attempt(command: Sequence[str], num_processes: int, stop: Stop, grace_s: float) -> Outcome[int]:
    """`attempt` with that many processes, which find each other at a free port of this machine."""
    coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
    environments = [environment_of(process, num_processes, coordinator) for process in range(num_processes)]
    width = len(str(num_processes - 1))
    prefixes = [f"[{process:{width}}] " for process in range(num_processes)]
    return attempt(command, environments, prefixes, stop, grace_s)


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        child.words_of(list(command)),
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    try:
        yield process
    finally:
        _kill(process)
        process.wait()


def _watch(processes: Sequence[subprocess.Popen[bytes]], stop: Stop, grace_s: float) -> int | None:
    """Wait until all have ended; which failed first, None if none did.

    One that was preempted has agreed on it with the others, which may be saving: these get no further signal, which
    would end them at once, but time.
    """
    first: int | None = None
    kill_at_s = float("inf")
    passed_on = 0
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = next((index for index, process in enumerate(processes) if process.returncode), None)
        pending = stop.signals[passed_on:]
        passed_on += len(pending)
        if first is None and failed is not None:
            first, kill_at_s = failed, time.monotonic() + grace_s
            if not stop.signals and processes[first].returncode != PREEMPTED:
                pending = [signal.SIGTERM]
        if not running:
            return first
        for process in running:
            for number in pending:
                process.send_signal(number)
            if time.monotonic() > kill_at_s:
                _kill(process)
        time.sleep(LOOK_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(codes: Sequence[int], first: int | None, stop: Stop) -> Outcome[int]:
    if stop.signals:
        name = signal.Signals(stop.signals[0]).name
        if PREEMPTED in codes:
            return Outcome("stopped", f"stopped by {name}; the state is saved", PREEMPTED)
        if not any(codes):
            return Outcome("done", f"done, though {name} came", 0)
        return Outcome("stopped", f"stopped by {name}", 128 + stop.signals[0])
    if first is None:
        return Outcome("done", "done", 0)
    who = f"process {first} of {len(codes)}" if len(codes) > 1 else "the process"
    code = codes[first]
    if code == PREEMPTED:
        return Outcome("preempted", f"{who} was preempted", code)
    if code == MISTAKE:
        return Outcome("mistake", f"{who} ended with status {MISTAKE}: a mistake that would be made again", code)
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory is full" if -code == signal.SIGKILL else ""
        return Outcome("failed", f"{who} was killed by {name}{hint}", 128 - code)
    return Outcome("failed", f"{who} failed with status {code}", code)
