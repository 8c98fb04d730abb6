"""The objective against 96 recorded cases of TRL 1.16's GRPO loss: loss and d loss / d logps.

We differ on purpose in what a loss is divided by. Ours are the counts of the whole optimizer step, so that its
micro-batches add up. TRL divides each micro-batch by its own rows (grpo, sapo, dr_grpo, luspo) or tokens (bnpo), or
by the rollout's tokens scaled to an accumulation window (dapo, cispo, vespo), and then by the number of accumulation
steps where it has not done so. The test gives our function TRL's counts and does that division.

cispo's cap: TRL takes epsilon for a missing epsilon_high, here a cap of 0.2. `GRPOConfig` refuses that; the objective
computes it.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.core.settings.objective import ObjectiveSettings
from groupax.objective.aggregation import Denominators
from groupax.objective.entropy import top_entropy_threshold
from groupax.objective.losses import LossInputs, policy_objective, zero_metrics

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())
ARRAYS = np.load(GOLDEN / "arrays.npz")
BY_TOKENS_OF_THE_STEP = ("dapo", "cispo", "vespo")


def name_of(case):
    options = ",".join(f"{name}={value}" for name, value in case["options"].items())
    return f"{case['id']}-{case['loss_type']}-{case['importance_sampling_level']}-{options}"


def settings_of(case):
    known = {field.name for field in fields(ObjectiveSettings)}
    return ObjectiveSettings(
        **{name: value for name, value in case.items() if name in known}
        | {name: value for name, value in case["options"].items() if name in known}
    )


def trl_counts(case, mask):
    """What TRL divides by, as our counts, and the division that it does afterwards."""
    accumulated = case["gradient_accumulation_steps"]
    if case["loss_type"] in BY_TOKENS_OF_THE_STEP:
        window = case["num_items_in_batch"] * accumulated / case["steps_per_generation"]
        return Denominators(jnp.float32(len(mask)), jnp.float32(window)), 1
    return Denominators(jnp.float32(len(mask)), jnp.float32(mask.sum())), accumulated


def test_there_are_all_cases():
    assert len(CASES) == 96


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_loss_and_gradient_are_the_recorded_ones(case):
    names = ("logps", "old_logps", "ref_logps", "entropy", "mask", "grad_logps", "advantages")
    logps, old, ref, entropy, mask, grad_logps, advantages = (ARRAYS[f"{case['id']}/{name}"] for name in names)
    mask = mask.astype(bool)
    settings = settings_of(case)
    quantile = case["options"].get("top_entropy_quantile")
    inputs = LossInputs(
        advantages=np.broadcast_to(advantages[:, None], mask.shape),
        mask=mask,
        rollout_logp=old,
        old_logp=old,
        ref_logp=ref if settings.beta else None,
        policy_mask=None if quantile is None else entropy >= top_entropy_threshold([entropy[mask]], quantile),
    )
    counts, divisor = trl_counts(case, mask)
    inputs = jax.tree.map(jnp.asarray, inputs)

    def loss_fn(logp):
        loss, metrics = policy_objective(logp, jnp.asarray(entropy), inputs, counts, settings)
        return loss / divisor, metrics

    (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(jnp.asarray(logps))
    np.testing.assert_allclose(loss, case["loss"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(grad, grad_logps, rtol=0, atol=1e-5)

    # per row and not per token at the sequence level, and the KL after its correction: there our own metrics differ
    if case["importance_sampling_level"] == "token":
        means = {name: float(total) / mask.sum() for name, total in metrics.sums.items()}
        reported = means | {name: float(value) for name, value in (metrics.minima | metrics.maxima).items()}
        for name in (set(case["metrics"]) & set(reported)) - {"kl"}:
            np.testing.assert_allclose(reported[name], case["metrics"][name], atol=1e-5, err_msg=name)

    trl = replace(settings, metric_definitions="trl")
    counts = Denominators(jnp.float32(len(mask)), jnp.float32(mask.sum()))
    metrics = policy_objective(
        jnp.asarray(logps), jnp.asarray(entropy), replace(inputs, policy_mask=None), counts, trl
    )[1]
    assert set(zero_metrics(trl).sums) == set(metrics.sums)
    reported = {name: float(total) / mask.sum() for name, total in metrics.sums.items()}
    reported |= {name: float(value) for name, value in (metrics.minima | metrics.maxima).items()}
    assert {*reported} >= set(case["metrics"]) - {"policy_loss", "entropy_coef", "aux_loss"}
    for name in set(case["metrics"]) & {*reported}:
        np.testing.assert_allclose(reported[name], case["metrics"][name], atol=1e-5, err_msg=name)
