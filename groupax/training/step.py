"""The optimizer step: gradients of micro-batches added up, then one update of the master weights.

Each device of the data axes works on its own rows, and adds up gradients and metrics by itself; they meet once, before
the update. Gradients of weights that are split over a data axis meet with each micro-batch, and each device keeps those
of its part.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Key

from groupax.models.adapted import Dropout, FrozenBase, apply_adapter
from groupax.models.config import ModelConfig
from groupax.models.execution import Execution
from groupax.models.experts import Routing, load_balancing_loss
from groupax.models.grouped import gather_with_inverse, grouped_logprobs, local_tokens
from groupax.models.specs import Params, layout_of
from groupax.models.split import partition_specs
from groupax.objective.aggregation import Denominators
from groupax.objective.metrics import MetricSums, join, merge, psum_metrics
from groupax.objective.objective import old_logprobs, policy_objective, zero_metrics
from groupax.parallel.collectives import psum
from groupax.parallel.mesh import DATA, TOKENS, Layout, splits_model
from groupax.parallel.pytree import pytree
from groupax.parallel.transfer import to_device
from groupax.settings.objective import ObjectiveSettings
from groupax.training.batch import MicroBatch
from groupax.training.offload import places_on_host, updated_in_parts

ROWS = PartitionSpec(DATA)
REPLICATED = PartitionSpec()
LOGP_DIFF = "rollout/logp_diff"  # |log-prob of the engine - log-prob of the trainer|, of the same weights


ROUTER_LOSS = "router/aux_loss"  # how unevenly a mixture's routers spread tokens, before its coefficient


@pytree
class TrainState:
    """What an optimizer step changes.

    Attributes:
        params: master weights, float32, of what is trained: the model, or its adapter.
        opt_state: of the optimizer.
    """

    params: Params
    opt_state: Any


@pytree
class Totals:
    """What an optimizer step's micro-batches add up to; of each device, along a first dim, until `across_shards`.

    Attributes:
        grads: of the loss, float32.
        loss: of the step so far.
        metrics: metrics of the step so far.
    """

    grads: Params
    loss: Float[Array, ""]
    metrics: MetricSums


def to_rows(tree: Any, mesh: Mesh) -> Any:
    """Put host arrays on the devices, their first dim split over the data axes."""
    return to_device(tree, NamedSharding(mesh, ROWS))


@partial(jax.jit, static_argnames=("optimizer", "config", "mesh", "offload_optimizer"))
def init_state(
    params: Params,
    *,
    optimizer: optax.GradientTransformation,
    config: ModelConfig,
    mesh: Mesh,
    offload_optimizer: bool = False,
) -> TrainState:
    """A fresh state with its own float32 copy of the weights; what the optimizer has for a weight lies like it.

    Args:
        params: what is trained.
        optimizer, config, mesh: static.
        offload_optimizer: static; what the optimizer has for a weight lies on the device's host.
    """
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    state = _placed(TrainState(masters, optimizer.init(masters)), config, mesh)
    if offload_optimizer:  # which says nothing of how arrays are split
        return jax.device_put(state, state_places(config, mesh, state, offload_optimizer))
    return state


def _placed(state: TrainState, config: ModelConfig, mesh: Mesh) -> TrainState:
    """The state where the mesh wants it: what has a weight's name and shape, like the weight, and all else whole."""
    if not splits_model(mesh):
        return state

    def constrained(x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(constrained, state, state_specs(config, mesh, state))


def state_specs(config: ModelConfig, mesh: Mesh, state: TrainState) -> Any:
    """Where a state lies, in its structure."""
    weights = jax.tree_util.tree_leaves_with_path(state.params)
    specs = jax.tree.leaves(partition_specs(config, mesh, state.params))
    places = {(path, weight.shape): spec for (path, weight), spec in zip(weights, specs, strict=True)}

    def place(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        names = (path[first:] for first in range(len(path)))
        return next((places[name, x.shape] for name in names if (name, x.shape) in places), REPLICATED)

    return jax.tree_util.tree_map_with_path(place, state)


def state_places(config: ModelConfig, mesh: Mesh, state: TrainState, offload_optimizer: bool) -> Any:
    """Shardings of a state, in its structure.

    Args:
        config: the model.
        mesh: of the devices.
        state: of arrays or shapes.
        offload_optimizer: what the optimizer has for a weight lies on the device's host.
    """
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(config, mesh, state))
    if not offload_optimizer:
        return places
    return TrainState(places.params, places_on_host(state.params, state.opt_state, places.opt_state))


def totals_specs(config: ModelConfig, mesh: Mesh, params: Params, totals: Totals) -> Any:
    """Where totals lie, in their structure: gradients like their weights, of each device that has some of its own."""

    def of_gradient(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(_apart(spec), *spec)

    of_grads = jax.tree.map(of_gradient, partition_specs(config, mesh, params))
    structure = jax.tree.structure(totals)
    leaves = jax.tree.leaves(of_grads)
    return jax.tree.unflatten(structure, [*leaves, *[ROWS] * (structure.num_leaves - len(leaves))])


def _apart(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes along which the gradients of a weight that lies so are partial."""
    return tuple(axis for axis in TOKENS if axis not in spec)


@partial(jax.jit, static_argnames=("dtype",))
def compute_view(params: Params, *, dtype: Any) -> Params:
    """A copy of the master weights, which an update does not free, as in the dtype of the forward pass."""
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), params)


@partial(jax.jit, static_argnames=("config", "settings", "mesh"))
def zero_totals(params: Params, *, config: ModelConfig, settings: ObjectiveSettings, mesh: Mesh) -> Totals:
    """Each device's totals before the first micro-batch."""
    totals = jax.eval_shape(lambda params: _zeros(params, config, settings), params)
    program = jax.shard_map(
        lambda params: jax.tree.map(lambda x: x[None], _zeros(params, config, settings)),
        mesh=mesh,
        in_specs=(partition_specs(config, mesh, params),),
        out_specs=totals_specs(config, mesh, params, totals),
        check_vma=False,
    )
    return program(params)


def _zeros(params: Params, config: ModelConfig, settings: ObjectiveSettings) -> Totals:
    zero = jnp.float32(0.0)
    router = MetricSums({ROUTER_LOSS: zero} if config.experts else {}, {}, {})
    engine = MetricSums({f"{LOGP_DIFF}_mean": zero}, {}, {f"{LOGP_DIFF}_max": jnp.float32(-jnp.inf)})
    return Totals(
        grads=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params),
        loss=zero,
        metrics=join(join(zero_metrics(settings), router), engine),
    )


@partial(
    jax.jit,
    static_argnames=("config", "settings", "mesh", "execution", "dropout_rate"),
    donate_argnames=("totals",),
)
def micro_step(
    params: Params,
    totals: Totals,
    batch: MicroBatch,
    counts: Denominators,
    entropy_coef: Float[Array, ""],
    frozen: FrozenBase | None = None,
    dropout_key: Key[Array, ""] | None = None,
    *,
    config: ModelConfig,
    settings: ObjectiveSettings,
    mesh: Mesh,
    execution: Execution,
    dropout_rate: float = 0.0,
) -> tuple[Totals, tuple[Float[Array, "B T"], Float[Array, "B T"]]]:
    """Add a micro-batch's loss, gradients and metrics to each device's totals of its optimizer step.

    Args:
        params: what is trained, in the compute dtype.
        totals: donated.
        batch: on the devices (`to_rows`).
        counts: denominators of the whole optimizer step.
        entropy_coef: weight of the entropy bonus, if the settings have one.
        frozen: the base, if an adapter is trained.
        dropout_key: of the optimizer step, if there is dropout.
        config, settings, mesh, execution, dropout_rate: static.

    Returns:
        The new totals, and the log-probs of the batch's targets under `params` with the entropies of their
        distributions.
    """

    layout = layout_of(config, mesh)

    def local(
        params: Params,
        totals: Totals,
        batch: MicroBatch,
        counts: Denominators,
        entropy_coef: Array,
        frozen: FrozenBase | None,
        dropout_key: Array | None,
    ) -> tuple[Totals, tuple[Array, Array]]:
        inputs, dropout = batch.inputs, None
        if dropout_key is not None:
            dropout = Dropout(dropout_key, local_tokens(batch.numbers, layout), jnp.float32(dropout_rate))

        def loss_fn(params: Params) -> tuple[Array, tuple[MetricSums, Array, Array]]:
            weights = apply_adapter(frozen, params, dropout)
            logp, entropy, routings = _logprobs(config, settings, execution, weights, batch, layout)
            loss, metrics = policy_objective(logp, entropy, inputs, counts, settings, entropy_coef)
            if config.experts:
                coef = settings.router_aux_loss_coef
                coef = config.experts.aux_loss_coef if coef is None else coef
                balance = _balance(routings, batch, layout)
                loss = loss + coef * balance / counts.num_tokens
                metrics = MetricSums(metrics.sums | {ROUTER_LOSS: balance}, metrics.minima, metrics.maxima)
            return loss, (metrics, logp, entropy)

        (loss, (metrics, logp, entropy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        logp_diff = jnp.where(inputs.mask, jnp.abs(old_logprobs(logp, inputs) - inputs.rollout_logp), 0.0)
        own = MetricSums({f"{LOGP_DIFF}_mean": jnp.sum(logp_diff)}, {}, {f"{LOGP_DIFF}_max": jnp.max(logp_diff)})
        before = jax.tree.map(lambda x: x[0], totals)
        after = Totals(
            grads=jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), before.grads, grads),
            loss=before.loss + loss,
            metrics=merge(before.metrics, join(metrics, own)),
        )
        return jax.tree.map(lambda x: x[None], after), (logp, entropy)

    of_params, of_totals = partition_specs(config, mesh, params), totals_specs(config, mesh, params, totals)
    of_frozen = frozen and _frozen_specs(config, mesh, frozen)
    in_specs = (of_params, of_totals, ROWS, REPLICATED, REPLICATED, of_frozen, REPLICATED)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(of_totals, ROWS), check_vma=False)
    return program(params, totals, batch, counts, entropy_coef, frozen, dropout_key)


def _frozen_specs(config: ModelConfig, mesh: Mesh, frozen: FrozenBase) -> Any:
    leaves = jax.tree.leaves(partition_specs(config, mesh, frozen.params))
    return jax.tree.unflatten(jax.tree.structure(frozen), [*leaves, REPLICATED])


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("totals",))
def across_shards(totals: Totals, *, config: ModelConfig, mesh: Mesh) -> Totals:
    """The totals of all devices together; gradients lie like their weights."""
    specs = partition_specs(config, mesh, totals.grads)

    def local(totals: Totals) -> Totals:
        own = jax.tree.map(lambda x: x[0], totals)
        by_axes: dict[tuple[str, ...], list[int]] = {}
        leaves, structure = jax.tree.flatten(own.grads)
        for index, spec in enumerate(jax.tree.leaves(specs)):
            by_axes.setdefault(_apart(spec), []).append(index)
        for axes, indices in by_axes.items():
            for index, grad in zip(indices, lax.psum([leaves[index] for index in indices], axes), strict=True):
                leaves[index] = grad
        loss = lax.psum(own.loss, DATA)
        return Totals(jax.tree.unflatten(structure, leaves), loss, psum_metrics(own.metrics, DATA))

    of_totals = totals_specs(config, mesh, totals.grads, totals)
    structure = jax.tree.structure(totals)
    of_grads = jax.tree.leaves(specs)
    out_specs = jax.tree.unflatten(structure, [*of_grads, *[REPLICATED] * (structure.num_leaves - len(of_grads))])
    return jax.shard_map(local, mesh=mesh, in_specs=(of_totals,), out_specs=out_specs, check_vma=False)(totals)


