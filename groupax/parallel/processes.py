"""The processes of a run. All run the same program with the same settings, each with its own share of the devices.

What a process decides must follow from what all have in common: tokens, counts, settings, and the objects exchanged
here. With a single process nothing is exchanged.

    process 0 ──┐
    process 1 ──┼── hub, a thread of process 0: collects the objects of a round and sends all of them to each
    process 2 ──┘

The others connect to process 0, and both sides prove that they know a secret. Over these connections processes learn at
once that another one has ended. A program that several processes compute together would wait for ever, and jax's
coordination service notices only after a timeout. Imports jax only to join others.
"""

import atexit
import contextlib
import ipaddress
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
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from groupax.core.errors import RewardError, RunError
from groupax.core.settings import environment as env

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_PORT = 65535


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket on a host's name or address, and on a free port if that is 0.

    Raises:
        ValueError: The address cannot be used; its port may be taken.
    """
    try:
        if not 0 <= port <= LAST_PORT:
            raise OSError(f"ports are numbers from 0 to {LAST_PORT}")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port} ({error}); choose another --host or --port") from error


def is_loopback(host: str) -> bool:
    """Returns whether a server bound to this host is reachable from this machine only."""
    return host in LOOPBACK


def own_address(host: str) -> str | None:
    """Returns this machine's address for clients that know it as `host`, or None if there is no such address.

    A service bound to this address is reachable through a single network. With None the service has to listen on all
    addresses: `host` may be a router in front of this machine, or resolve to the loopback here, as a machine's own name
    does in Debian's /etc/hosts.
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, address in found:
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            continue
        with socket.socket(family, kind) as tried:
            try:
                tried.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return str(address[0])
    return None


LOST_S = 40  # after which a machine that answers nothing counts as lost
GRACE_S = 10.0  # for a process to end on its own after another one has ended
EXPLANATION_S = 3.0  # from an error until the process that caused it reports why

LEAVING = 0  # the round in which processes leave; rounds of objects are numbered from 1

_ENDED = "ended without a message: it was killed, or its machine is lost"


class Peers:
    """This process among those of a run, created by `accept_peers` or `connect_to_primary` in all of them at once."""

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
        try:
            while LEAVING not in self._complete:
                self._take(*self._hub.recv())
        except (EOFError, OSError):
            self._take("failed", f"process 0 of {self.num_processes} {_ENDED}")

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


class _Hub:
    """The exchange between the processes. It sends to process 0 last, which may end as soon as it has an answer."""

    def __init__(self, connections: dict[int, Connection]) -> None:
        self.connections = connections
        self.num_processes = len(connections)
        self.given: dict[int, dict[int, bytes]] = {}  # objects by round and process
        self.has_ended = False

    def run(self) -> None:
        while self.connections and not self.has_ended:
            ready = wait(list(self.connections.values()))
            for index, connection in list(self.connections.items()):
                if connection in ready:
                    self._receive(index, connection)

    def _receive(self, index: int, connection: Connection) -> None:
        try:
            kind, *content = connection.recv()
        except (EOFError, OSError):
            del self.connections[index]
            if not self.has_ended:
                self._send_all("failed", f"process {index} of {self.num_processes} {_ENDED}")
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

    def _send_all(self, *message: Any) -> None:
        for _, connection in sorted(self.connections.items(), reverse=True):
            with contextlib.suppress(OSError):  # `_receive` notices that the process is gone
                connection.send(message)


