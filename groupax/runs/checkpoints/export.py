"""Exports the checkpoints of a run."""

import os
from pathlib import Path

import jax
import numpy as np

from groupax.data.tokenizer import load_tokenizer
from groupax.models.families import read_config
from groupax.models.specs import model_specs
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import save_model
from groupax.parallel.mesh import make_mesh
from groupax.parallel.runtime import configure_jax
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.record import PARAMS, UNTRAINED
from groupax.runs.checkpoints.store import Store, damage


def export(store: Store, step: int, folder: str | os.PathLike[str]) -> Path:
    """Writes the policy of a checkpoint as a Hugging Face folder, in the dtype of the run's starting model.

    The run's tokenizer and the settings of its image processor are written too. A model that groupax wrote into the
    folder is replaced; one with other files is refused, as is a damaged checkpoint or one of an adapter.
    """
    configure_jax()
    local = store.local(step)
    fault = damage(local)
    if fault is not None:
        raise ValueError(f"{store.where(step)} is damaged: {fault}")
    origin = store.state(step)["model"]
    config = read_config(origin["config"])
    named = arrays.read_on_host(local / PARAMS)
    if (local / UNTRAINED).is_dir():
        named = {**named, **arrays.read_on_host(local / UNTRAINED)}
    specs = arrays.named_leaves(model_specs(config))
    if named.keys() != specs.keys():
        other = sorted(named.keys() ^ specs.keys())
        raise ValueError(f"{store.where(step)} does not have the weights of a whole model; they differ in {other[:4]}")
    leaves = [np.asarray(named[name]) for name in specs]
    params = jax.tree.unflatten(jax.tree.structure(model_specs(config)), leaves)
    source = store.sibling_folder("tokenizer")
    tokenizer = None if source is None else load_tokenizer(source)
    processor = source if config.vision else None
    model = Model(config, params, make_mesh(), origin["config"], origin["generation_config"], processor)
    return save_model(model, folder, tokenizer, origin["dtype"])
