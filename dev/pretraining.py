"""Pretraining of small models on rows of several documents, for the scripts that make the embedded models."""

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from groupax.models.attention import attend_masked
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import forward, head_weights
from groupax.models.logprobs import token_logprobs
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import save_model
from groupax.parallel.mesh import DATA
from groupax.runs.model_card import read_card

WARMUP_STEPS = 100


class Corpus(NamedTuple):
    """Rows of documents, one after the other.

    Attributes:
        rows: Token ids.
        learned: Which tokens are to be learned: completions and their ends.
        documents: Number of the document of each token, from 1; 0 outside of any, -1 for what all documents of a row
            see.
        positions: Position of each token in its document.
    """

    rows: Int[np.ndarray, "R T"]
    learned: Bool[np.ndarray, "R T"]
    documents: Int[np.ndarray, "R T"]
    positions: Int[np.ndarray, "R T"]


def attend(attn: AttentionConfig, q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Attention over the visible keys, [B, S, K, H]."""
    return attend_masked(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), visible, attn)


def loss(
    config: ModelConfig,
    params: Params,
    rows: Int[Array, "B T"],
    learned: Bool[Array, "B T"],
    documents: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Mean of -log p over the learned tokens. Documents in a row do not see each other."""
    B, T = rows.shape[0], rows.shape[1] - 1
    tokens = rows[:, :-1]
    causal = jnp.tril(jnp.ones((1, T, T), bool))
    own, others = documents[:, :-1, None], documents[:, None, :-1]
    visible = causal & ((own == others) | (others < 0))

    def attend_in_document(attn: AttentionConfig, kept: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        return attend(attn, q, k, v, visible).reshape(B * T, *q.shape[2:]), kept

    hidden = forward(config, params, tokens.reshape(-1), positions[:, :-1].reshape(-1), attend_in_document).hidden
    logps, _ = token_logprobs(hidden, head_weights(params), rows[:, 1:].reshape(-1), 1.0)
    # A row may begin inside a document, whose prompt is then not to be seen.
    weights = (learned & (documents > 0))[:, 1:].reshape(-1)
    return -jnp.sum(logps * weights) / jnp.sum(weights)


def train(model: Model, corpus: Corpus, batch_rows: int, learning_rate: float) -> Params:
    """One pass over a corpus in batches of rows. The learning rate is that of the peak."""
    steps = len(corpus.rows) // batch_rows
    batches = [part.reshape(steps, batch_rows, -1) for part in corpus]
    return fit(model, partial(loss, model.config), zip(*batches, strict=True), steps, learning_rate)


def fit(
    model: Model,
    loss: Callable[..., Float[Array, ""]],
    batches: Iterable[tuple[np.ndarray, ...]],
    steps: int,
    learning_rate: float,
) -> Params:
    """Minimizes a loss of the parameters and of the arrays of a batch. The learning rate is that of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(WARMUP_STEPS, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, *batch: Array) -> tuple[Any, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state = model.params, optimizer.init(model.params)
    spread = NamedSharding(model.mesh, PartitionSpec(DATA))
    start = time.perf_counter()
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        params, state, value = update(params, state, *jax.device_put(batch, spread))
        value.block_until_ready()  # XLA's CPU collectives can deadlock with several steps in flight
        if step % 20 == 0:
            print(f"step {step:5d}  loss {value:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return params


def save(model: Model, folder: Path, tokenizer: Any) -> None:
    """Write the model and its tokenizer, in place of what is there but for the `README.md`."""
    card = read_card(folder)
    shutil.rmtree(folder, ignore_errors=True)
    save_model(model, folder, tokenizer, card=card)
    # transformers 5 writes a class that transformers 4 does not have; both know this one.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
