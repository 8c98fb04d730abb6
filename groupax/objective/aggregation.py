"""From token losses to one number: loss = sum over rows and tokens of weight(row) * l * mask.

The weights' denominators are counted over the whole optimizer step, all devices and micro-batches, before the
first of them runs. So the losses of micro-batches add up to the step's, however it is split.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from groupax.parallel.pytree import pytree
from groupax.settings.objective import ObjectiveSettings


@pytree
class Denominators:
    """Counts over an optimizer step: its rows and its loss tokens.

    Rows without a loss token count only with `masked_rows_in_denominator`.
    """

    num_rows: Float[Array, ""]
    num_tokens: Float[Array, ""]


def mean_of_rows(lengths: Int[Array, "B"], counts: Denominators, _: ObjectiveSettings) -> Float[Array, "B"]:
    """Each row's mean token loss, averaged over rows (GRPO, arXiv:2402.03300, eq. 3)."""
    return 1.0 / (counts.num_rows * jnp.maximum(lengths, 1).astype(jnp.float32))


def mean_of_tokens(lengths: Int[Array, "B"], counts: Denominators, _: ObjectiveSettings) -> Float[Array, "B"]:
    """All tokens alike (DAPO, arXiv:2503.14476, eq. 12)."""
    return jnp.full(lengths.shape, 1.0 / counts.num_tokens)


def sum_of_rows(lengths: Int[Array, "B"], counts: Denominators, _: ObjectiveSettings) -> Float[Array, "B"]:
    """Each row's summed token loss, averaged over rows (LUSPO, arXiv:2602.05261)."""
    return jnp.full(lengths.shape, 1.0 / counts.num_rows)


def constant_length(lengths: Int[Array, "B"], counts: Denominators, settings: ObjectiveSettings) -> Float[Array, "B"]:
    """Token losses over a constant, so that a row's length does not weigh its tokens (Dr. GRPO, arXiv:2503.20783)."""
    return jnp.full(lengths.shape, 1.0 / (counts.num_rows * settings.max_completion_length))


# By `loss_type`.
ROW_WEIGHTS: dict[str, Callable[[Array, Denominators, ObjectiveSettings], Array]] = {
    "grpo": mean_of_rows,
    "bnpo": mean_of_tokens,
    "dapo": mean_of_tokens,
    "dr_grpo": constant_length,
    "cispo": mean_of_tokens,
    "sapo": mean_of_rows,
    "luspo": sum_of_rows,
    "vespo": mean_of_tokens,
}


def aggregate(
    token_losses: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    counts: Denominators,
    settings: ObjectiveSettings,
) -> Float[Array, ""]:
    """The weighted sum of these rows' token losses: their share of the optimizer step's loss."""
    weights = ROW_WEIGHTS[settings.loss_type](jnp.sum(mask, axis=-1), counts, settings)
    return jnp.sum(token_losses * weights[:, None], where=mask)
