"""The connections between a run's processes, which carry objects and failures.

    process 0 ──┐
    process 1 ──┼── hub, a thread of process 0: collects the objects of a round and sends all of them to each
    process 2 ──┘

Over these connections processes learn at once that another one has ended. A program that several processes
compute together would wait for ever, and jax's coordination service notices only after a timeout. Imports no jax.
"""

import contextlib
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from groupax.errors import RunError

PING_S = 5.0
MAX_UNANSWERED = 8  # pings without any message from a process, which then counts as lost
GRACE_S = 10.0  # for a process to end on its own after another one has ended
EXPLANATION_S = 3.0  # from an error until the process that caused it reports why

LEAVING = 0  # the round in which processes leave; rounds of objects are numbered from 1

_ENDED = "ended without a message: it was killed, or its machine is lost"
_SILENT = f"has sent nothing for {PING_S * MAX_UNANSWERED:.0f} s"


class Peers:
    """This process among those of a run, created by `accept_peers` or `connect_to_primary` in all of them at once.

    Args:
        process_index: Index of this process.
        num_processes: Number of processes of the run.
        hub: Connection to the hub.
    """

    def __init__(self, process_index: int, num_processes: int, hub: Connection) -> None:
        self.process_index, self.num_processes = process_index, num_processes
        self._hub, self._sending = hub, threading.Lock()
        self._changed = threading.Condition()
        self._round = 0
        self._complete: dict[int, list[bytes]] = {}  # objects by round
        self._notice: str | None = None
        self._has_failed = False
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    @property
    def failed(self) -> bool:
        """True once this process or another one has ended early."""
        return self._has_failed or self._notice is not None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all processes by index. All processes must call this, in the same order.

        Raises:
            RunError: Another process has ended.
        """
        with self._changed:
            self._round += 1
            number = self._round
        self._send("give", number, pickle.dumps(value))
        with self._changed:
            self._changed.wait_for(lambda: number in self._complete or self._notice is not None)
            if number not in self._complete:
                raise RunError(self._notice)
            return [pickle.loads(each) for each in self._complete.pop(number)]

    def fail(self, error: BaseException) -> None:
        """Reports to the other processes that this one cannot continue, unless another one ended first.

        Raises:
            RunError: Another process has ended, which explains the error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._notice is not None, EXPLANATION_S)
            if self._notice is not None and not isinstance(error, RunError):
                raise RunError(self._notice) from error
            is_reported, self._has_failed = self.failed, True
        if not is_reported:
            self._send("failed", f"process {self.process_index} failed: {type(error).__name__}: {error}")
            with self._changed:  # the hub informs this process last
                self._changed.wait_for(lambda: self._notice is not None, EXPLANATION_S)

    def leave(self) -> None:
        """Waits until all processes have called this, or one has failed."""
        self._send("give", LEAVING, b"")
        with self._changed:
            self._changed.wait_for(lambda: LEAVING in self._complete or self._notice is not None)

    def _listen(self) -> None:
        num_unanswered = 0
        while LEAVING not in self._complete:
            try:
                if self._hub.poll(PING_S):
                    num_unanswered = 0
                    self._take(*self._hub.recv())
                    continue
            except (EOFError, OSError):
                self._take("failed", f"process 0 of {self.num_processes} {_ENDED}")
                return
            num_unanswered += 1  # pings are counted, since this process may have been paused meanwhile
            if num_unanswered > MAX_UNANSWERED:
                self._take("failed", f"process 0 of {self.num_processes} {_SILENT}")
                return
            self._send("ping")

    def _take(self, kind: str, *content: Any) -> None:
        with self._changed:
            if kind == "all":
                number, values = content
                self._complete[number] = values
            elif kind == "failed" and self._notice is None:
                (self._notice,) = content
                if not self._has_failed:
                    self._end_soon()
            self._changed.notify_all()

    def _end_soon(self) -> None:
        print(
            f"groupax: {self._notice}. Process {self.process_index} stops too; once all processes are started again, "
            "the run resumes from its newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        timer = threading.Timer(GRACE_S, end_now)
        timer.daemon = True
        timer.start()

    def _send(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # `_listen` notices that the hub is gone
            self._hub.send(message)


def peers_of_primary(connections: Mapping[int, Connection]) -> Peers:
    """Starts the hub and returns the peers of process 0.

    Args:
        connections: Connections to the other processes by index.
    """
    hub_end, own_end = Pipe()
    hub = threading.Thread(target=_Hub({**connections, 0: hub_end}).run, name="hub", daemon=True)
    hub.start()
    return Peers(0, len(connections) + 1, own_end)


class _Hub:
    """The exchange between the processes. It sends to process 0 last, which may end as soon as it has an answer."""

    def __init__(self, connections: dict[int, Connection]) -> None:
        self.connections = connections
        self.num_processes = len(connections)
        self.num_unanswered = dict.fromkeys(connections, 0)
        self.given: dict[int, dict[int, bytes]] = {}  # objects by round and process
        self.has_ended = False

    def run(self) -> None:
        pinged_s = time.monotonic()
        while self.connections and not self.has_ended:
            ready = wait(list(self.connections.values()), PING_S)
            for index, connection in list(self.connections.items()):
                if connection in ready:
                    self._receive(index, connection)
            if time.monotonic() - pinged_s >= PING_S:
                pinged_s = time.monotonic()
                self._ping()

    def _receive(self, index: int, connection: Connection) -> None:
        self.num_unanswered[index] = 0
        try:
            kind, *content = connection.recv()
        except (EOFError, OSError):
            self._lose(index, _ENDED)
            return
        if kind == "failed":
            self._send_all(kind, *content)
        elif kind == "give":
            number, data = content
            given = self.given.setdefault(number, {})
            given[index] = data
            if len(given) == self.num_processes:
                self.has_ended = number == LEAVING
                self._send_all("all", number, [data for _, data in sorted(self.given.pop(number).items())])

    def _ping(self) -> None:
        for index in list(self.connections):
            self._send(index, ("ping",))
            self.num_unanswered[index] += 1
            if self.num_unanswered[index] > MAX_UNANSWERED:
                self._lose(index, _SILENT)

    def _lose(self, index: int, how: str) -> None:
        del self.connections[index]
        if not self.has_ended:
            self._send_all("failed", f"process {index} of {self.num_processes} {how}")

    def _send_all(self, *message: Any) -> None:
        for index in sorted(self.connections, reverse=True):
            self._send(index, message)

    def _send(self, index: int, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # `_receive` notices that the process is gone
            self.connections[index].send(message)


def end_now() -> None:
    """Ends this process with status 1, without waiting for devices or other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(1)