def end_now() -> None:
    """Ends this process with status 1, without waiting for devices or other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(1)


CONNECT_S = 60.0  # until process 0 is reached
GATHER_S = 120.0  # until all others have reached process 0
MAX_GREETINGS = 64  # connections of strangers that may be tried at the same time
GREETING_S = 5.0  # for a connection to prove that it knows the secret
LOOK_S = 0.1

Address = tuple[list[str], int, bytes]  # hosts to try, port, secret
_REFUSED = (OSError, EOFError, AuthenticationError)


def listen_for_peers(host: str | None) -> tuple[socket.socket, Address]:
    """Returns a listening socket of process 0, and the address by which the other processes reach it.

    It listens on the one address that `host`, the name by which the others know this machine, has here, and on all
    addresses only if there is none.
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
        try:
            with contextlib.suppress(*_REFUSED):
                connection = _authenticated(accepted, secret, is_server=True)
                index = connection.recv()
                _keep_alive(connection)
                arrived.put((index, connection))
        finally:
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
    hub_end, own_end = Pipe()
    hub = threading.Thread(target=_Hub({**connections, 0: hub_end}).run, name="hub", daemon=True)
    hub.start()
    return Peers(0, num_processes, own_end)


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
            _keep_alive(connection)
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


def _keep_alive(connection: Connection) -> None:
    """Lifts the limits of a greeting, and makes the kernel end the connection when the other machine is lost."""
    _limit_waits(connection, 0.0)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 1000 * LOST_S}
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # as on Linux
                duplicate.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


ADDRESS_BYTES = 1024
HEARTBEAT_S = 1800
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"  # the user's choice
ALL_DEVICES = {"local_device_ids": []}  # jax's default is one GPU for each task of a SLURM step

_peers: Peers | None = None


def join() -> None:
    """Connects this process to the others of its run, if the environment names any, before jax's first use.

    The environment names them by GROUPAX_COORDINATOR (host:port of process 0), GROUPAX_NUM_PROCESSES and
    GROUPAX_PROCESS_ID, by a SLURM step of several tasks, or by a TPU's list of several workers. If the program has
    called `jax.distributed.initialize`, its processes are connected as they are. A process uses all GPUs of its host;
    each of several tasks of a SLURM step on one host uses one.

    Raises:
        ValueError: A variable is missing or invalid, or a launcher of PyTorch has started several processes.
        RuntimeError: jax was used before.
    """
    global _peers
    arguments = _distributed_arguments(os.environ)
    if _peers is not None or (arguments is None and "jax" not in sys.modules):
        return

    import jax

    if not jax.distributed.is_initialized():
        _refuse_torchrun(os.environ)
        if arguments is None:
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # processes agree on signals through `peers`
        # `peers` notices which process has ended; with a short heartbeat jax would abort for one that was paused
        arguments = {**arguments, **_bind_address(arguments)}
        jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=30)
    if jax.process_count() == 1:
        return
    # programs with collectives must reach all processes in the same order
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    _peers = _connect(jax.process_index(), jax.process_count())
    atexit.register(_end)


def num_processes() -> int:
    """Returns the number of processes of the run."""
    return 1 if _peers is None else _peers.num_processes


def process_index() -> int:
    """Returns the index of this process; 0 is the primary one."""
    return 0 if _peers is None else _peers.process_index


def is_primary() -> bool:
    """Returns whether this is the process that writes."""
    return process_index() == 0


def may_be_primary() -> bool:
    """Returns whether this process may be the primary one of a run that it has not joined yet."""
    return all(os.environ.get(name) in (None, "0") for name in (env.PROCESS_INDEX, "SLURM_PROCID"))


def all_gather_object(value: Any) -> list[Any]:
    """Returns the values of all processes by index. Values must be picklable. All processes must call this.

    Raises:
        RunError: Another process has ended.
    """
    return [value] if _peers is None else _peers.all_gather_object(value)


def broadcast_object(value: Any) -> Any:
    """Returns the primary process's value."""
    return value if _peers is None else _peers.all_gather_object(value if is_primary() else None)[0]


def run_on_primary(function: Callable[[], Any]) -> Any:
    """Calls the function in the primary process; all processes return what it returns or raise what it raises."""
    if _peers is None:
        return function()
    returned = raised = None
    if is_primary():
        try:
            returned = function()
        except Exception as error:  # noqa: BLE001 - raised everywhere
            raised = error if _is_picklable(error) else OSError(str(error))
    returned, raised = broadcast_object((returned, raised))
    if raised is not None:
        raise raised
    return returned


