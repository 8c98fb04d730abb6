"""The losses of supervised fine-tuning: those of the tokens of given completions, averaged over all of them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from groupax.objective.losses import Loss, TokenTerms
from groupax.settings.objective import ObjectiveSettings
from groupax.settings.references import resolve


def nll_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -log p."""
    del settings
    return -terms.logp


def dft_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -sg(p) log p.

    Source: Dynamic Fine-Tuning, arXiv:2508.05629.
    """
    del settings
    return -lax.stop_gradient(jnp.exp(terms.logp)) * terms.logp


# By `SFTConfig.loss_type`; `settings.sft.SFTLossType` has the same names.
SUPERVISED_LOSSES: dict[str, Loss] = {"nll": Loss(nll_loss), "dft": Loss(dft_loss)}


def find_supervised_loss(loss_type: str | Callable[..., Any]) -> Loss:
    """Returns the loss that the setting `loss_type` names; a plain function is averaged over tokens.

    Raises:
        ValueError: there is no such loss, or it cannot be called with terms and settings.
    """
    found = resolve("loss_type", loss_type, SUPERVISED_LOSSES, ("terms", "settings"))
    return found if isinstance(found, Loss) else Loss(found)
