"""A run in a process of its own, for tests that kill it: python stopped_run.py FOLDER SETTINGS_AS_JSON PAUSE_S.

Its model lies in FOLDER/../model. It says what it is doing in FOLDER/phase, and leaves what it ends with in
FOLDER/final.npz.
"""

import json
import mmap
import sys
import time
from pathlib import Path

import jax
import numpy as np

PHASES = ("other", "rollout", "reward", "update", "evaluation", "checkpoint")
# Reuse of rollouts, dynamic sampling, KL to a moving reference, windows of metrics, an adaptive entropy bonus.
REUSE = {
    "num_iterations": 2,
    "updates_per_rollout": 2,
    "prompts_per_step": 2,
    "filter_zero_variance": True,
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 3,
    "use_adaptive_entropy": True,
    "entropy_coef": 0.01,
    "logging_steps": 2,
}
SETTINGS = {
    **REUSE,
    "num_generations": 4,
    "max_completion_length": 24,
    "eval_steps": 5,
    "save_steps": 3,
    "save_total_limit": 2,
    "max_steps": 24,
    "learning_rate": 1e-2,
    "progress_bar": "none",
}


class Phase:
    """Two bytes for another process to read: what the main thread is doing, and whether a checkpoint is written."""

    def __init__(self, path):
        self.file = open(path, "r+b")  # noqa: SIM115 - for the life of the process
        self.bytes = mmap.mmap(self.file.fileno(), 2)

    def during(self, name, function, seconds=0.0, place=0):
        """The function, with the phase told while it runs; it takes at least some seconds."""

        def told(*arguments, **options):
            before, self.bytes[place] = self.bytes[place], PHASES.index(name)
            try:
                time.sleep(seconds)
                return function(*arguments, **options)
            finally:
                self.bytes[place] = before

        return told


def letters(prompts, completion_ids, log_extra):
    """No signal for some of the prompts."""
    log_extra("num_a", [ids.count(3) for ids in completion_ids])
    return [0.0 if p[0] in "ab" else ids.count(3) / len(ids) for p, ids in zip(prompts, completion_ids, strict=True)]


def main(folder, settings, pause_s):
    from groupax import GRPOConfig, GRPOTrainer
    from groupax.runs.checkpoints import writer

    folder = Path(folder)
    phase = Phase(folder / "phase")
    place = {"output_dir": str(folder / "run"), "progress_bar": "none"}
    prompts = [{"prompt": text} for text in ("abc", "bcd", "ca", "dabc", "ef", "fed", "ge", "hi")]
    args = GRPOConfig(**{**SETTINGS, **place, **settings})
    trainer = GRPOTrainer(str(folder.parent / "model"), letters, args, prompts, prompts[:4])
    trainer.learner.update = phase.during("update", trainer.learner.update, pause_s)
    trainer.reward_runner.finish = phase.during("reward", trainer.reward_runner.finish, pause_s)
    trainer.evaluate = phase.during("evaluation", trainer.evaluate, pause_s)
    trainer.collector.rollout = phase.during("rollout", trainer.collector.rollout, pause_s)
    writer.seal = phase.during("checkpoint", writer.seal, pause_s, place=1)
    trainer.train()
    np.savez(folder / "final.npz", **final_state(trainer))


def final_state(trainer):
    """All that a run ends with, by name."""
    learner = trainer.learner
    tree = {"state": learner.state, "reference": learner.reference}
    flat = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    others = {"entropy": learner.entropy, "shapes": learner.shapes, "cursor": trainer.cursor}
    return flat | {name: np.array(repr(value)) for name, value in others.items()}


def steps_in(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def content_of(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
