"""Saves the state of a run during training and restores it."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from groupax.core.config import GRPOConfig, RunConfig
from groupax.core.errors import PreemptedError, RunError
from groupax.core.settings.fields import nearest
from groupax.core.settings.run import CheckpointSettings, RolloutLogSettings
from groupax.core.storage.buckets import is_remote
from groupax.episodes.record import remove_records
from groupax.events import Message
from groupax.models.weights.checkpoint import Model
from groupax.parallel import processes
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.checkpoints.choose import Saved, split_path, store_of, to_continue
from groupax.runs.checkpoints.fingerprint import Identity, devices_of, digest, versions
from groupax.runs.checkpoints.record import has_optimizer, restore_learner, start_writing, state_of, write_rollout
from groupax.runs.checkpoints.states import StateKeeper
from groupax.runs.checkpoints.store import STATE, LocalStore, RemoteStore, Store
from groupax.runs.checkpoints.writer import CheckpointWriter, Snapshot
from groupax.runs.folder import RunFolder
from groupax.runs.log import RunLog
from groupax.training.adapters import PolicyLearner

RECORD_BYTES = 500_000_000  # of what tools answered in earlier rollouts


class RunSaver:
    """The checkpoints of one run, whose folder and new learner `begin` prepares.

    Args:
        args, identity, model, folder, learner, log: Parts of the run; `model` is the starting one.
        policies: Returns the earlier policies that sample the next rollouts (see `Pipeline.policies`).
        store_in: Returns the checkpoints of a run in a local folder.
        more: Called by all processes before a checkpoint is written; what it returns, if not None, writes further files
            next to the checkpoint's folder, which it receives.
    """

    def __init__(
        self,
        args: RunConfig,
        identity: Identity,
        model: Model,
        folder: RunFolder,
        learner: PolicyLearner,
        log: RunLog,
        policies: Callable[[Cursor], Mapping[int, Policy]],
        store_in: Callable[[Path], LocalStore],
        more: Callable[[], Callable[[Path], None] | None],
    ) -> None:
        self.args, self.identity, self.model = args, identity, model
        self.folder, self.learner, self.log, self.policies = folder, learner, log, policies
        self.origin = args.resume if args.resume not in ("auto", "never") else None
        self.scratch = folder.path / "checkpoints" if folder.remote else Path(tempfile.gettempdir())
        self.more = more
        self.store: Store = RemoteStore(folder.remote, self.scratch) if folder.remote else store_in(folder.path)
        self.writer = CheckpointWriter(self.store, args.part(CheckpointSettings), log.emit, folder.sync)
        budget = int(args.part(RolloutLogSettings).replay_state_gb * 1e9) if isinstance(args, GRPOConfig) else 0
        self.states = StateKeeper(folder, learner, budget, self.store)

    def begin(self) -> Saved | None:
        """Restores the learner from the checkpoint that `resume` names, and prepares the run folder.

        Returns:
            The checkpoint, from which the caller restores the log; None if the run starts from the beginning.
        """
        saved = processes.run_on_primary(
            lambda: to_continue(self.args.resume, self.store, self.scratch, self.identity, self.log.emit)
        )
        saved = saved and self._seen_by_all(saved)
        config, identity = self.args.to_dict(), digest(self.identity)
        if saved is None:
            self.folder.start(config, identity, afresh=self.args.resume != "auto")
            self.states.begin(0)
            return None
        self._report(saved)
        restore_learner(self.learner, saved.folder, saved.state["learner"])
        num_bytes = saved.state["metrics_bytes"]
        is_another = saved.where != self.store.where(saved.step)  # a new run that starts where that one was
        if is_another or not processes.is_primary():
            self.folder.start(config, identity)
            return saved
        metrics = self.folder.metrics(num_bytes)
        if len(metrics) < num_bytes:
            self.log.emit(Message(f"metrics.jsonl has {len(metrics)} bytes of the {num_bytes} it had", warning=True))
        self.folder.resume(config, metrics, saved.step)
        for step in self.store.steps():
            if step > saved.step:
                self.log.emit(Message(f"{self.store.where(step)} is now {self.store.set_aside(step)}"))
        self.writer.last_step = saved.step
        self.states.begin(saved.step)
        return saved

    def save_if_due(self, cursor: Cursor, experience: Experience | None) -> None:
        """Starts to write a checkpoint if one is due."""
        self.writer.look()
        is_due = self.writer.due(cursor.step) or self._is_candidate_for_best(cursor)
        if not is_due:
            self.states.keep_if_due(cursor, experience, self.policies, partial(self._state, cursor, experience))
        self.save_if(is_due, cursor, experience)

    def save_if(self, due: bool, cursor: Cursor, experience: Experience | None) -> None:
        """Starts to write a checkpoint if the primary process says that one is due."""
        if cursor.step and processes.broadcast_object(due):
            self.save(cursor, experience)

    def save(self, cursor: Cursor, experience: Experience | None) -> None:
        """Starts to write a checkpoint of the current state; the primary process writes it."""
        policies = self.policies(cursor)
        begin = start_writing(self.learner, policies, self.args.save_optimizer_state)
        more = self.more()
        if not processes.is_primary():
            return
        self._report_unknown_metric(cursor.step)
        state = self._state(cursor, experience, policies)

        def begin_with_metrics(folder: Path) -> Callable[[], None]:
            self.folder.settle()
            if more is not None:
                more(folder)
            return begin(folder)

        text = json.dumps(state)  # before the log changes
        updates = self.args.updates_per_rollout if isinstance(self.args, GRPOConfig) else 1
        kept = {(step - 1) // updates for step in self.folder.steps_with_findings()}
        published = partial(remove_records, self.folder.records, cursor.num_rollouts, RECORD_BYTES, kept)
        write_more = partial(write_rollout, experience) if experience is not None else lambda _: None
        self.writer.save(Snapshot(cursor.step, text, begin_with_metrics, write_more, published))

    def _state(
        self, cursor: Cursor, experience: Experience | None, policies: Mapping[int, Policy]
    ) -> Mapping[str, Any]:
        """Returns the content of `state.json`."""
        return {
            **state_of(cursor, self.learner, experience, policies, self.identity, self.model),
            "log": self.log.state(),
            "metrics": self.log.last | (self.log.evaluated if cursor.evaluated_step == cursor.step else {}),
            "metrics_bytes": self.folder.num_metrics_bytes,
            "origin": self.origin,
        }

    def save_and_wait(self, cursor: Cursor, experience: Experience | None) -> bool:
        """Writes a checkpoint of the current state, and returns whether there is one."""
        self.writer.wait()
        if processes.broadcast_object(self.writer.newest() != cursor.step):
            self.save(cursor, experience)
            self.writer.wait()
        return processes.broadcast_object(self.writer.newest() == cursor.step)

    def stop(self, cursor: Cursor, experience: Experience | None, reason: str) -> None:
        """Saves the state of a run that was asked to stop, and raises a PreemptedError."""
        if not cursor.step:
            message = (
                f"stopped ({reason}) before the first step was complete; nothing was saved. To start over, run it "
                "as before"
            )
            self.log.emit(Message(message, warning=True))
            raise PreemptedError(message)
        if self.save_and_wait(cursor, experience):
            kept = f"its state is in {self.store.where(cursor.step)}"
        elif newest := self.writer.newest():
            kept = f"its state could not be saved; the newest one is {self.store.where(newest)}"
        else:
            kept = "its state could not be saved"
        message = processes.broadcast_object(
            f"stopped ({reason}) after step {cursor.step}; {kept}. {self._how_to_continue}"
        )
        self.log.emit(Message(message, warning=True))
        raise PreemptedError(message)

    def fail(self, cursor: Cursor, experience: Experience | None, whole: bool) -> None:
        """Saves the state of a run that cannot continue, if it is whole; otherwise the newest checkpoint must do."""
        if cursor.step and whole and not self.folder.is_incomplete:
            self.save_and_wait(cursor, experience)
        self.writer.wait()
        if newest := self.writer.newest():
            self.log.emit(
                Message(f"the run's state is in {self.store.where(newest)}. {self._how_to_continue}", warning=True)
            )

    def end(self, cursor: Cursor, experience: Experience | None) -> None:
        """Saves the state after the last step, from which a longer run can continue; a RunError says that it failed."""
        self.states.end()
        self.writer.wait()
        if self.args.do_last_save and not self.save_and_wait(cursor, experience):
            raise RunError(f"the last checkpoint could not be written to {self.store.where(cursor.step)}")

    def _seen_by_all(self, saved: Saved) -> Saved:
        """Returns the checkpoint that the primary process has chosen, for this process; all must be able to read it."""
        if not processes.is_primary() and is_remote(saved.where):  # the folder is a download of that process
            run, _ = split_path(saved.where)
            saved = replace(saved, folder=store_of(run, self.scratch).local(saved.step))
        seen = processes.all_gather_object((saved.folder / STATE).is_file())
        if not all(seen):
            unable = ", ".join(str(number) for number, sees in enumerate(seen) if not sees)
            raise ValueError(
                f"resume: processes {unable} cannot read the checkpoint {saved.where}; output_dir must be a "
                "folder that all hosts share, or in a bucket"
            )
        return saved

    @property
    def _how_to_continue(self) -> str:
        again = "start it again as before (resume is 'auto')" if self.args.resume != "never" else "set resume"
        command = f", or: groupax resume {self.folder.uri}" if self.folder.command is not None else ""
        return f"To continue, {again}{command}"

    def _report(self, saved: Saved) -> None:
        if saved.step < self.identity["num_steps"]:  # the trainer reports a complete run
            self.log.emit(Message(f"continuing after step {saved.step}, from {saved.where}"))
        then, now = saved.state["versions"], versions()
        changed = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
        if changed:
            text = f"libraries have changed since: {', '.join(changed)}; numbers may differ slightly"
            self.log.emit(Message(text, warning=True))
        devices = devices_of(self.learner.mesh)
        if saved.state["devices"] != devices:
            text = f"devices have changed from {saved.state['devices']} to {devices}; sums may round differently"
            self.log.emit(Message(text))
        if not has_optimizer(saved.folder):
            text = "the checkpoint has no optimizer state (save_optimizer_state); it is initialized again"
            self.log.emit(Message(text, warning=True))

    def _is_candidate_for_best(self, cursor: Cursor) -> bool:
        """Returns whether the current policy was evaluated for the best checkpoint and is not saved yet."""
        name, is_known = self.args.metric_for_best_model, self.writer.last_step == cursor.step
        return name in self.log.evaluated and cursor.evaluated_step == cursor.step and not is_known

    def _report_unknown_metric(self, step: int) -> None:
        name, metrics = self.args.metric_for_best_model, self.log.last | self.log.evaluated
        will_be_evaluated = step < self.args.eval_steps and name is not None and name.startswith("eval_")
        if name is not None and name not in metrics and not will_be_evaluated:
            hint = nearest(name, metrics)
            found = {
                "metric_for_best_model": f"metric_for_best_model is {name!r}, which is not among the metrics so far; "
                f"no checkpoint is the best one{hint}"
            }
            self.log.diagnostics.report(step, found)


def remove_download(saved: Saved) -> None:
    """Deletes the local copy of a checkpoint from a bucket."""
    if is_remote(saved.where):
        shutil.rmtree(saved.folder, ignore_errors=True)
