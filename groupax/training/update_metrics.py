"""The metrics of an optimizer step, from device sums and counts to numbers by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from groupax.models.config import ModelConfig
from groupax.models.flops import forward_flops
from groupax.objective.metrics import MetricSums
from groupax.parallel.memory import peak_flops, peak_memory_bytes
from groupax.settings.objective import ObjectiveSettings
from groupax.training.batch import Packed
from groupax.training.step import ROUTER_LOSS, router_loss_coef
from groupax.types import Metrics, Row


def mean_metrics(sums: MetricSums, num_tokens: int) -> Metrics:
    """Divides sums by the number of loss tokens: NaN without any. Extremes over no rows are 0."""
    if not num_tokens:
        return dict.fromkeys((*sums.sums, *sums.minima, *sums.maxima), float("nan"))
    means = {name: float(total) / num_tokens for name, total in sums.sums.items()}
    minima = {name: 0.0 if value == np.inf else float(value) for name, value in sums.minima.items()}
    maxima = {name: 0.0 if value == -np.inf else float(value) for name, value in sums.maxima.items()}
    return means | minima | maxima


def policy_loss(metrics: Metrics, entropy_coef: float, config: ModelConfig, settings: ObjectiveSettings) -> float:
    """Returns the loss of a step without its entropy bonus and without a mixture's load-balancing loss."""
    loss = metrics["loss"] + (entropy_coef * metrics["entropy"] if entropy_coef else 0.0)
    return loss - router_loss_coef(config, settings) * metrics[ROUTER_LOSS] if config.experts else loss


def distribution_metrics(distributions: Mapping[str, np.ndarray]) -> Metrics:
    """Summarizes the norms and update ratios of all weights, if there are any."""
    if not distributions:
        return {}
    norms, ratios = distributions["weights/norms"], distributions["weights/update_ratios"]
    return {
        "weights/norm": float(np.sqrt(np.sum(np.square(norms.astype(float))))),
        "weights/update_ratio_mean": float(ratios.mean()),
        "weights/update_ratio_max": float(ratios.max()),
    }


def efficiency_metrics(
    packed: Sequence[Packed], rows: Sequence[Row], seconds: float, config: ModelConfig, mesh: Mesh, dtype: Any
) -> Metrics:
    """Returns padding, throughput, model FLOPs utilization and peak memory of an update.

    Args:
        packed: micro-batches of the update.
        rows: rows of the update.
        seconds: wall-clock time of the update.
        config: model.
        mesh: devices.
        dtype: dtype of the forward pass.
    """
    groups: dict[int, tuple[int, list[int]]] = {}
    for row in rows:
        groups.setdefault(row.group, (len(row.prompt), []))[1].append(len(row.completion))
    flops_per_s = 3.0 * forward_flops(config, groups.values()) / seconds  # backward is twice forward
    num_tokens = sum(prompt - 1 + sum(lengths) for prompt, lengths in groups.values())
    return {
        "padding_frac": 1.0 - num_tokens / sum(part.num_tokens for part in packed),
        "micro_batches": float(len(packed)),
        "time/train_s": seconds,
        "train/tokens_per_s": num_tokens / seconds,
        "mfu": flops_per_s / peak_flops(mesh, dtype),
        "memory/peak_bytes": peak_memory_bytes(mesh),
    }
