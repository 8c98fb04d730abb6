"""States of a run between its checkpoints, from which a replay of a step starts.

They are written like checkpoints, in `states/` of the run folder, while the run continues. A state is due when the run
has lasted a multiple of what the last one made it wait, so that they cost the run a small and known fraction of its
time. Beyond the budget they are removed such that the others are evenly spaced.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.core.settings.run import CheckpointSettings
from groupax.events import ignore
from groupax.parallel.processes import num_processes
from groupax.rollouts.pipeline import Policy
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.record import trees_of, write_rollout
from groupax.runs.checkpoints.store import OWN, LocalStore, Store
from groupax.runs.checkpoints.writer import CheckpointWriter, Snapshot
from groupax.runs.rollout_log import to_remove
from groupax.runs.trainer import Trainer

FOLDER = "states"
TIMES_WAIT, LEAST_S = 600.0, 5.0  # between two states: this multiple of what one costs, and this many seconds
BY_HAND = CheckpointSettings(save_steps=0, save_interval_minutes=0.0, save_total_limit=0)


class StateKeeper:
    """The states of one run, of at most `max_bytes`.

    Models whose state exceeds a third of that have none; nor have runs of several processes, and those whose
    checkpoints are not in their own folder.
    """

    def __init__(self, trainer: Trainer, max_bytes: int, checkpoints: Store) -> None:
        self.trainer, self.max_bytes = trainer, max_bytes
        is_own = isinstance(checkpoints, LocalStore) and checkpoints.layout is OWN
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trees_of(trainer.learner, with_optimizer=True)))
        self.is_kept = is_own and num_processes() == 1 and 3 * num_bytes <= max_bytes
        self.store = LocalStore(trainer.run_folder.path / FOLDER)
        self.writer = CheckpointWriter(self.store, BY_HAND, ignore, lambda: None)
        self._due_s = time.monotonic() + LEAST_S

    def begin(self, step: int) -> None:
        """Removes the states of later steps, which the run is going to repeat."""
        for each in self.store.steps():
            if each > step:
                self.store.delete(each)

    def keep_if_due(self, state_of: Callable[[Mapping[int, Policy]], Mapping[str, Any]]) -> None:
        """Starts to write the present state if it is due; `state_of` returns `state.json` with the earlier policies."""
        cursor, experience, begun_s = self.trainer.cursor, self.trainer.experience, time.monotonic()
        if not self.is_kept or not cursor.step or begun_s < self._due_s or self.writer.is_writing:
            return
        earlier = self.trainer.policies(cursor)
        trees = jax.tree.map(lambda leaf: np.array(leaf, copy=True), trees_of(self.trainer.learner, True, earlier))
        text = json.dumps(state_of(earlier))

        def write(folder: Path) -> None:
            arrays.start_writing(folder, trees)()
            if experience is not None:
                write_rollout(experience, folder)

        self.writer.save(Snapshot(cursor.step, text, lambda _: lambda: None, write, self._thin_out))
        now_s = time.monotonic()
        self._due_s = now_s + max(LEAST_S, TIMES_WAIT * (now_s - begun_s))

    def end(self) -> None:
        """Waits for the state that is being written."""
        self.writer.wait()

    def _thin_out(self) -> None:
        files = {step: self.store.local(step).rglob("*") for step in self.store.steps()}
        sizes = {step: sum(path.stat().st_size for path in own if path.is_file()) for step, own in files.items()}
        for step in to_remove(sizes, self.max_bytes):
            self.store.delete(step)
