"""Optimizers and learning rate schedules, from optax."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from groupax.core.settings.optimizer import (
    LearningRateSettings,
    OptimizerSettings,
)

Mask = Callable[[Any], Any] | None
MakeOptimizer = Callable[[OptimizerSettings, optax.Schedule, Mask], optax.GradientTransformation]


@lru_cache(maxsize=64)
def make_schedule(settings: LearningRateSettings, num_steps: int) -> optax.Schedule:
    """Returns the learning rate schedule: linear warm-up to the peak, then decay to the end at `num_steps`.

    Equal settings have the same schedule, so that runs with them in one process share their compiled programs.
    """
    peak, end = settings.learning_rate, settings.learning_rate_end
    warmup_steps = settings.warmup_steps or round(settings.warmup_ratio * num_steps)
    decay_steps = max(1, num_steps - warmup_steps)
    decays = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, end, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, alpha=end / peak if peak else 0.0),
    }
    decay = decays[settings.lr_scheduler_type]()
    if warmup_steps == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), decay], [warmup_steps])


def make_optimizer(settings: OptimizerSettings, schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, which first clips the gradient to a global norm of `max_grad_norm` (0 does not clip).

    Equal settings with the same schedule have the same optimizer. Its `update` takes the `grad_norm` of all gradients
    where it is given only some of them, and computes it otherwise. Apart from that, the update of a weight depends on
    no other weight. Weight decay is decoupled in all optimizers: each step subtracts
    learning_rate * weight_decay * weight.
    """
    return _made(OPTIMIZERS[settings.optimizer], settings, schedule)


@lru_cache(maxsize=64)
def _made(
    make: MakeOptimizer, settings: OptimizerSettings, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    mask = _matrices if settings.weight_decay_scope == "matrices" else None
    optimizer = make(settings, schedule, mask)
    if settings.max_grad_norm > 0:
        optimizer = optax.chain(_clipping(settings.max_grad_norm), optimizer)
    return _promoting(optimizer)


def _clipping(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales gradients by max_norm / grad_norm where that is below 1: `optax.clip_by_global_norm`, to the last bit."""

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None, *, grad_norm: Any = None, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        return jax.tree.map(lambda x: jnp.where(norm < max_norm, x, (x / norm) * max_norm), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _adamw(settings: OptimizerSettings, schedule: optax.Schedule, mask: Mask) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b1=settings.adam_beta1,
        b2=settings.adam_beta2,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        mask=mask,
    )


def _adafactor(settings: OptimizerSettings, schedule: optax.Schedule, mask: Mask) -> optax.GradientTransformation:
    """Creates Adafactor with an absolute learning rate: steps are not scaled by the size of the weights."""
    return optax.chain(
        optax.adafactor(None, multiply_by_parameter_scale=False),
        optax.scale(-1.0),
        optax.add_decayed_weights(settings.weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )


def _lion(settings: OptimizerSettings, schedule: optax.Schedule, mask: Mask) -> optax.GradientTransformation:
    return optax.lion(
        schedule, b1=settings.adam_beta1, b2=settings.adam_beta2, weight_decay=settings.weight_decay, mask=mask
    )


def _muon(settings: OptimizerSettings, schedule: optax.Schedule, mask: Mask) -> optax.GradientTransformation:
    """Creates Muon for the layers' matrices, with AdamW for the rest.

    Updates of both have the same size, so that AdamW's learning rates carry over.
    """
    out_in = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    muon = optax.contrib.muon(
        schedule,
        weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: out_in, params),
        consistent_rms=0.2,
    )
    return optax.partition({"muon": muon, "adamw": _adamw(settings, schedule, mask)}, _muon_or_adamw)


def _sgd(settings: OptimizerSettings, schedule: optax.Schedule, mask: Mask) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(settings.momentum) if settings.momentum else optax.identity(),
        optax.add_decayed_weights(settings.weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )


# By `GRPOConfig.optimizer`.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
    "sgd": _sgd,
}


def _matrices(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim >= 2 and not _is_norm(path), params)


def _is_norm(path: Any) -> bool:
    return str(getattr(path[-1], "key", "")).endswith("norm")  # some families' norms have a row for each head


def _muon_or_adamw(params: Any) -> Any:
    def label(path: Any, x: Any) -> str:
        is_matrix = x.ndim == 2 and not _is_norm(path)
        return "muon" if getattr(path[0], "key", None) == "layers" and is_matrix else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def _promoting(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs the optimizer under jax's standard dtype promotion, on which optax relies, whatever the user has set."""

    takes_more = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **more: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return takes_more.update(updates, state, params, **more)

    return optax.GradientTransformationExtraArgs(init, update)
