"""What it takes to give a server other weights: a model in the shape of Qwen2.5-0.5B, over loopback.

    python benchmarks/weights.py [--json] [--repeats 3] [--dtypes bfloat16 float32]

Seconds from the first byte until the server decodes with them, all checksums included: all weights, and an adapter of
rank 16 on all linear layers. The server is another process on the same cores.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))

from models import KEY, QWEN_05B, parser, served, show

from groupax import Model, init_model
from groupax.models.adapted import apply_adapter
from groupax.models.lora import LoRAConfig
from groupax.models.weights.checkpoint import add_adapter
from groupax.serve.client import RemoteSampler


def row(what: str, sampler: RemoteSampler, num_bytes: int, changed: Any, repeats: int) -> dict[str, Any]:
    """The median time of several pushes, each of weights that are all new."""
    seconds = []
    for number in range(repeats + 1):
        sampler.params = jax.block_until_ready(changed(number))
        begun_s = time.perf_counter()
        sampler.push(sampler.servers[0])
        seconds.append(time.perf_counter() - begun_s)
    seconds.pop(0)  # the first one compiles
    return {"what": what, "MB": num_bytes / 1e6, "s": statistics.median(seconds), "longest s": max(seconds)}


def other(tree: Any, number: int) -> Any:
    """Weights that are all a little different."""
    return jax.tree.map(lambda x: x * jnp.asarray(1 + number / 64, x.dtype), tree)


def size(tree: Any) -> int:
    """Bytes of weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def of_all(model: Model, url: str, dtype: str, repeats: int) -> dict[str, Any]:
    """All weights."""
    sampler = RemoteSampler([url], model.config, model.params, (), api_key=KEY)
    return row(f"all, {dtype}", sampler, size(model.params), lambda number: other(model.params, number), repeats)


def of_adapter(model: Model, url: str, dtype: str, repeats: int) -> dict[str, Any]:
    """An adapter."""
    adapted = add_adapter(model, LoRAConfig(r=16))
    adapter = adapted.adapter
    assert adapter is not None, "it has just got one"
    trained = jax.tree.map(lambda x: x.astype(dtype), adapter.trained)
    sampler = RemoteSampler([url], model.config, adapted.params, (), adapter, api_key=KEY)
    return row(
        f"adapter, {dtype}",
        sampler,
        size(trained),
        lambda number: apply_adapter(adapter.frozen, other(trained, number)),
        repeats,
    )


def main() -> None:
    """Print a row for each."""
    flags = parser(__doc__ or "")
    flags.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = flags.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtypes:
        model = init_model(QWEN_05B, dtype=jnp.dtype(dtype))
        for measured in (of_all, of_adapter):
            with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "model", QWEN_05B, dtype) as (url, _):
                rows.append(measured(model, url, dtype, arguments.repeats))
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
