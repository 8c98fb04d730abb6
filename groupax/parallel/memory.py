"""Moves of arrays between the memory of devices and that of their hosts."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

# jax's memory kinds
DEVICE, HOST = "device", "pinned_host"


def on_host(tree: Any) -> Any:
    """Moves arrays to their devices' hosts, sharded as they are; each process moves its own shards."""
    return _moved(tree, HOST)


def on_devices(tree: Any) -> Any:
    """Moves arrays to the devices' own memory; arrays that are there already are not copied."""
    return _moved(tree, DEVICE)


def is_on_host(x: Any) -> bool:
    """Returns whether an array, or the abstract shape of one, is in a host's memory."""
    return x.sharding is not None and x.sharding.memory_kind == HOST


def _moved(tree: Any, kind: str) -> Any:
    def move(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind == kind:
            return x
        shards = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
            for shard in x.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind(kind), shards)

    return jax.tree.map(move, tree)
