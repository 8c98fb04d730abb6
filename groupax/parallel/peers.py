"""What the processes of a run tell each other beside the devices: objects, failures, that they are there.

    process 1 ──┐
    process 2 ──┼── process 0 gathers what each gives, and hands all of it to each
    process 3 ──┘

The connections are their own, so that whoever waits learns at once that another process has ended. Devices do not tell
that: a program that several processes compute together waits for ever. Imports no jax.
"""

import contextlib
import logging
import os
import pickle
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from groupax.errors import RunError
from groupax.parallel.sockets import own_address

PING_S = 5.0
MOST_UNANSWERED = 8  # pings without a word from a process that then counts as lost
GRACE_S = 10.0  # for a process to end by itself when another has ended
EXPLANATION_S = 3.0  # from an error to the word of the process that caused it
CONNECT_S = 60.0  # until process 0 is reached
GATHER_S = 120.0  # until all others have reached process 0
GREETING_S = 10.0  # in which a connection has to show that it knows the secret
LOOK_S = 0.1
MAX_GREETINGS = 64  # connections beside those of the run's processes that may be showing it at the same time

Address = tuple[list[str], int, bytes]  # hosts to try, port, secret


class Peers:
    """The other processes of a run. Made by `accept_peers` or `connect_to_primary`, in all of them at the same time.

    Args:
        process_index: of this process.
        connections: to the others by their numbers; of all but process 0 only to that one.

    Attributes:
        process_index: likewise.
        num_processes: of the run.
    """

    def __init__(self, process_index: int, num_processes: int, connections: Mapping[int, Connection]) -> None:
        self.process_index, self.num_processes = process_index, num_processes
        self._connections = dict(connections)
        self._locks = {other: threading.Lock() for other in connections}
        self._changed = threading.Condition()
        self._round = 0
        self._given: dict[int, dict[int, bytes]] = {}  # in process 0, by round and process
        self._complete: dict[int, list[bytes]] = {}  # by round
        self._left: set[int] = set()
        self._notice: str | None = None
        self._has_failed = self._is_over = False
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether this process or another one has ended before its time."""
        return self._has_failed or self._notice is not None

    def all_gather_object(self, value: Any) -> list[Any]:
        """What all processes give, by their numbers. Each must call this, and all in the same order.

        Raises:
            RunError: another process has ended.
        """
        data = pickle.dumps(value)
        with self._changed:
            self._round += 1
            number = self._round
        if self.process_index:
            self._send(0, ("give", number, data))
        else:
            self._gather(0, number, data)
        with self._changed:
            self._changed.wait_for(lambda: number in self._complete or self._notice is not None)
            if number not in self._complete:
                raise RunError(self._notice)
            return [pickle.loads(each) for each in self._complete.pop(number)]

    def fail(self, error: BaseException) -> None:
        """This process cannot go on: tell the others, unless it is they who have ended.

        Raises:
            RunError: another process has ended, which explains the error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._notice is not None, EXPLANATION_S)
            if self._notice is not None and not isinstance(error, RunError):
                raise RunError(self._notice) from error
            told, self._has_failed = self.failed, True
        if not told:
            text = f"process {self.process_index} failed: {type(error).__name__}: {error}"
            for other in self._connections:
                self._send(other, ("failed", text))

    def leave(self) -> None:
        """Wait until all processes have come to their ends, or one has failed."""
        if self.process_index:
            self._send(0, ("left",))
        else:
            self._leaves(0)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._notice is not None)

    # -- in the thread

    def _listen(self) -> None:
        others = dict(self._connections)
        unanswered = dict.fromkeys(others, 0)
        pinged_s = time.monotonic()
        while others and not self._is_over:
            ready = wait(list(others.values()), PING_S)
            for other, connection in list(others.items()):
                if connection in ready:
                    unanswered[other] = 0
                    try:
                        self._take(other, connection.recv())
                    except (EOFError, OSError):
                        del others[other]
                        self._lost(other, "ended without a word: it was killed, or its machine is lost")
            if time.monotonic() - pinged_s >= PING_S:  # pings are counted, as this process may have been paused
                pinged_s = time.monotonic()
                for other in list(others):
                    self._ping(other)
                    unanswered[other] += 1
                    if unanswered[other] > MOST_UNANSWERED:
                        del others[other]
                        self._lost(other, f"has not been heard of for {PING_S * MOST_UNANSWERED:.0f} s")

    def _take(self, other: int, message: tuple[Any, ...]) -> None:
        match message:
            case ("give", number, data):
                self._gather(other, number, data)
            case ("all", number, everything):
                with self._changed:
                    self._complete[number] = everything
                    self._changed.notify_all()
            case ("failed", text):
                self._noticed(text)
            case ("left",):
                self._leaves(other)
            case ("over",):
                self._ends()

    def _gather(self, other: int, number: int, data: bytes) -> None:
        """In process 0."""
        with self._changed:
            given = self._given.setdefault(number, {})
            given[other] = data
            if len(given) < self.num_processes:
                return
            everything = [data for _, data in sorted(self._given.pop(number).items())]
            self._complete[number] = everything
            self._changed.notify_all()
        for each in self._connections:
            self._send(each, ("all", number, everything))

    def _leaves(self, other: int) -> None:
        """In process 0."""
        self._left.add(other)
        if len(self._left) == self.num_processes:
            for each in self._connections:
                self._send(each, ("over",))
            self._ends()

    def _ends(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _lost(self, other: int, how: str) -> None:
        if not self._is_over:
            self._noticed(f"process {other} of {self.num_processes} {how}")

    def _noticed(self, text: str) -> None:
        with self._changed:
            if self._notice is not None or self._is_over:
                return
            self._notice = text
            self._changed.notify_all()
            by_itself = self._has_failed
        if not self.process_index:
            for each in self._connections:
                self._send(each, ("failed", text))
        if not by_itself:
            print(
                f"groupax: {text}. Process {self.process_index} stops too; once all processes are started again, the "
                "run resumes from its newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        timer = threading.Timer(GRACE_S, end_now)
        timer.daemon = True
        timer.start()

    def _ping(self, other: int) -> None:
        if self._locks[other].acquire(blocking=False):  # something is being sent at the moment otherwise
            try:
                with contextlib.suppress(OSError):
                    self._connections[other].send(("ping",))
            finally:
                self._locks[other].release()

    def _send(self, other: int, message: tuple[Any, ...]) -> None:
        with self._locks[other], contextlib.suppress(OSError):  # one that is gone is noticed where it is heard
            self._connections[other].send(message)


def end_now() -> None:
    """End this process with status 1, without waiting for devices or other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(1)


def listen_for_peers(host: str | None) -> tuple[socket.socket, Address]:
    """Returns a listening socket of process 0 and what the other processes have to know to reach it.

    It listens at the one address that `host` names on this machine, and at all addresses only if there is none.

    Args:
        host: by which the others know this machine, if that is known.
    """
    own = own_address(host) if host else None
    family = socket.AF_INET6 if own and ":" in own else socket.AF_INET
    listener = socket.create_server((own or "0.0.0.0", 0), family=family, backlog=1024)
    names = dict.fromkeys(filter(None, (host, socket.getfqdn(), socket.gethostname())))
    return listener, ([*names], int(listener.getsockname()[1]), secrets.token_bytes(16))


def accept_peers(listener: socket.socket, secret: bytes, num_processes: int) -> Peers:
    """Returns the peers of process 0, once all others have connected. Closes the listener.

    Connections are greeted beside each other, so that one which says nothing holds up nobody.

    Raises:
        RunError: a process did not connect in time.
    """
    connections: dict[int, Connection] = {}
    arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    greetings = threading.BoundedSemaphore(num_processes + MAX_GREETINGS)
    until_s = time.monotonic() + GATHER_S
    others = set(range(1, num_processes))

    def greet(accepted: socket.socket) -> None:
        try:
            connection = _greeted(accepted, secret)
            if connection is not None:
                arrived.put(connection)
        finally:
            greetings.release()

    with listener:
        listener.settimeout(LOOK_S)
        while missing := others - connections.keys():
            if time.monotonic() > until_s:
                named = ", ".join(map(str, sorted(missing)))
                raise RunError(
                    f"processes {named} of {num_processes} did not connect to process 0 at port "
                    f"{listener.getsockname()[1]} in {GATHER_S:.0f} s; see their logs, and open the ports between the "
                    "hosts"
                )
            with contextlib.suppress(queue.Empty):
                number, connection = arrived.get_nowait()
                connections[number] = connection
                continue
            try:
                accepted, _ = listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            if greetings.acquire(blocking=False):
                threading.Thread(target=greet, args=(accepted,), name="greeting", daemon=True).start()
            else:
                accepted.close()
    return Peers(0, num_processes, connections)


def connect_to_primary(number: int, num_processes: int, address: Address) -> Peers:
    """The peers of another process.

    Raises:
        RunError: process 0 cannot be reached.
    """
    hosts, port, secret = address
    begun_s = time.monotonic()
    faults: dict[str, str] = {}
    while time.monotonic() - begun_s < CONNECT_S:
        for host in hosts:
            try:
                connection = _connected(host, port, secret)
            except (OSError, EOFError, AuthenticationError) as error:
                faults[host] = str(error)
                continue
            connection.send(number)
            return Peers(number, num_processes, {0: connection})
        time.sleep(0.5)
    told = "; ".join(f"{host}: {fault}" for host, fault in faults.items())
    raise RunError(f"process {number} cannot reach process 0 at port {port} ({told}); open the ports between the hosts")


def _greeted(accepted: socket.socket, secret: bytes) -> tuple[int, Connection] | None:
    """Returns the number and the connection of a process that knows the secret; None for a stranger, who is cut off."""
    _limit_waits(accepted, GREETING_S)
    connection = Connection(accepted.detach())
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        number = connection.recv()
        _limit_waits(connection, 0.0)
    except (OSError, EOFError, AuthenticationError):
        connection.close()
        return None
    return number, connection


def _connected(host: str, port: int, secret: bytes) -> Connection:
    """Returns a connection to process 0, which has shown that it knows the secret."""
    connecting = socket.create_connection((host, port), timeout=GREETING_S)
    connecting.setblocking(True)
    _limit_waits(connecting, GREETING_S)
    connection = Connection(connecting.detach())
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        _limit_waits(connection, 0.0)
    except (OSError, EOFError, AuthenticationError):
        connection.close()
        raise
    return connection


def _limit_waits(of: socket.socket | Connection, seconds: float) -> None:
    """Has each read and write end with an error after so long; 0 for never. The kernel does it: `Connection` cannot."""
    same = socket.socket(fileno=os.dup(of.fileno()))
    with same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
