"""Runs on meshes of eight virtual CPU devices beside one on a single device: python mesh_run.py KIND OPTIMIZER MESH ...

KIND is model, adapter (of stories260K) or mixture (tiny, with its tokenizer). Prints a line of JSON for each mesh.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pyarrow.parquet as pq

from groupax import GRPOConfig, GRPOTrainer, init_model, load_model
from groupax.parallel.mesh import AXES, make_mesh

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
PROMPTS = ["Once upon a time", "Lily and Tom", "One day, a dog", "The sun was", "A big red ball", "Mom said"]
OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "learning_rate": 1.0},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3},
    "adamw_1e-5": {"optimizer": "adamw", "learning_rate": 1e-3, "adam_epsilon": 1e-5},
}


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


def run(kind, optimizer, mesh):
    """What is trained after three steps, completions and gradient norms."""
    folder = tempfile.mkdtemp()
    settings = {"adapter": {"lora_r": 4, "lora_alpha": 8}, "mixture": {"share_prefix": "never"}}.get(kind, {})
    args = GRPOConfig(
        output_dir=folder,
        mesh=mesh,
        max_steps=3,
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=16,
        lr_scheduler_type="constant",
        progress_bar="none",
        **OPTIMIZERS[optimizer],
        **settings,
    )
    trainer = GRPOTrainer(a_model(kind), vowels, args, [{"prompt": prompt} for prompt in PROMPTS])
    trainer.train()
    files = sorted(Path(folder, "rollouts").glob("*.parquet"))
    completions = [row["completion"] for file in files for row in pq.read_table(file).to_pylist()]
    metrics = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    trained = [np.asarray(x) for x in jax.tree.leaves(trainer.learner.state.params)]
    return trained, completions, [line["grad_norm"] for line in metrics if "grad_norm" in line]


def main(kind, optimizer, *meshes):
    one, completions, norms = run(kind, optimizer, None)
    for mesh in meshes:
        many, on_many, norms_on_many = run(kind, optimizer, mesh)
        told = {
            "kind": kind,
            "optimizer": optimizer,
            "mesh": mesh,
            "difference": max(float(np.abs(a - b).max()) for a, b in zip(one, many, strict=True)),
            "norms": max(abs(a - b) / a for a, b in zip(norms, norms_on_many, strict=True)),
            "completions": len(completions),
            "same": completions == on_many,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
