"""Looking at a run's checkpoints: what there are, whether they are whole, one as a model's folder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.data.tokenizer import load_tokenizer
from groupax.models.checkpoint import Model
from groupax.models.families import read_config
from groupax.models.saving import save_model
from groupax.models.specs import model_specs
from groupax.parallel.mesh import make_mesh
from groupax.parallel.runtime import configure_jax
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.files import damage
from groupax.runs.checkpoints.record import PARAMS
from groupax.runs.checkpoints.store import Store


@dataclass(frozen=True, eq=False)
class Listed:
    """A checkpoint as it is listed.

    Attributes:
        step: of the run.
        saved_at: when it was written, UTC; empty if that cannot be read.
        metrics: of the run when it was written.
        rollout: whether it was written between the updates on a rollout.
    """

    step: int
    saved_at: str
    metrics: Mapping[str, float]
    rollout: bool


def listed(store: Store) -> list[Listed]:
    """A run's checkpoints by their `state.json`; that they are whole is not looked at."""
    states = [(step, store.state(step)) for step in store.steps()]
    return [
        Listed(step, state.get("saved_at", ""), state.get("metrics", {}), state.get("rollout") is not None)
        for step, state in states
    ]


def damages(store: Store) -> dict[int, str | None]:
    """What is wrong with each checkpoint; None if it is whole."""
    return {step: damage(store.local(step)) for step in store.steps()}


def export(store: Store, step: int, folder: str | os.PathLike[str], tokenizer: Any = None) -> Path:
    """Write the policy of a checkpoint as a Hugging Face folder, in the dtype of the model that the run began with.

    Args:
        store: the run's checkpoints.
        step: of the checkpoint.
        folder: need not exist. A model that groupax has written there is replaced; other files stay.
        tokenizer: written beside the weights if given.

    Raises:
        ForeignFilesError: the folder holds files that groupax did not write.
        ValueError: the checkpoint is damaged, or its weights are not those of a whole model.
    """
    configure_jax()
    local = store.local(step)
    fault = damage(local)
    if fault is not None:
        raise ValueError(f"{store.where(step)} is damaged: {fault}")
    origin = store.state(step)["model"]
    config = read_config(origin["config"])
    named = arrays.read_on_host(local / PARAMS)
    specs = arrays.named_leaves(model_specs(config))
    if named.keys() != specs.keys():
        other = sorted(named.keys() ^ specs.keys())
        raise ValueError(f"{store.where(step)} does not have the weights of a whole model; they differ in {other[:4]}")
    leaves = [np.asarray(named[name]) for name in specs]
    params = jax.tree.unflatten(jax.tree.structure(model_specs(config)), leaves)
    model = Model(config, params, make_mesh(), origin["config"], origin["generation_config"])
    return save_model(model, folder, tokenizer, origin["dtype"])


def tokenizer_of(store: Store) -> Any:
    """The tokenizer that the run has written into its folder; None if there is none."""
    folder = store.beside("tokenizer")
    return None if folder is None else load_tokenizer(folder)
