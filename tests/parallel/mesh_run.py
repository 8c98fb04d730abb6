"""Runs on eight CPU devices and on one: python -m tests.parallel.mesh_run KIND MESH ...

KIND is model, adapter (of stories260K) or mixture (tiny, with its tokenizer). Prints a line of JSON for each mesh.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import numpy as np
import pyarrow.parquet as pq

from groupax import init_model, load_model
from groupax.parallel.mesh import AXES, make_mesh
from tests.training.test_trainer import a_trainer

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
PROMPTS = ["Once upon a time", "Lily and Tom", "One day, a dog", "The sun was", "A big red ball", "Mom said"]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]


def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in completions]


def a_model(kind):
    device = make_mesh().devices.reshape(-1)[:1]
    model = load_model(STORIES, mesh=jax.sharding.Mesh(device.reshape((1,) * len(AXES)), AXES))
    if kind != "mixture":
        return model
    change = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    mixture = init_model({**model.hf_config, **change, "router_aux_loss_coef": 0.5}, mesh=model.mesh)
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, mixture.params)
    return replace(mixture, params=params, source=model.source)


def run(kind, mesh):
    """What is trained after three steps, and the completions."""
    folder = Path(tempfile.mkdtemp())
    settings = {"adapter": {"lora_r": 4, "lora_alpha": 8}, "mixture": {"share_prefix": "never"}}.get(kind, {})
    given = {"mesh": mesh, "optimizer": "sgd", "learning_rate": 1.0, "max_completion_length": 16, **settings}
    trainer = a_trainer(folder, vowels, ROWS, a_model(kind), tokenizer=None, **given)
    trainer.train()
    files = sorted((folder / "run" / "rollouts").glob("*.parquet"))
    completions = [row["completion"] for file in files for row in pq.read_table(file).to_pylist()]
    return [np.asarray(x) for x in jax.tree.leaves(trainer.learner.state.params)], completions


def main(kind, *meshes):
    one, completions = run(kind, None)
    for mesh in meshes:
        many, on_many = run(kind, mesh)
        difference = max(float(np.abs(a - b).max()) for a, b in zip(one, many, strict=True))
        print(json.dumps({"mesh": mesh, "difference": difference, "same": completions == on_many}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
