"""Changes of the cache's arrays, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from groupax.engine.cache import ROWS, move, pspec_of
from groupax.parallel.mesh import make_mesh


@pytest.mark.parametrize("num_kept", [1, 4])
@pytest.mark.parametrize("num_columns", [32, 64, 16])
def test_rows_are_kept_with_columns_cut_or_added_at_their_end(num_kept, num_columns):
    mesh = make_mesh((-1, 1, 1, 1, 1))
    num_devices, before = mesh.devices.size, 32
    kept = np.tile(np.arange(num_kept)[::-1], num_devices).astype(np.int32)
    rows = jax.device_put(kept, NamedSharding(mesh, ROWS))
    for axis, shape, dtype in (
        (1, (before,), np.int32),
        (3, (2, 8, before), np.float32),
        (2, (2, before, 8), np.float32),
    ):
        x = np.random.default_rng(0).integers(0, 99, (16 * num_devices, *shape)).astype(dtype)
        on_devices = jax.device_put(x, NamedSharding(mesh, pspec_of(jnp.asarray(x))))
        moved = move(on_devices, rows, axis=axis, num_columns=num_columns, mesh=mesh)
        shards = x.reshape(num_devices, 16, *shape)[:, kept[:num_kept]].reshape(-1, *shape)
        added = [(0, max(0, num_columns - before) if dim == axis else 0) for dim in range(x.ndim)]
        np.testing.assert_array_equal(moved, np.take(np.pad(shards, added), np.arange(num_columns), axis))
