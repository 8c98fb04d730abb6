"""The meeting of a run's processes: the others connect to process 0, and both sides prove that they know a secret."""

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from groupax.errors import RunError
from groupax.parallel.peers import Peers, peers_of_primary
from groupax.parallel.sockets import own_address

CONNECT_S = 60.0  # until process 0 is reached
GATHER_S = 120.0  # until all others have reached process 0
GREETING_S = 10.0  # for a connection to prove that it knows the secret
LOOK_S = 0.1
MAX_GREETINGS = 64  # connections of strangers that may be tried at the same time

Address = tuple[list[str], int, bytes]  # hosts to try, port, secret
_REFUSED = (OSError, EOFError, AuthenticationError)


def listen_for_peers(host: str | None) -> tuple[socket.socket, Address]:
    """Returns a listening socket of process 0, and the address by which the other processes reach it.

    It listens on the one address that `host` names on this machine, and on all addresses only if there is none.

    Args:
        host: The name by which the others know this machine, if known.
    """
    own = own_address(host) if host else None
    family = socket.AF_INET6 if own and ":" in own else socket.AF_INET
    listener = socket.create_server((own or "0.0.0.0", 0), family=family, backlog=1024)
    names = dict.fromkeys(filter(None, (host, socket.getfqdn(), socket.gethostname())))
    return listener, ([*names], int(listener.getsockname()[1]), secrets.token_bytes(16))


def accept_peers(listener: socket.socket, secret: bytes, num_processes: int) -> Peers:
    """Returns the peers of process 0 once all other processes have connected. Closes the listener.

    Each connection is greeted in its own thread, so that a silent one delays no other.

    Raises:
        RunError: A process did not connect in time.
    """
    connections: dict[int, Connection] = {}
    arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    greetings = threading.BoundedSemaphore(num_processes + MAX_GREETINGS)
    deadline_s = time.monotonic() + GATHER_S

    def greet(accepted: socket.socket) -> None:
        with contextlib.suppress(*_REFUSED):
            connection = _authenticated(accepted, secret, is_server=True)
            index = connection.recv()
            _limit_waits(connection, 0.0)
            arrived.put((index, connection))
        greetings.release()

    with listener:
        listener.settimeout(LOOK_S)
        while missing := set(range(1, num_processes)) - connections.keys():
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"processes {', '.join(map(str, sorted(missing)))} of {num_processes} did not connect to process 0 "
                    f"on port {listener.getsockname()[1]} within {GATHER_S:.0f} s; see their logs, and open the ports "
                    "between the hosts"
                )
            with contextlib.suppress(queue.Empty):
                index, connection = arrived.get_nowait()
                connections[index] = connection
                continue
            try:
                accepted, _ = listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            if greetings.acquire(blocking=False):
                threading.Thread(target=greet, args=(accepted,), name="greeting", daemon=True).start()
            else:
                accepted.close()
    return peers_of_primary(connections)


def connect_to_primary(process_index: int, num_processes: int, address: Address) -> Peers:
    """Returns the peers of a process other than 0.

    Raises:
        RunError: Process 0 cannot be reached.
    """
    hosts, port, secret = address
    start_s = time.monotonic()
    faults: dict[str, str] = {}
    while time.monotonic() - start_s < CONNECT_S:
        for host in hosts:
            try:
                connecting = socket.create_connection((host, port), timeout=GREETING_S)
                connection = _authenticated(connecting, secret, is_server=False)
            except _REFUSED as error:
                faults[host] = str(error)
                continue
            connection.send(process_index)
            _limit_waits(connection, 0.0)
            return Peers(process_index, num_processes, connection)
        time.sleep(0.5)
    reasons = "; ".join(f"{host}: {fault}" for host, fault in faults.items())
    raise RunError(
        f"process {process_index} cannot reach process 0 on port {port} ({reasons}); open the ports between the hosts"
    )


def _authenticated(raw: socket.socket, secret: bytes, is_server: bool) -> Connection:
    """Returns the connection after both sides have shown that they know the secret, with timeouts of a greeting."""
    raw.setblocking(True)
    connection = Connection(raw.detach())
    _limit_waits(connection, GREETING_S)
    try:
        for step in (deliver_challenge, answer_challenge) if is_server else (answer_challenge, deliver_challenge):
            step(connection, secret)
    except _REFUSED:
        connection.close()
        raise
    return connection


def _limit_waits(connection: Connection, seconds: float) -> None:
    """Makes the kernel end reads and writes that take longer, since `Connection` cannot; 0 is never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            duplicate.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