@partial(jax.jit, static_argnames=("optimizer", "config", "mesh", "offload_optimizer"), donate_argnames=("state",))
def apply_update(
    state: TrainState,
    grads: Params,
    loss: Float[Array, ""],
    *,
    optimizer: optax.GradientTransformationExtraArgs,
    config: ModelConfig,
    mesh: Mesh,
    offload_optimizer: bool = False,
) -> tuple[TrainState, Float[Array, ""], Bool[Array, ""]]:
    """Update the master weights, unless the loss or a gradient is not finite.

    Args:
        state: donated.
        grads: of the loss, of all rows.
        loss: of the step.
        optimizer, config, mesh: static.
        offload_optimizer: static; the optimizer's state lies on the hosts, and comes and goes part by part.

    Returns:
        The new state (unchanged if skipped), the gradient's global norm before clipping, and whether the update
        was made.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    if offload_optimizer:
        places = state_places(config, mesh, state, offload_optimizer)
        of_state = (places.params, places.opt_state)
        new = updated_in_parts(optimizer, state.params, state.opt_state, grads, grad_norm, finite, of_state)
        return TrainState(*new), grad_norm, finite
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, grad_norm=grad_norm)
    params: Any = optax.apply_updates(state.params, updates)
    updated = _placed(TrainState(params, opt_state), config, mesh)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), grad_norm, finite


@partial(jax.jit, static_argnames=("config", "settings", "mesh", "execution"))
def score(
    params: Params,
    batch: MicroBatch,
    *,
    config: ModelConfig,
    settings: ObjectiveSettings,
    mesh: Mesh,
    execution: Execution,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probabilities of the batch's targets under some weights, and the entropies of their distributions."""

    def local(params: Params, batch: MicroBatch) -> tuple[Array, Array]:
        return _logprobs(config, settings, execution, params, batch, layout_of(config, mesh))[:2]

    in_specs = (partition_specs(config, mesh, params), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=ROWS, check_vma=False)(params, batch)


