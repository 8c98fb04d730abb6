"""Masks of the objective as functions of PyTorch tensors, which TRL's trainer has as methods."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from groupax.objective.entropy import top_entropy_threshold
from groupax.objective.losses import on_policy_tokens

PADDING = -1e9  # an entropy that no token has


def high_entropy_mask(accelerator: Any, entropies: Any, mask: Any, threshold: float) -> Any:
    """Returns which tokens have an entropy of at least the quantile `threshold` of all of them.

    Args:
        accelerator: Accelerator that gathers the entropies of all processes.
        entropies: [B, T] entropies.
        mask: [B, T] tokens that count.
        threshold: Quantile, between 0 and 1.
    """
    counted = mask.bool()
    padded = accelerator.pad_across_processes(entropies[counted].float(), dim=0, pad_index=PADDING)
    everything = accelerator.gather(padded).detach().cpu().numpy()
    bound = top_entropy_threshold([everything[everything != np.float32(PADDING)]], 1.0 - threshold)
    return (entropies >= entropies.new_tensor(bound)) & counted


def off_policy_mask(advantages: Any, logps: Any, sampling_logps: Any, mask: Any, threshold: float) -> Any:
    """Returns 1 for the rows to keep, [B, 1]: those with A >= 0 or a mean drift of at most the threshold.

    Args:
        advantages: [B, 1] advantages.
        logps: [B, T] log-probs under the policy.
        sampling_logps: [B, T] log-probs under the policy that sampled; NaN where they are unknown, which counts as no
            drift.
        mask: [B, T] tokens that count.
        threshold: Largest mean drift, in nats.
    """
    policy, advantage, counted = (jnp.asarray(each.detach().cpu().numpy()) for each in (logps, advantages, mask))
    sampled = jnp.asarray(sampling_logps.detach().cpu().numpy())
    sampled = jnp.where(jnp.isnan(sampled), policy, sampled)
    kept = on_policy_tokens(policy, sampled, jnp.broadcast_to(advantage, policy.shape), counted != 0, threshold)
    return mask.new_tensor(np.asarray(kept[:, :1]), dtype=mask.dtype)
