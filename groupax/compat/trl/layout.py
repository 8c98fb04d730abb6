"""TRL's layout of an output folder: `checkpoint-N/` are models, and groupax's own records are in `groupax/`.

out/                     the model, once `save_model` is called
out/checkpoint-N/        a model with its tokenizer, and trainer_state.json
out/checkpoint-N/groupax what a run continues from (see `runs.checkpoints.record`)
out/groupax/             the run folder (see `runs.folder`), which `groupax view` and `groupax report` show
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.compat.callbacks import State
from groupax.events import Message
from groupax.parallel import processes
from groupax.parallel.preemption import PreemptionHandler
from groupax.parallel.transfer import to_host_on_primary
from groupax.runs.checkpoints.record import restore_params
from groupax.runs.checkpoints.saver import RunSaver
from groupax.runs.checkpoints.store import HF, LocalStore
from groupax.runs.files import free_name
from groupax.runs.log import RunLog
from groupax.runs.run import Run
from groupax.storage.buckets import is_remote
from groupax.storage.folders import list_names
from groupax.storage.replacing import foreign_model_files

TRAINER_STATE = "trainer_state.json"


@dataclass
class Saving:
    """When checkpoints are saved and which of them are kept, as transformers' trainer does.

    Attributes:
        output_dir: Folder of the checkpoints.
        state: Progress of the run, written to each checkpoint.
        only_best: Whether to save at evaluations that are the best so far, instead of at intervals.
        limit: Number of checkpoints to keep, of which the best is one; None for all.
        loads_best: Whether the policy becomes that of the best checkpoint at the end.
    """

    output_dir: Path
    state: State
    only_best: bool = False
    limit: int | None = None
    loads_best: bool = False

    @property
    def store(self) -> LocalStore:
        """The checkpoints."""
        return LocalStore(self.output_dir, HF)

    def note_best(self, step: int) -> None:
        """Notes the folder of the best evaluation's checkpoint, if it exists or is that of the present step."""
        best = self.state.best_global_step
        if best is not None and (best == step or best in self.store.steps()):
            self.state.best_model_checkpoint = str(self.output_dir / HF.name_of(best))

    def rotate(self, limit: int | None) -> None:
        """Deletes the oldest checkpoints beyond the limit, but not the newest and the best."""
        steps = self.store.steps()
        if not limit or len(steps) <= limit:
            return
        best = self.state.best_global_step if self.state.best_model_checkpoint else None
        kept = {steps[-1], best} & set(steps)
        num_surplus = len(steps) - max(limit, len(kept))
        for step in [step for step in steps if step not in kept][:num_surplus]:
            self.store.delete(step)


class TRLFolders(Run):
    """A native run whose checkpoints have TRL's layout if `saving` says how."""

    saving: Saving | None = None
    _is_at_end = False

    def checkpoints_in(self, folder: Path) -> LocalStore:
        """Returns the checkpoints of the run, which do not depend on its folder."""
        return super().checkpoints_in(folder) if self.saving is None else self.saving.store

    def checkpoint_files(self) -> Callable[[Path], None] | None:
        """Returns what writes the model and `trainer_state.json` of a checkpoint."""
        saving = self.saving
        if saving is None:
            return None
        params = self.learner.state.params
        params = to_host_on_primary(params) if processes.num_processes() > 1 else params

        def write(folder: Path) -> None:
            model = self._write_model(params, folder.parent / ".model")
            for entry in model.iterdir():
                entry.rename(folder.parent / entry.name)
            model.rmdir()
            saving.note_best(self.cursor.step)
            (folder.parent / TRAINER_STATE).write_text(saving.state.to_json(), encoding="utf-8")

        return write

    def _begin(self, log: RunLog) -> RunSaver:
        saver = super()._begin(log)
        if self.saving is not None and (self.run_folder.moved_aside or not self.cursor.step):
            processes.run_on_primary(self._move_checkpoints_aside)
        return saver

    def _move_checkpoints_aside(self) -> None:
        """Moves the checkpoints of an earlier run to its records."""
        assert self.saving is not None, "the run has TRL's layout"
        store = self.saving.store
        if not store.steps():
            return
        place = Path(self.run_folder.moved_aside or free_name(self.run_folder.path))
        place.mkdir(exist_ok=True)
        for step in store.steps():
            Path(store.where(step)).rename(place / HF.name_of(step))
        self.emit(Message(f"the earlier checkpoints in {self.saving.output_dir} are now in {place}"))

    def _save_if_due(self, saver: RunSaver) -> None:
        saving, step = self.saving, self.cursor.step
        if saving is None:
            saver.save_if_due(self.cursor, self.experience)
            return
        is_best = self.cursor.evaluated_step == step == saving.state.best_global_step
        due = saver.writer.due(step) or (saving.only_best and is_best and saver.writer.last_step != step)
        saver.save_if(due, self.cursor, self.experience)
        saver.writer.wait()  # callbacks see the checkpoint and the policy of the same step
        processes.run_on_primary(lambda: saving.rotate(saving.limit))

    def _end(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        self._is_at_end = True
        super()._end(log, saver, stop)
        saving = self.saving
        if saving is not None:
            one = 1 if saving.limit == 1 and saving.state.best_model_checkpoint else None
            processes.run_on_primary(lambda: saving.rotate(one or saving.limit))

    def _save_result(self) -> None:
        saving = self.saving
        if saving is not None and saving.loads_best and self._is_at_end and saving.state.best_model_checkpoint:
            step = saving.state.best_global_step
            assert step is not None, "the best checkpoint has one"
            restore_params(self.learner, saving.store.local(step))
            self.engine.params = self.learner.policy
            self.emit(Message(f"the policy is now that of the best checkpoint, {saving.store.where(step)}"))
        super()._save_result()


def run_folder(output_dir: str) -> str:
    """Returns the run folder in an output folder; a bucket is a run folder itself."""
    return output_dir if is_remote(output_dir) else str(Path(output_dir) / HF.inside)


def check_output_dir(output_dir: Any) -> None:
    """Checks that a model and checkpoints can be written to an output folder without overwriting others.

    Raises:
        ValueError: There are files of another program.
    """
    folder = Path(output_dir).expanduser()
    if is_remote(str(output_dir)) or not folder.is_dir():
        return
    foreign = foreign_model_files(folder)
    foreign += [
        entry.name
        for entry in folder.iterdir()
        if HF.step_of(entry.name) is not None and not (entry / HF.inside).is_dir()
    ]
    if foreign:
        raise ValueError(
            f"output_dir {output_dir} has {list_names(foreign)}, which groupax did not write and never overwrites; "
            "choose another output_dir"
        )


def checkpoint_to_resume(resume: bool | str | Path, output_dir: str) -> str:
    """Returns the checkpoint that `resume_from_checkpoint` names: a path, or True for the newest one.

    Raises:
        ValueError: There is none, or another program wrote it.
    """
    if resume is not True:
        folder = Path(resume).expanduser()
        if (folder / TRAINER_STATE).is_file() and not (folder / HF.inside).is_dir():
            raise ValueError(
                f"{resume} is a checkpoint that groupax did not write, or without its folder {HF.inside}/, and a run "
                "cannot continue from it; pass it as model to start a new run from its weights"
            )
        return str(resume)
    if is_remote(output_dir):
        return "auto"
    store = LocalStore(Path(output_dir).expanduser(), HF)
    if not store.steps():
        raise ValueError(f"resume_from_checkpoint=True: {output_dir} has no checkpoint; start without it, or name one")
    return store.where(store.steps()[-1])
