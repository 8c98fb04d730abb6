"""The processes of a run. All run the same program with the same settings, each with its own share of the devices.

What a process decides must follow from what all have in common: tokens, counts, settings, and the objects exchanged
here. With a single process nothing is exchanged. Imports jax, and what connects processes, only to join others.
"""

import atexit
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from groupax.errors import RewardError, RunError
from groupax.parallel.sockets import own_address
from groupax.settings import environment as env

if TYPE_CHECKING:
    from groupax.parallel.peers import Peers

ADDRESS_BYTES = 1024
HEARTBEAT_S = 1800
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"  # the user's choice
ALL_DEVICES = {"local_device_ids": []}  # jax's default is one GPU for each task of a SLURM step

_peers: "Peers | None" = None


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
    (see `sockets.own_address`), nor where jax finds the address.
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


def _connect(index: int, count: int) -> "Peers":
    """Connects to the other processes, which learn process 0's address through the devices."""
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    from groupax.parallel.rendezvous import accept_peers, connect_to_primary, listen_for_peers

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
    from groupax.parallel.peers import end_now

    assert _peers is not None, "joined"
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None and not isinstance(uncaught, RewardError) and not _peers.failed:
        with suppress(RunError):
            _peers.fail(uncaught)
    if not _peers.failed:
        _peers.leave()
    if _peers.failed:
        end_now()
