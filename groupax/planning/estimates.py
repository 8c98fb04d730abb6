"""Estimates of a program's temporary memory by arithmetic, from before it is compiled."""

import math
from collections.abc import Mapping

from jax.sharding import Mesh

from groupax.config import GRPOConfig
from groupax.engine.scheduler import piece_size
from groupax.models.config import ModelConfig
from groupax.models.execution import ACCELERATOR_LOGITS
from groupax.models.flops import activation_bytes_per_token
from groupax.parallel.mesh import decoding_mesh
from groupax.planning.buffers import ACTIVATIONS, LOGITS
from groupax.planning.programs import device_bytes
from groupax.planning.run import Run
from groupax.training.memory import compute_dtype


def estimated_temporaries(
    config: ModelConfig, mesh: Mesh, args: GRPOConfig, run: Run
) -> dict[str, Mapping[str, float]]:
    """Returns bytes of activations and of logits on a device while each program runs.

    Copies that the compiler makes, of weights for instance, are not included.

    Args:
        config: Config of the model.
        mesh: Mesh of the devices.
        args: Settings of the run.
        run: The run.
    """
    itemsize = compute_dtype(mesh.devices.flat[0].platform, args.dtype).itemsize
    decoding, cache = decoding_mesh(mesh, args.decoding_tp), run.cache
    vocab_bytes = 4 * config.vocab_size / decoding.shape["tp"]  # of a row's logits, in float32
    prompts, columns = cache.max_prompts, cache.num_prompt_columns
    platform = mesh.devices.flat[0].platform
    piece = math.prod(piece_size(prompts, columns, config.num_heads // decoding.shape["tp"], platform))
    cells = run.micro_batch_cells / mesh.shape["sp"]
    chunk = 4 * min(ACCELERATOR_LOGITS, cells * config.vocab_size / mesh.shape["tp"])

    def activations(checkpointing: str) -> float:
        return activation_bytes_per_token(config, itemsize, checkpointing) / mesh.shape["tp"]

    [kv] = [device_bytes({"": each.arguments["kv cache"]}) for each in run.programs if each.name == "decode_chunk"]
    admitted = kv * prompts * columns / cache.num_tokens  # keys and values before they are in the cache
    return {
        "admit": {ACTIVATIONS: admitted + activations("full") * piece, LOGITS: 0.0},
        "decode_chunk": {ACTIVATIONS: activations("full") * cache.num_slots, LOGITS: 2 * vocab_bytes * cache.num_slots},
        "score": {ACTIVATIONS: activations("full") * cells, LOGITS: chunk},
        "micro_step": {ACTIVATIONS: activations(run.checkpointing) * cells, LOGITS: 2 * chunk},
    }
