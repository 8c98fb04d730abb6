"""The policy under training: what an optimizer step reads and changes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.batch import Packed, Row, pack
from groupax.metrics import Metrics
from groupax.models.checkpoint import Model
from groupax.models.decoder import Checkpointing
from groupax.models.flops import forward_flops
from groupax.models.specs import Params
from groupax.objective.aggregation import Denominators
from groupax.objective.entropy import EntropyControl, EntropyState, applied_coef, next_entropy_state
from groupax.objective.masks import top_entropy_threshold
from groupax.objective.settings import ObjectiveSettings
from groupax.objective.tally import Tally
from groupax.optimizer import OptimizerSettings, ScheduleSettings, make_optimizer, make_schedule
from groupax.parallel.mesh import num_data_shards
from groupax.parallel.peak import peak_flops, peak_memory_bytes
from groupax.step import (
    TrainState,
    apply_update,
    compute_view,
    init_state,
    micro_step,
    mix,
    score,
    to_rows,
    zero_totals,
)


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """How updates are computed. The fields are `GRPOConfig`'s of the same names, apart from the records.

    Attributes:
        objective: what is minimized.
        entropy: weight of the entropy bonus.
        optimizer: how gradients become updates.
        schedule: learning rate.
    """

    objective: ObjectiveSettings
    entropy: EntropyControl
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    dtype: str = "auto"
    micro_batch_tokens: int | None = None
    gradient_checkpointing: Checkpointing = "none"
    top_entropy_quantile: float = 1.0
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512


@dataclass(frozen=True, eq=False)
class Update:
    """What an optimizer step did.

    Attributes:
        metrics: of the step.
        made: False if the loss or a gradient was not finite, and nothing changed.
        logps: of each row's tokens under the policy before the update.
    """

    metrics: Metrics
    made: bool
    logps: Sequence[np.ndarray]


class Learner:
    """Master weights, optimizer, reference, and what adapts from step to step.

    Attributes:
        state: float32 masters and optimizer state.
        policy: the weights in compute dtype, which engine and gradients read.
        reference: the reference's; None if `beta` is 0.
        num_updates: optimizer steps that changed the weights.
        entropy: state of the entropy bonus.
    """

    def __init__(self, model: Model, settings: LearnerSettings, num_steps: int) -> None:
        self.config, self.mesh, self.settings = model.config, model.mesh, settings
        self.schedule = make_schedule(settings.schedule, num_steps)
        self.optimizer = make_optimizer(settings.optimizer, self.schedule)
        self.on_cpu = model.mesh.devices.flat[0].platform == "cpu"
        default = "float32" if self.on_cpu else "bfloat16"
        self.dtype: Any = jnp.dtype(default if settings.dtype == "auto" else settings.dtype)
        # activations beyond this fall out of a CPU's cache; accelerators want larger matrices
        self.micro_batch_tokens = settings.micro_batch_tokens or (4096 if self.on_cpu else 16384)
        self.state: TrainState = init_state(model.params, optimizer=self.optimizer)
        self.policy = self._policy()
        has_reference = settings.objective.beta > 0
        self.reference = compute_view(self.state.params, dtype=self.dtype) if has_reference else None
        self.num_updates = 0
        self.entropy = EntropyState(settings.entropy.entropy_coef)

    def update(self, rows: Sequence[Row]) -> Update:
        """One optimizer step: the gradient of the objective over the rows, in micro-batches."""
        started_s = time.perf_counter()
        settings = self.settings
        if settings.top_entropy_quantile < 1:
            rows = self._with_policy_masks(rows)
        num_tokens = sum(int(row.mask.sum()) for row in rows)
        num_rows = sum(bool(row.mask.any()) for row in rows)
        counts = Denominators(jnp.float32(max(num_rows, 1)), jnp.float32(max(num_tokens, 1)))
        coef = applied_coef(self.entropy, settings.entropy)
        packed = self._pack(rows)
        totals = zero_totals(self.policy, settings=settings.objective)
        logps = []
        for part in packed:
            totals, logp = micro_step(
                self.policy,
                totals,
                to_rows(part.batch, self.mesh),
                counts,
                jnp.float32(coef),
                config=self.config,
                settings=settings.objective,
                mesh=self.mesh,
                checkpointing=settings.gradient_checkpointing,
            )
            logps.append(logp)
            if self.on_cpu:  # the virtual devices' collectives can starve each other when several steps are queued
                jax.block_until_ready(totals)
        learning_rate = float(np.asarray(self.schedule(self.num_updates)))
        self.state, grad_norm, made = apply_update(self.state, totals.grads, totals.loss, optimizer=self.optimizer)
        self.policy = self._policy()
        loss, tally, grad_norm, made = jax.device_get((totals.loss, totals.tally, grad_norm, made))
        metrics = {"loss": float(loss), "grad_norm": float(grad_norm), "learning_rate": learning_rate}
        metrics |= _means(tally, num_tokens) | {"update_skipped": float(not made), "loss_tokens": float(num_tokens)}
        if settings.objective.entropy_bonus:
            metrics["entropy_coef"] = coef
        if made:
            self.num_updates += 1
            self.entropy = next_entropy_state(self.entropy, settings.entropy, metrics["entropy"])
            self._sync_reference()
        metrics |= self._efficiency(packed, rows, time.perf_counter() - started_s)
        return Update(metrics, bool(made), _by_row(packed, logps, rows))

    def logprobs(self, params: Params, rows: Sequence[Row]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probs of each row's completion tokens under some weights, and the entropies of their distributions."""
        packed = self._pack(rows)
        scored = []
        for part in packed:
            batch = to_rows(part.batch, self.mesh)
            pair = score(params, batch, config=self.config, settings=self.settings.objective, mesh=self.mesh)
            scored.append(jax.device_get(pair))
        logps, entropies = zip(*scored, strict=True)
        return _by_row(packed, logps, rows), _by_row(packed, entropies, rows)

    def _with_policy_masks(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the mask of their top-entropy tokens, by a forward pass of its own over the whole step."""
        entropies = self.logprobs(self.policy, rows)[1]
        counted = [entropy[row.mask] for entropy, row in zip(entropies, rows, strict=True)]
        threshold = top_entropy_threshold(counted, self.settings.top_entropy_quantile)
        return [replace(row, policy_mask=entropy >= threshold) for row, entropy in zip(rows, entropies, strict=True)]

    def _sync_reference(self) -> None:
        settings = self.settings
        if settings.sync_ref_model and self.num_updates % settings.ref_model_sync_steps == 0:
            assert self.reference is not None, "the config requires beta > 0"
            self.reference = mix(self.reference, self.policy, alpha=settings.ref_model_mixup_alpha)

    def _policy(self) -> Params:
        """The master weights themselves where they have the compute dtype."""
        return self.state.params if self.dtype == jnp.float32 else compute_view(self.state.params, dtype=self.dtype)

    def _pack(self, rows: Sequence[Row]) -> list[Packed]:
        return pack(rows, num_data_shards(self.mesh), self.micro_batch_tokens)

    def _efficiency(self, packed: list[Packed], rows: Sequence[Row], seconds: float) -> Metrics:
        groups: dict[int, tuple[int, list[int]]] = {}
        for row in rows:
            groups.setdefault(row.group, (len(row.prompt), []))[1].append(len(row.completion))
        flops_per_s = 3.0 * forward_flops(self.config, groups.values()) / seconds  # backward is twice forward
        real = sum(part.num_tokens for part in packed)
        return {
            "padding_frac": 1.0 - real / sum(part.num_cells for part in packed),
            "micro_batches": float(len(packed)),
            "time/train_s": seconds,
            "train/tokens_per_s": real / seconds,
            "mfu": flops_per_s / peak_flops(self.mesh, self.dtype),
            "memory/peak_bytes": peak_memory_bytes(self.mesh),
        }


def _means(tally: Tally, num_tokens: int) -> Metrics:
    """Sums become means over loss tokens; extremes over no rows at all are 0."""
    means = {name: float(total) / max(num_tokens, 1) for name, total in tally.sums.items()}
    minima = {name: 0.0 if value == np.inf else float(value) for name, value in tally.minima.items()}
    maxima = {name: 0.0 if value == -np.inf else float(value) for name, value in tally.maxima.items()}
    return means | minima | maxima


def _by_row(packed: Sequence[Packed], values: Sequence[Any], rows: Sequence[Row]) -> list[np.ndarray]:
    """What was computed in rectangles, [B, T] each, as the rows had it."""
    result: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for part, rectangle in zip(packed, values, strict=True):
        for index, value in zip(part.rows, np.asarray(rectangle), strict=True):
            if index >= 0:
                result[index] = value[: len(rows[index].completion)]
    return result
