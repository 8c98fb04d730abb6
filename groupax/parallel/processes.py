"""The processes of a run. All run the same program with the same settings, each with its own share of the devices.

What a process decides must follow from what all have in common: tokens, counts, settings, and the objects exchanged
here. With a single process nothing is exchanged.

    process 0 ──┐
    process 1 ──┼── the coordination service of `jax.distributed`, in process 0: keeps the objects of a round by process
    process 2 ──┘

A process that fails says so through the service, and the others end. One that was killed, or whose machine is lost,
sends no heartbeats: jax then ends the others, after 100 seconds. Imports jax only to join others.
"""

import atexit
import contextlib
import hmac
import ipaddress
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
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
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            with socket.socket(family, kind) as tried:
                tried.bind((address[0], 0, *address[2:]))
            return str(address[0])
    return None


GRACE_S = 10.0  # for a process to end on its own after another one has failed
EXPLANATION_S = 3.0  # from an error until the process that caused it reports why
KEYS = "groupax"  # folder of the keys in the service
FAILED = "failed"  # key under which the first process that fails says why
SIGNATURE_BYTES = 32
LOOK_S = 0.5  # between two looks whether another process has failed
WAIT_S = 5.0  # of one wait for another process's value, by which notices are delayed


class Peers:
    """This process among those of a run.

    Args:
        process_index, num_processes: Its number and theirs.
        client: Client of jax's coordination service.
        secret: What only these processes know. It signs their objects, since the service answers everyone who reaches
            it.
    """

    def __init__(self, process_index: int, num_processes: int, client: Any, secret: bytes) -> None:
        self.process_index, self.num_processes = process_index, num_processes
        self._client, self._secret = client, secret
        self._round = 0
        self._notice: str | None = None
        self._is_informed = threading.Event()  # of what has ended a process
        self._has_failed = False
        self._has_left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._watcher.start()

    @property
    def failed(self) -> bool:
        """True once this process or another one has failed."""
        return self._has_failed or self._notice is not None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all processes by index. All processes must call this, in the same order.

        Raises:
            RunError: Another process has failed.
        """
        self._round += 1
        values = self._gather(str(self._round), value)
        if self._round > 1:  # whoever has given a value to this round has read all of the one before
            with _answering():
                self._client.key_value_delete(f"{KEYS}/{self._round - 1}/{self.process_index}")
        return values

    def fail(self, error: BaseException) -> None:
        """Reports to the other processes that this one cannot continue, unless another one failed first.

        Raises:
            RunError: Another process has failed, which explains the error.
        """
        self._is_informed.wait(EXPLANATION_S)
        if self._notice is not None and not isinstance(error, RunError):
            raise RunError(self._notice) from error
        is_reported, self._has_failed = self.failed, True
        if not is_reported:
            with contextlib.suppress(RunError):  # another process was first
                self._set(FAILED, f"process {self.process_index} failed: {type(error).__name__}: {error}")
            self._is_informed.wait(EXPLANATION_S)

    def leave(self) -> None:
        """Waits until all processes have called this, or one has failed."""
        with contextlib.suppress(RunError):
            self._gather("end", None)
        self._has_left.set()
        self._watcher.join()

    def _gather(self, name: str, value: Any) -> list[Any]:
        self._set(f"{name}/{self.process_index}", value)
        values = []
        for index in range(self.num_processes):
            while (found := self._get(f"{name}/{index}")) is None:
                if self._notice is not None:
                    raise RunError(self._notice)
            values += found
        return values

    def _watch(self) -> None:
        found = None
        while found is None and not self._has_left.wait(LOOK_S):
            try:
                found = self._get(FAILED, waits=False)
            except RunError as error:
                found = [str(error)]
        if found is None:
            return
        (self._notice,) = found
        self._is_informed.set()
        if not self._has_failed:
            print(
                f"groupax: {self._notice}. Process {self.process_index} stops too; once all processes are started "
                "again, the run resumes from its newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
            timer = threading.Timer(GRACE_S, end_now)
            timer.daemon = True
            timer.start()

    def _set(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        with _answering():
            self._client.key_value_set_bytes(f"{KEYS}/{key}", self._signature(key, data) + data)

    def _get(self, key: str, waits: bool = True) -> list[Any] | None:
        """Returns a list with the value of a key; None if there is none, maybe after waiting for it.

        The service keeps 35 kB for each wait in vain until the key has a value, so waits are for keys that will.
        """
        try:
            with _answering():
                if waits:
                    signed = self._client.blocking_key_value_get_bytes(f"{KEYS}/{key}", round(1000 * WAIT_S))
                else:
                    signed = self._client.key_value_try_get_bytes(f"{KEYS}/{key}")
        except RunError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise
        data = signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signed[:SIGNATURE_BYTES], self._signature(key, data)):
            raise RunError(f"{key} in jax's coordination service is not of a process of this run")
        return [pickle.loads(data)]

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Raises a RunError if jax's coordination service does not do what the block asks it for."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise RunError(f"jax's coordination service in process 0 does not answer: {why}") from error


def end_now() -> None:
    """Ends this process with status 1, without waiting for devices or other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(1)


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
        # programs with collectives must reach all devices in the same order; initialize() starts the backend
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # processes agree on signals through `peers`
        jax.distributed.initialize(**arguments, **_bind_address(arguments), shutdown_timeout_seconds=30)
    if jax.process_count() == 1:
        return
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
        RunError: Another process has failed.
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
        RunError: Another process has failed, which explains the error.
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


def _bind_address(arguments: Mapping[str, Any]) -> dict[str, Any]:
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
    """Returns the peers of this process, which receive their secret through the devices."""
    import numpy as np
    from jax._src.distributed import global_state
    from jax.experimental.multihost_utils import broadcast_one_to_all

    secret = broadcast_one_to_all(np.frombuffer(secrets.token_bytes(16), np.uint8))
    return Peers(index, count, global_state.client, np.asarray(secret).tobytes())


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