@jax.jit
def norms_and_changes(before: Params, after: Params) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """The norm of each of N weights after an update, and the norm of its change over the larger of its norms then and
    before; 0 where both are 0."""

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))

    def norms(tree: Params) -> Array:
        return jnp.stack([norm(x) for x in jax.tree.leaves(tree)])

    larger = jnp.maximum(norms(before), norms(after))
    moved = norms(jax.tree.map(jnp.subtract, after, before))
    return norms(after), moved / jnp.where(larger > 0, larger, 1.0)


@partial(jax.jit, static_argnames=("alpha",), donate_argnames=("reference",))
def mix(reference: Params, policy: Params, *, alpha: float) -> Params:
    """alpha policy + (1 - alpha) reference, in the reference's dtype."""

    def mixed(ref: Array, new: Array) -> Array:
        return (alpha * new.astype(jnp.float32) + (1.0 - alpha) * ref.astype(jnp.float32)).astype(ref.dtype)

    return jax.tree.map(mixed, reference, policy)


def _logprobs(
    config: ModelConfig,
    settings: ObjectiveSettings,
    execution: Execution,
    params: Params,
    batch: MicroBatch,
    layout: Layout,
) -> tuple[Array, Array, list[Routing]]:
    logp, entropy, routings = grouped_logprobs(
        config, params, batch.ragged, settings.temperature, execution, settings.entropy_bonus, layout
    )
    return (
        gather_with_inverse(logp, batch.cells, batch.slots),
        gather_with_inverse(entropy, batch.cells, batch.slots),
        routings,
    )


def _balance(routings: list[Routing], batch: MicroBatch, layout: Layout) -> Float[Array, ""]:
    """This shard's part of the micro-batch's load-balancing loss, times the micro-batch's number of loss tokens."""
    num_tokens = lax.psum(jnp.sum(batch.inputs.mask).astype(jnp.float32), DATA)
    counted = local_tokens(batch.ragged.slots >= 0, layout)
    return psum(load_balancing_loss(routings, counted, TOKENS), layout.axis("tokens")) * num_tokens
