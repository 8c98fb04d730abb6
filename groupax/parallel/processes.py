"""The processes of a run. All run the same program with the same settings, each with its own part of the devices.

What a process decides must follow from what all have in common: tokens, counts, settings, and what is exchanged here.
With one process nothing is exchanged. Imports neither jax nor what connects processes but to join others.
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
ALL_DEVICES = {"local_device_ids": []}  # by itself jax takes one GPU for each task of a SLURM step

_peers: "Peers | None" = None


def join() -> None:
    """Become one of several processes, if the environment says so; before jax's first use.

    GROUPAX_COORDINATOR (host:port of process 0), GROUPAX_NUM_PROCESSES and GROUPAX_PROCESS_ID say so, or a SLURM step
    of several tasks, or a TPU's list of several workers. A program that has called `jax.distributed.initialize` itself
    is joined as it is. A process has all GPUs of its host; where a SLURM step has several tasks on a host
    each has one.

    Raises:
        ValueError: one of the variables is missing or none that can be, or a launcher of PyTorch has started several
            processes.
        RuntimeError: jax was used before.
    """
    global _peers
    arguments = _arguments(os.environ)
    if _peers is not None or (arguments is None and "jax" not in sys.modules):
        return

    import jax

    if not jax.distributed.is_initialized():
        _refuse_copies(os.environ)
        if arguments is None:
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # our own signals are agreed on
        # who has ended is noticed by peers; jax takes a process that was paused for one
        arguments = {**arguments, **_bound(arguments)}
        jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=30)
    if jax.process_count() == 1:
        return
    # programs with collectives must reach all processes in one order
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    _peers = _meet(jax.process_index(), jax.process_count())
    atexit.register(_end)


def num_processes() -> int:
    """Of the run."""
    return 1 if _peers is None else _peers.num_processes


def process_index() -> int:
    """Of this process; 0 is the first."""
    return 0 if _peers is None else _peers.process_index


def is_primary() -> bool:
    """Whether this is the process that writes."""
    return process_index() == 0


def may_be_primary() -> bool:
    """Whether this process may be the first one of a run that it has not joined yet, by its launcher's variables."""
    return all(os.environ.get(name) in (None, "0") for name in (env.PROCESS_INDEX, "SLURM_PROCID"))


def all_gather_object(value: Any) -> list[Any]:
    """What all processes give, by their numbers: any object that can be pickled. All must call this.

    Raises:
        RunError: another process has ended.
    """
    return [value] if _peers is None else _peers.all_gather_object(value)


def broadcast_object(value: Any) -> Any:
    """What the first process gives."""
    return value if _peers is None else _peers.all_gather_object(value if is_primary() else None)[0]


def run_on_primary(function: Callable[[], Any]) -> Any:
    """Have the first process call the function; what it returns or raises, all return or raise."""
    if _peers is None:
        return function()
    returned = raised = None
    if is_primary():
        try:
            returned = function()
        except Exception as error:  # noqa: BLE001 - raised everywhere
            raised = error if _survives(error) else OSError(str(error))
    returned, raised = broadcast_object((returned, raised))
    if raised is not None:
        raise raised
    return returned


def first_not_none(text: str | None) -> str | None:
    """The text of the first process that gives one; None if none does."""
    if _peers is None:
        return text
    return next((each for each in all_gather_object(text) if each is not None), None)


def fail(error: BaseException) -> None:
    """Tell the other processes that this one cannot go on.

    Raises:
        RunError: another one has ended, which explains the error.
    """
    if _peers is not None:
        _peers.fail(error)


def _arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Of `jax.distributed.initialize`; None for a process of its own."""
    given = {
        name: environment[name]
        for name in (env.COORDINATOR, env.NUM_PROCESSES, env.PROCESS_INDEX)
        if environment.get(name)
    }
    if given:
        missing = [name for name in (env.COORDINATOR, env.NUM_PROCESSES, env.PROCESS_INDEX) if name not in given]
        if missing:
            raise ValueError(f"{', '.join(given)} is set, but not {', '.join(missing)}; set all three, or none")
        address, count, own = given[env.COORDINATOR], given[env.NUM_PROCESSES], given[env.PROCESS_INDEX]
        if not (count.isdigit() and own.isdigit() and int(own) < int(count)):
            raise ValueError(
                f"{env.NUM_PROCESSES}={count} and {env.PROCESS_INDEX}={own} must be a number and one from 0 below it"
            )
        if not address.rpartition(":")[2].isdigit():
            raise ValueError(f"{env.COORDINATOR} must be host:port, it is {address!r}")
        if int(count) == 1:
            return None
        everything = {} if environment.get(LOCAL_DEVICES) else ALL_DEVICES
        return {"coordinator_address": address, "num_processes": int(count), "process_id": int(own), **everything}
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks != "1":
        one_each = num_tasks == environment.get("SLURM_STEP_NUM_NODES") and not environment.get(LOCAL_DEVICES)
        return ALL_DEVICES if one_each else {}
    workers = environment.get("TPU_WORKER_HOSTNAMES", "")
    slices = environment.get("MEGASCALE_NUM_SLICES", "1")
    return {} if "," in workers or slices != "1" else None


def _bound(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns where the coordinator of process 0 listens: at the address that it was given, not at all of this machine.

    The coordinator answers whoever reaches it. Nothing is returned for an address that is not this machine's own (see
    `listening.own_address`), nor where jax itself finds the address.
    """
    if arguments.get("process_id") != 0:
        return {}
    host, _, port = arguments["coordinator_address"].rpartition(":")
    own = own_address(host.strip("[]"))
    if own is None:
        return {}
    return {"coordinator_bind_address": f"[{own}]:{port}" if ":" in own else f"{own}:{port}"}


def _refuse_copies(environment: Mapping[str, str]) -> None:
    """Of torchrun, which accelerate uses as well.

    Raises:
        ValueError: there are several processes, none of which knows of the others.
    """
    count = environment.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environment and count != "1" and not environment.get(env.COORDINATOR):
        raise ValueError(
            f"a launcher of PyTorch has started {count} processes of this program, each of which would be a run of its "
            "own; one process uses all devices of a host: start the program with python, on several hosts with groupax "
            "launch"
        )


def _meet(own: int, count: int) -> "Peers":
    """Connections to the other processes; the devices carry the address of the first one."""
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    from groupax.parallel.peers import accept_peers, connect_to_primary, listen_for_peers

    listener, data = None, b""
    if own == 0:
        host = os.environ.get(env.COORDINATOR, "").rpartition(":")[0].strip("[]") or None
        listener, address = listen_for_peers(host)
        data = pickle.dumps(address)
        assert len(data) <= ADDRESS_BYTES, "host names are short"
    row = np.frombuffer(data.ljust(ADDRESS_BYTES, b"\0"), np.uint8)
    told = np.asarray(process_allgather(row))[0].tobytes()
    address = pickle.loads(told)
    return connect_to_primary(own, count, address) if listener is None else accept_peers(listener, address[2], count)


def _survives(error: Exception) -> bool:
    """Whether an error can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a class does when it is made anew
        return False
    return True


def _end() -> None:
    """At the end of the interpreter, before jax's own."""
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
