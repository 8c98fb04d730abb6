"""Several processes on this machine, watched until all have ended.

The first failure stops all processes: SIGTERM, so that a run saves its state, then SIGKILL after a grace period. Each
process leads its own process group: a Ctrl-C reaches it once, through `Stop`, and its children end with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, Literal

from groupax.core.errors import PREEMPTED
from groupax.parallel.preemption import leave_closed_terminal, stop_signals
from groupax.satellites.launch import child
from groupax.satellites.launch.program import free_port, process_environment

MISTAKE = 2  # exit status of groupax and of Python's argument parsers for a mistake of the user
LOOK_S = 0.05
DRAIN_S = 2.0  # for the last lines of ended processes
MAX_LINE_BYTES = 1 << 16  # longer lines of output are cut
MAX_WAIT_S = 60.0  # longest pause before a restart

_writing = threading.Lock()


Ending = Literal["done", "stopped", "mistake", "failed", "preempted"]
# done        all processes finished
# stopped     a stop was requested
# mistake     of the user, which would be repeated
# failed      a process failed or was killed
# preempted   a process saved its state to be started again


@dataclass(frozen=True, kw_only=True)
class Retries:
    """A budget of restarts."""

    restarts: int = 3
    """Maximum number of restarts after a process failed."""
    preemptions: int = 1000
    """Maximum number of restarts after one saved its state to be started again (status 75)."""
    backoff_s: float = 1.0
    """Seconds before the first restart; doubled with each restart, up to a minute."""
    grace_s: float = 60.0
    """Seconds that the other processes have to stop after one has failed, before they are killed."""

    def __post_init__(self) -> None:
        for name in ("restarts", "preemptions", "backoff_s", "grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    ending: Ending  # kind of end
    why: str  # description of what happened
    status: int  # exit status of the launcher


def run_with_retries(
    attempt: Callable[[], Outcome],
    retries: Retries,
    log: Callable[[str], None],
    pause: Callable[[float], bool],
) -> Outcome:
    """Repeats an attempt while its outcome calls for it and the budget allows; returns the last outcome.

    Args:
        attempt: Starts the program and waits for its end.
        retries: The budget.
        log: Receives a line for each restart, and one when the budget is spent.
        pause: Waits for a number of seconds; returns False if a stop was requested meanwhile.
    """
    used = {"failed": 0, "preempted": 0}
    budget = {"failed": retries.restarts, "preempted": retries.preemptions}
    while True:
        outcome = attempt()
        kind = outcome.ending
        if kind not in used:
            return outcome
        if used[kind] >= budget[kind]:
            log(f"{outcome.why}; not restarted again after {budget[kind]} restarts" if budget[kind] else outcome.why)
            return outcome
        wait_s = min(retries.backoff_s * 2.0 ** min(sum(used.values()), 60), MAX_WAIT_S)
        used[kind] += 1
        log(f"{outcome.why}; restarting in {wait_s:g} s ({used[kind]} of at most {budget[kind]} times)")
        if not pause(wait_s):
            return Outcome("stopped", "a stop was requested during the pause before a restart", outcome.status)


class Stop:
    """A context that collects requests to stop (see `parallel.preemption.stop_signals`), in the main thread.

    Attributes:
        signals: Received signals, in order.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._requested = threading.Event()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def pause(self, seconds: float) -> bool:
        """Waits; returns False if a stop was requested before or meanwhile."""
        return not self._requested.wait(seconds)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        self.signals.append(number)
        self._requested.set()


def local_attempt(command: Sequence[str], num_processes: int, stop: Stop, grace_s: float) -> Outcome:
    """Runs a command as several processes, which find each other on a free port of this machine, and waits for all.

    Children that the processes leave behind are killed.

    Args:
        command: The program and its arguments.
        num_processes: Number of processes; lines of each start with its index.
        stop: Requests to stop, which are passed on.
        grace_s: Time between SIGTERM and SIGKILL.
    """
    coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
    width = len(str(num_processes - 1))
    readers = []
    with contextlib.ExitStack() as running:
        environments = [process_environment(index, num_processes, coordinator) for index in range(num_processes)]
        processes = [running.enter_context(_started(command, each)) for each in environments]
        for index, process in enumerate(processes):
            assert process.stdout, "a pipe"
            assert process.stderr, "a pipe"
            prefix = f"[{index:{width}}] "
            readers += [copy_lines(process.stdout, sys.stdout, prefix), copy_lines(process.stderr, sys.stderr, prefix)]
        first = _watch(processes, stop, grace_s)
    for reader in readers:
        reader.join(DRAIN_S)
    return _outcome([process.returncode for process in processes], first, stop)


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        child.child_argv(list(command)),
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
    """Waits until all have ended; returns the index of the first failure, or None.

    A preempted process has agreed on it with the others, which may be saving their state: they receive no further
    signal, which would end them at once.
    """
    first: int | None = None
    kill_at_s = float("inf")
    num_forwarded = 0
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = next((index for index, process in enumerate(processes) if process.returncode), None)
        pending = stop.signals[num_forwarded:]
        num_forwarded += len(pending)
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
    """Kills the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(codes: Sequence[int], first: int | None, stop: Stop) -> Outcome:
    if stop.signals:
        name = signal.Signals(stop.signals[0]).name
        if PREEMPTED in codes:
            return Outcome("stopped", f"stopped by {name}; the state is saved", PREEMPTED)
        if not any(codes):
            return Outcome("done", f"done, despite {name}", 0)
        return Outcome("stopped", f"stopped by {name}", 128 + stop.signals[0])
    if first is None:
        return Outcome("done", "done", 0)
    who = f"process {first} of {len(codes)}" if len(codes) > 1 else "the process"
    code = codes[first]
    if code == PREEMPTED:
        return Outcome("preempted", f"{who} was preempted", code)
    if code == MISTAKE:
        return Outcome("mistake", f"{who} ended with status {MISTAKE}: a mistake that a restart would repeat", code)
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory is full" if -code == signal.SIGKILL else ""
        return Outcome("failed", f"{who} was killed by {name}{hint}", 128 - code)
    return Outcome("failed", f"{who} failed with status {code}", code)


def copy_lines(source: IO[bytes], target: IO[str], prefix: str) -> threading.Thread:
    """Starts a thread that copies lines until the source ends, without what progress bars overwrite.

    Args:
        source: Read end of a pipe.
        target: Destination, in which lines of several threads do not mix.
        prefix: Text before each line.
    """

    def copy() -> None:
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                with _writing:
                    target.write(f"{prefix}{text}\n")
                    target.flush()

    thread = threading.Thread(target=copy, name=f"output {prefix}", daemon=True)
    thread.start()
    return thread
