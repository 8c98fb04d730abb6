"""Aggregates token losses into one number: loss = sum over rows and tokens of weight(row) * l * mask.

The denominators of the weights are counted over the whole optimizer step, all devices and micro-batches, before the
first of them runs. The losses of micro-batches therefore add up to the loss of the step, however it is split.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.types import Metrics, Row
from groupax.parallel.pytree import pytree


@pytree
class Denominators:
    """The number of rows and of loss tokens of an optimizer step.

    Rows without a loss token count only with `masked_rows_in_denominator`.
    """

    num_rows: Float[Array, ""]
    num_tokens: Float[Array, ""]


def denominators(rows: Sequence[Row], with_masked_rows: bool) -> Denominators:
    """Returns the number of rows and of loss tokens of a step; rows of failed environments are not counted.

    Args:
        rows: rows of the step.
        with_masked_rows: whether other rows without a loss token count too.
    """
    num_rows = sum(bool(row.mask.any()) or (with_masked_rows and not row.is_failure) for row in rows)
    num_tokens = sum(int(row.mask.sum()) for row in rows)
    return Denominators(jnp.float32(max(num_rows, 1)), jnp.float32(max(num_tokens, 1)))


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


@pytree
class MetricSums:
    """Partial metrics by name."""

    sums: dict[str, Float[Array, ""]]  # sums over loss tokens, to be divided by the number of loss tokens of the step
    minima: dict[str, Float[Array, ""]]  # minima over rows or tokens
    maxima: dict[str, Float[Array, ""]]  # maxima over rows or tokens


class RowMin(NamedTuple):
    """A metric that is the smallest of the rows' means over their loss tokens."""

    values: Array


class RowMax(NamedTuple):
    """A metric that is the largest of the rows' means over their loss tokens."""

    values: Array


# The metrics of a loss by name: values per token, [B, T], or per row, [B], are averaged over loss tokens.
LossMetrics = Mapping[str, Array | RowMin | RowMax]


def zeros_like(metrics: MetricSums) -> MetricSums:
    """Returns the metrics of no rows with the names of these, of which only the structure is read."""
    return MetricSums(
        {name: jnp.float32(0.0) for name in metrics.sums},
        {name: jnp.float32(jnp.inf) for name in metrics.minima},
        {name: jnp.float32(-jnp.inf) for name in metrics.maxima},
    )


def merge(a: MetricSums, b: MetricSums) -> MetricSums:
    """Adds up the metrics, with the same names, of two sets of rows."""
    return MetricSums(
        {name: a.sums[name] + b.sums[name] for name in a.sums},
        {name: jnp.minimum(a.minima[name], b.minima[name]) for name in a.minima},
        {name: jnp.maximum(a.maxima[name], b.maxima[name]) for name in a.maxima},
    )


def join(a: MetricSums, b: MetricSums) -> MetricSums:
    """Puts metrics with different names, of the same rows, into one record."""
    return MetricSums(a.sums | b.sums, a.minima | b.minima, a.maxima | b.maxima)


def psum_metrics(metrics: MetricSums, axes: tuple[str, ...]) -> MetricSums:
    """Adds up the metrics of all devices along these mesh axes."""
    return MetricSums(lax.psum(metrics.sums, axes), lax.pmin(metrics.minima, axes), lax.pmax(metrics.maxima, axes))


def sum_metrics(
    metrics: LossMetrics,
    mask: Bool[Array, "B T"],
    tokens_per_row: Float[Array, ""] | None = None,
    of_sequences: bool = False,
) -> MetricSums:
    """Reduces the metrics of a loss over the loss tokens of these rows."""
    total = MetricSums({}, {}, {})
    is_counted = jnp.any(mask, axis=-1)
    for name, values in metrics.items():
        if isinstance(values, RowMin):
            total.minima[name] = jnp.min(row_means(values.values, mask), initial=jnp.inf, where=is_counted)
        elif isinstance(values, RowMax):
            total.maxima[name] = jnp.max(row_means(values.values, mask), initial=-jnp.inf, where=is_counted)
        elif tokens_per_row is not None and (of_sequences or jnp.ndim(values) == 1):
            total.sums[name] = jnp.sum(row_means(values, mask)) * tokens_per_row
        else:
            total.sums[name] = jnp.sum(_per_token(values, mask), where=mask)
    return total


def row_means(values: Array, mask: Bool[Array, "B T"]) -> Float[Array, "B"]:
    """Averages values per token, [B, T], or per row, [B], over the loss tokens of each row; 0 for a row without any."""
    lengths = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    return jnp.sum(_per_token(values, mask), axis=-1, where=mask) / lengths.astype(jnp.float32)


def _per_token(values: Array, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    values = values[:, None] if jnp.ndim(values) == 1 else values
    return jnp.broadcast_to(values, mask.shape).astype(jnp.float32)


def mean_metrics(sums: MetricSums, num_tokens: int) -> Metrics:
    """Divides sums by the number of loss tokens: NaN without any. Extremes over no rows are 0."""
    if not num_tokens:
        return dict.fromkeys((*sums.sums, *sums.minima, *sums.maxima), float("nan"))
    means = {name: float(total) / num_tokens for name, total in sums.sums.items()}
    minima = {name: 0.0 if value == np.inf else float(value) for name, value in sums.minima.items()}
    maxima = {name: 0.0 if value == -np.inf else float(value) for name, value in sums.maxima.items()}
    return means | minima | maxima
