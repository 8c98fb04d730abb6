"""Saves the state of a run during training and restores it."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from groupax.core.config import GRPOConfig
from groupax.core.errors import PreemptedError, RunError
from groupax.core.settings.fields import nearest
from groupax.core.settings.run import CheckpointSettings
from groupax.core.storage.buckets import is_remote
from groupax.episodes.record import remove_records
from groupax.events import Message
from groupax.parallel import processes
from groupax.runs.checkpoints.choose import Saved, split_path, store_of, to_continue
from groupax.runs.checkpoints.fingerprint import Identity, devices_of, digest, versions
from groupax.runs.checkpoints.record import has_optimizer, restore_learner, start_writing, state_of, write_rollout
from groupax.runs.checkpoints.store import STATE, LocalStore, RemoteStore, Store
from groupax.runs.checkpoints.writer import CheckpointWriter, Snapshot
from groupax.runs.log import RunLog
from groupax.runs.trainer import Trainer

RECORD_BYTES = 500_000_000  # of what tools answered in earlier rollouts


class RunSaver:
    """The checkpoints of one run, whose folder and new learner `begin` prepares.

    Args:
        trainer, identity, log: The trainer of the run, its identity and its log.
        store_in: Returns the checkpoints of a run in a local folder.
        more: Called by all processes before a checkpoint is written; what it returns, if not None, writes further files
            next to the checkpoint's folder, which it receives.
    """

    def __init__(
        self,
        trainer: Trainer,
        identity: Identity,
        log: RunLog,
        store_in: Callable[[Path], LocalStore],
        more: Callable[[], Callable[[Path], None] | None],
    ) -> None:
        self.trainer, self.identity, self.log = trainer, identity, log
        self.args, self.folder = args, folder = trainer.args, trainer.run_folder
        self.origin = args.resume if args.resume not in ("auto", "never") else None
        self.scratch = folder.path / "checkpoints" if folder.remote else Path(tempfile.gettempdir())
        self.more = more
        self.store: Store = RemoteStore(folder.remote, self.scratch) if folder.remote else store_in(folder.path)
        self.writer = CheckpointWriter(self.store, args.part(CheckpointSettings), log.emit, folder.sync)

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
            if self.folder.start(config, identity, afresh=self.args.resume != "auto"):
                text = f"the run in {self.folder.uri} was stopped before its first checkpoint; its steps are repeated"
                self.log.emit(Message(text, warning=True))
            return None
        self._report(saved)
        restore_learner(self.trainer.learner, saved.folder, saved.state["learner"])
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
        return saved

    def save_if_due(self) -> None:
        """Starts to write a checkpoint if one is due, or if the present policy was evaluated and may be the best."""
        self.writer.look()
        step = self.trainer.cursor.step
        is_new = self.trainer.cursor.evaluated_step == step != self.writer.last_step
        self.save_if(self.writer.due(step) or (is_new and self.args.metric_for_best_model in self.log.evaluated))

    def save_if(self, due: bool) -> None:
        """Starts to write a checkpoint if the primary process says that one is due."""
        if self.trainer.cursor.step and processes.broadcast_object(due):
            self.save()

    def save(self) -> None:
        """Starts to write a checkpoint of the current state; the primary process writes it."""
        trainer, cursor, experience = self.trainer, self.trainer.cursor, self.trainer.experience
        policies = trainer.policies(cursor)
        begin = start_writing(trainer.learner, policies, self.args.save_optimizer_state)
        more = self.more()
        if not processes.is_primary():
            return
        self._report_unknown_metric(cursor.step)
        state = {
            **state_of(cursor, trainer.learner, experience, policies, self.identity, trainer.start_model),
            "log": self.log.state(),
            "metrics": self.log.last | (self.log.evaluated if cursor.evaluated_step == cursor.step else {}),
            "metrics_bytes": self.folder.num_metrics_bytes,
            "origin": self.origin,
        }

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

    def save_and_wait(self) -> bool:
        """Writes a checkpoint of the current state, and returns whether there is one."""
        step = self.trainer.cursor.step
        self.writer.wait()
        if processes.broadcast_object(self.writer.newest() != step):
            self.save()
            self.writer.wait()
        return processes.broadcast_object(self.writer.newest() == step)

    def stop(self, reason: str) -> None:
        """Saves the state of a run that was asked to stop, and raises a PreemptedError."""
        step = self.trainer.cursor.step
        if not step:
            message = (
                f"stopped ({reason}) before the first step was complete; nothing was saved. To start over, run it "
                "as before"
            )
            self.log.emit(Message(message, warning=True))
            raise PreemptedError(message)
        if self.save_and_wait():
            kept = f"its state is in {self.store.where(step)}"
        elif newest := self.writer.newest():
            kept = f"its state could not be saved; the newest one is {self.store.where(newest)}"
        else:
            kept = "its state could not be saved"
        message = processes.broadcast_object(f"stopped ({reason}) after step {step}; {kept}. {self._how_to_continue}")
        self.log.emit(Message(message, warning=True))
        raise PreemptedError(message)

    def fail(self, is_whole: Callable[[], bool]) -> None:
        """Saves the state of a run that cannot continue, if it is whole; otherwise the newest checkpoint must do."""
        if self.trainer.cursor.step and is_whole() and not self.folder.is_incomplete:
            self.save_and_wait()
        self.writer.wait()
        if newest := self.writer.newest():
            self.log.emit(
                Message(f"the run's state is in {self.store.where(newest)}. {self._how_to_continue}", warning=True)
            )

    def end(self) -> None:
        """Saves the state after the last step, from which a longer run can continue; a RunError says that it failed."""
        self.writer.wait()
        if self.args.do_last_save and not self.save_and_wait():
            raise RunError(f"the last checkpoint could not be written to {self.store.where(self.trainer.cursor.step)}")

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
            is_own = str(saved.where).startswith(str(self.folder.path))
            end = self.folder.earlier.sentence if is_own else ""
            before = f"; the process before: {end}" if end else ""
            self.log.emit(Message(f"continuing after step {saved.step}, from {saved.where}{before}"))
        then, now = saved.state["versions"], versions()
        changed = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
        if changed:
            text = f"libraries have changed since: {', '.join(changed)}; numbers may differ slightly"
            self.log.emit(Message(text, warning=True))
        devices = devices_of(self.trainer.learner.mesh)
        if saved.state["devices"] != devices:
            text = f"devices have changed from {saved.state['devices']} to {devices}; sums may round differently"
            self.log.emit(Message(text))
        if not has_optimizer(saved.folder):
            text = "the checkpoint has no optimizer state (save_optimizer_state); it is initialized again"
            self.log.emit(Message(text, warning=True))

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
