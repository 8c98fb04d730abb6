"""Optimizer state and reference in the hosts' memory: where they are, and that nothing else shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import LoRAConfig, add_adapter, init_model
from groupax.core.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.parallel.collectives import DEVICE, HOST
from groupax.parallel.mesh import make_mesh
from groupax.training.optimizer import OPTIMIZERS, make_optimizer, make_schedule
from groupax.training.state import init_state
from groupax.training.step import apply_update
from tests.conftest import TINY, steps_started
from tests.runs.stopped_run import final_state, letters

from .test_trainer import a_trainer, lines_of

BOTH = {"offload_optimizer": True, "offload_reference": True}


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.size > 1}


@pytest.mark.drawn(2)
@pytest.mark.heavy
@pytest.mark.parametrize(
    "adapts", [pytest.param(False, id="weights"), pytest.param(True, id="adapter", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_in_parts_are_those_at_once(name, adapts):
    mesh = make_mesh((1, 2, 1, 2, 1))
    model = init_model(TINY, mesh=mesh)
    params = add_adapter(model, LoRAConfig(r=4)).adapter.trained if adapts else model.params
    settings = OptimizerSettings(optimizer=name, weight_decay=0.1, momentum=0.9)
    optimizer = make_optimizer(settings, make_schedule(LearningRateSettings(learning_rate=0.1), 10))
    static = {"optimizer": optimizer, "config": model.config, "mesh": mesh}
    state, offloaded = init_state(params, **static), init_state(params, **static, offload_optimizer=True)
    for one, other in zip(*map(jax.tree.leaves, (state, offloaded)), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding.with_memory_kind(DEVICE), one.ndim), "split alike"
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-4, np.inf):  # clipped, not clipped, refused
        grads = jax.tree.map(
            lambda x, scale=scale: jax.device_put(np.float32(scale * rng.normal(size=x.shape)), x.sharding),
            state.params,
        )
        assert kinds(offloaded.params) == {DEVICE}
        assert HOST in kinds(offloaded.opt_state)
        state, *told = apply_update(state, grads, jnp.float32(0), **static)
        offloaded, *also_told = apply_update(offloaded, grads, jnp.float32(0), **static, offload_optimizer=True)
        assert [np.asarray(x).tobytes() for x in told] == [np.asarray(x).tobytes() for x in also_told]
        jax.tree.map(np.testing.assert_array_equal, state, offloaded)
    assert not told[1]
    assert HOST in kinds(offloaded.opt_state)


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
@pytest.mark.parametrize(
    "adapts", [pytest.param(False, id="weights"), pytest.param(True, id="adapter", marks=pytest.mark.long)]
)
def test_a_run_is_the_same_and_goes_on_with_and_without(tmp_path, adapts):
    """On a mesh that splits the weights, with a reference that moves; stopped, and resumed the other way, twice."""
    mesh = make_mesh((1, 4, 1, 1, 1))
    settings = {"beta": 0.1, "save_steps": 1, "lr_scheduler_type": "constant", "mesh": "1,-1,1,1,1"}
    settings |= {"lora_r": 4} if adapts else {"sync_ref_model": True, "ref_model_sync_steps": 1}
    there = {"offload_optimizer": True} if adapts else BOTH

    def a_run(folder, **more):
        model = init_model({**TINY, "vocab_size": 16, "num_hidden_layers": 1}, seed=0, mesh=mesh)
        return a_trainer(folder, letters, model=model, **settings, **more)

    whole = a_run(tmp_path / "whole", max_steps=3)
    whole.train()
    for steps, offloads in ((1, there), (2, {}), (3, there)):
        resume = str(tmp_path / "parts" / "run") if steps > 1 else "auto"
        trainer = a_run(tmp_path / "parts", max_steps=steps, resume=resume, **offloads)
        assert steps_started(trainer) == [steps - 1]
        learner = trainer.learner
        assert kinds(learner.state.params) == {DEVICE}
        assert kinds(learner.state.opt_state) == ({HOST} if offloads else {DEVICE})
        assert kinds(learner.reference) == ({HOST} if offloads and not adapts else {DEVICE})
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    assert final_state(trainer).keys() == final_state(whole).keys()
    jax.tree.map(np.testing.assert_array_equal, final_state(trainer), final_state(whole))
