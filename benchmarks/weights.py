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
from groupax.models.adapted import joined
from groupax.models.checkpoint import add_adapter
from groupax.models.lora import LoRAConfig
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


def rows_of(model: Model, url: str, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """All weights, then an adapter."""

    def other(tree: Any, number: int) -> Any:
        return jax.tree.map(lambda x: x * jnp.asarray(1 + number / 64, x.dtype), tree)

    def size(tree: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    whole = RemoteSampler([url], model.config, model.params, (), api_key=KEY)
    rows = [row(f"all, {dtype}", whole, size(model.params), lambda number: other(model.params, number), repeats)]
    adapted = add_adapter(model, LoRAConfig(r=16))
    adapter = adapted.adapter
    assert adapter is not None, "it has just got one"
    trained = jax.tree.map(lambda x: x.astype(dtype), adapter.trained)
    sampler = RemoteSampler([url], model.config, adapted.params, (), adapter, api_key=KEY)
    changed = lambda number: joined(adapter.frozen, other(trained, number))  # noqa: E731
    return [*rows, row(f"adapter, {dtype}", sampler, size(trained), changed, repeats)]


def main() -> None:
    """Print a row for each."""
    flags = parser(__doc__ or "")
    flags.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = flags.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "model", QWEN_05B, dtype) as (url, _):
            model = init_model(QWEN_05B, dtype=jnp.dtype(dtype))
            rows += rows_of(model, url, dtype, arguments.repeats)
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
