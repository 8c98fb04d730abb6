"""Arrays in the memory of devices, or in that of their hosts."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

# What jax calls them.
DEVICE, HOST = "device", "pinned_host"


def on_host(tree: Any) -> Any:
    """The arrays in the memory of the devices' hosts, split as they were; each process moves its own parts."""
    return _moved(tree, HOST)


def on_devices(tree: Any) -> Any:
    """The arrays in the devices' own memory, likewise; those that are there are not copied."""
    return _moved(tree, DEVICE)


def is_on_host(x: Any) -> bool:
    """Whether an array, or the shape of one, has its place in the memory of a host."""
    return x.sharding is not None and x.sharding.memory_kind == HOST


def _moved(tree: Any, kind: str) -> Any:
    def of_array(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind == kind:
            return x
        shards = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
            for shard in x.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind(kind), shards)

    return jax.tree.map(of_array, tree)
