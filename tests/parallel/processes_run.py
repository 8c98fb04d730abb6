"""A run as one or several processes: python processes_run.py FOLDER NUM_DEVICES SETTINGS_AS_JSON [FAULT [PROCESS]].

The model lies in FOLDER/../model, GROUPAX_... variables say which process it is. The first one leaves what it ends with
in FOLDER/final.npz. FAULT is the signal by which a process, by default the second one, ends when it is asked for a
reward of step 3.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

SETTINGS = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 24,
    "filter_zero_variance": True,
    "beta": 0.05,
    "updates_per_rollout": 2,
    "eval_steps": 2,
    "max_steps": 3,
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "optimizer": "sgd",
    "save_interval_minutes": 0,
    "progress_bar": "none",
}
FAULT, FAULTY = [*sys.argv[4:], *(None, "1")[len(sys.argv[4:]) :]]
SENT = []


def letters(prompts, completion_ids, log_extra, log_metric, trainer_state):
    """No signal for some of the prompts."""
    from groupax.parallel import processes

    if FAULT and processes.process_index() == int(FAULTY) and trainer_state.step >= 2 and not SENT:
        SENT.append(FAULT)  # a second signal would end the process at once
        os.kill(os.getpid(), getattr(signal, FAULT))
    log_extra("scored_by", [processes.process_index()] * len(prompts))
    log_metric("letters", float(sum(len(ids) for ids in completion_ids)))
    return [0.0 if p[0] in "ab" else ids.count(3) / len(ids) for p, ids in zip(prompts, completion_ids, strict=True)]


def main(folder, num_devices, settings):
    from groupax import GRPOConfig, GRPOTrainer
    from groupax.parallel import processes
    from groupax.parallel.collectives import to_host_on_primary

    jax.config.update("jax_num_cpu_devices", num_devices)
    prompts = [{"prompt": text} for text in ("abc", "bcd", "ca", "dabc", "ef", "fed", "ge", "hi")]
    args = GRPOConfig(**{**SETTINGS, "output_dir": str(folder / "run"), **settings})
    trainer = GRPOTrainer(str(folder.parent / "model"), letters, args, prompts, prompts[:3])
    trainer.train()
    state = to_host_on_primary({"state": trainer.learner.state, "reference": trainer.learner.reference})
    if processes.is_primary():
        flat = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
        np.savez(folder / "final.npz", **flat)


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
