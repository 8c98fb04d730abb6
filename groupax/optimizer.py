"""Optimizers and learning-rate schedules, from optax."""

from typing import Literal

import jax
import optax

Scheduler = Literal["constant", "linear", "cosine"]


def make_schedule(
    kind: Scheduler, learning_rate: float, learning_rate_end: float, warmup_steps: int, num_steps: int
) -> optax.Schedule:
    """The learning rate of each optimizer step: linear warm-up to `learning_rate`, then `kind` down to the end.

    Args:
        kind: "constant" stays at `learning_rate`; the others reach `learning_rate_end` at `num_steps`.
        learning_rate: the peak.
        learning_rate_end: the last value of "linear" and "cosine".
        warmup_steps: steps of the rise from 0.
        num_steps: steps of the run.
    """
    decay_steps = max(1, num_steps - warmup_steps)
    decays = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, learning_rate_end, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(
            learning_rate, decay_steps, alpha=learning_rate_end / learning_rate if learning_rate else 0.0
        ),
    }
    if warmup_steps == 0:
        return decays[kind]()
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, decays[kind]()], [warmup_steps])


def make_optimizer(
    schedule: optax.Schedule,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """AdamW after clipping the gradient to a global norm of `max_grad_norm` (0 does not clip)."""
    adamw = optax.adamw(schedule, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay)
    clipped = optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw) if max_grad_norm > 0 else adamw
    return _promoting(clipped)


def _promoting(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer under jax's standard dtype promotion, which optax relies on, whatever the user has set."""

    def init(params: optax.Params) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(init, update)