def first_not_none(text: str | None) -> str | None:
    """Returns the text of the first process that has one; None if none has."""
    if _peers is None:
        return text
    return next((each for each in all_gather_object(text) if each is not None), None)


def fail(error: BaseException) -> None:
    """Reports to the other processes that this one cannot continue.

    Raises:
        RunError: Another process has ended, which explains the error.
    """
    if _peers is not None:
        _peers.fail(error)


def _distributed_arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns arguments of `jax.distributed.initialize`; None for a single process."""
    names = (env.COORDINATOR, env.NUM_PROCESSES, env.PROCESS_INDEX)
    given = {name: environment[name] for name in names if environment.get(name)}
    chooses_devices = bool(environment.get(LOCAL_DEVICES))
    if given:
        return _explicit_arguments(given, names, chooses_devices)
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks != "1":
        one_per_host = num_tasks == environment.get("SLURM_STEP_NUM_NODES") and not chooses_devices
        return ALL_DEVICES if one_per_host else {}
    workers = environment.get("TPU_WORKER_HOSTNAMES", "")
    slices = environment.get("MEGASCALE_NUM_SLICES", "1")
    return {} if "," in workers or slices != "1" else None


def _explicit_arguments(
    given: Mapping[str, str], names: tuple[str, str, str], chooses_devices: bool
) -> dict[str, Any] | None:
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{', '.join(given)} is set, but not {', '.join(missing)}; set all three, or none")
    address, count, index = (given[name] for name in names)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise ValueError(
            f"{env.NUM_PROCESSES}={count} and {env.PROCESS_INDEX}={index} must be a number, and one from 0 below it"
        )
    if not address.rpartition(":")[2].isdigit():
        raise ValueError(f"{env.COORDINATOR} must be host:port, it is {address!r}")
    if int(count) == 1:
        return None
    own = {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}
    return own if chooses_devices else own | ALL_DEVICES


def _bind_address(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the argument that makes process 0's coordinator listen on the address it was given, and on no other.

    The coordinator answers everyone who reaches it. Nothing is returned for an address that is not this machine's own
    (see `own_address`), nor where jax finds the address.
    """
    if arguments.get("process_id") != 0:
        return {}
    host, _, port = arguments["coordinator_address"].rpartition(":")
    own = own_address(host.strip("[]"))
    if own is None:
        return {}
    return {"coordinator_bind_address": f"[{own}]:{port}" if ":" in own else f"{own}:{port}"}


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Refuses several processes of torchrun, or of accelerate, which uses it: none knows of the others."""
    count = environment.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environment and count != "1" and not environment.get(env.COORDINATOR):
        raise ValueError(
            f"a launcher of PyTorch has started {count} processes of this program, each of which would be a separate "
            "run; one process uses all devices of a host: start the program with python, on several hosts with groupax "
            "launch"
        )


def _connect(index: int, count: int) -> Peers:
    """Connects to the other processes, which learn process 0's address through the devices."""
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    listener, data = None, b""
    if index == 0:
        host = os.environ.get(env.COORDINATOR, "").rpartition(":")[0].strip("[]") or None
        listener, address = listen_for_peers(host)
        data = pickle.dumps(address)
        assert len(data) <= ADDRESS_BYTES, "host names are short"
    row = np.frombuffer(data.ljust(ADDRESS_BYTES, b"\0"), np.uint8)
    address = pickle.loads(np.asarray(broadcast_one_to_all(row)).tobytes())
    return connect_to_primary(index, count, address) if listener is None else accept_peers(listener, address[2], count)


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class may raise anything when it is unpickled
        return False
    return True


def _end() -> None:
    """Reports an uncaught error and leaves, at the interpreter's exit, before jax's own handler."""
    assert _peers is not None, "joined"
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None and not isinstance(uncaught, RewardError) and not _peers.failed:
        with contextlib.suppress(RunError):
            _peers.fail(uncaught)
    if not _peers.failed:
        _peers.leave()
    if _peers.failed:
        end_now()
