"""Aggregates token losses into one number: loss = sum over rows and tokens of weight(row) * l * mask.

The denominators of the weights are counted over the whole optimizer step, all devices and micro-batches, before the
first of them runs. The losses of micro-batches therefore add up to the loss of the step, however it is split.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from groupax.core.settings.objective import ObjectiveSettings
from groupax.parallel.pytree import pytree


@pytree
class Denominators:
    """The number of rows and of loss tokens of an optimizer step.

    Rows without a loss token count only with `masked_rows_in_denominator`.
    """

    num_rows: Float[Array, ""]
    num_tokens: Float[Array, ""]


# (number of loss tokens of each row, counts of the step, settings) -> the weight of each row's token losses.
Aggregation = Callable[[Any, Denominators, ObjectiveSettings], Any]


def seq_mean_token_mean(
    lengths: Int[Array, "B"], counts: Denominators, settings: ObjectiveSettings
) -> Float[Array, "B"]:
    """Averages each row's mean token loss over rows (GRPO, arXiv:2402.03300, eq. 3)."""
    del settings
    return 1.0 / (counts.num_rows * jnp.maximum(lengths, 1).astype(jnp.float32))


def token_mean(lengths: Int[Array, "B"], counts: Denominators, settings: ObjectiveSettings) -> Float[Array, "B"]:
    """Averages over all tokens alike (DAPO, arXiv:2503.14476, eq. 12)."""
    del settings
    return jnp.full(lengths.shape, 1.0 / counts.num_tokens)


def seq_mean_token_sum(
    lengths: Int[Array, "B"], counts: Denominators, settings: ObjectiveSettings
) -> Float[Array, "B"]:
    """Averages each row's summed token loss over rows (LUSPO, arXiv:2602.05261)."""
    del settings
    return jnp.full(lengths.shape, 1.0 / counts.num_rows)


def seq_mean_token_sum_norm(
    lengths: Int[Array, "B"], counts: Denominators, settings: ObjectiveSettings
) -> Float[Array, "B"]:
    """Divides token losses by a constant, so that a row's length does not weigh its tokens (Dr. GRPO,
    arXiv:2503.20783)."""
    return jnp.full(lengths.shape, 1.0 / (counts.num_rows * settings.max_completion_length))


def aggregate(
    token_losses: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    counts: Denominators,
    settings: ObjectiveSettings,
    aggregation: Aggregation,
) -> Float[Array, ""]:
    """Computes the weighted sum of these rows' token losses: their share of the loss of the optimizer step."""
    weights = aggregation(jnp.sum(mask, axis=-1), counts, settings)
    return jnp.sum(token_losses * weights[:, None], where=mask)
