"""TRL's layout of an output folder: `checkpoint-N/` are models, and groupax's own records are in `groupax/`.

out/                     the model, once `save_model` is called
out/checkpoint-N/        a model with its tokenizer, and trainer_state.json
out/checkpoint-N/groupax what a run continues from (see `runs.checkpoints.record`)
out/groupax/             the run folder (see `runs.folder`), which `groupax view` and `groupax report` show
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupax.compat.callbacks import Control, State
from groupax.core.storage.buckets import is_remote
from groupax.core.storage.folders import list_names
from groupax.core.storage.replacing import foreign_model_files
from groupax.core.types import Metrics
from groupax.events import Message
from groupax.parallel import processes
from groupax.runs.checkpoints.record import restore_params
from groupax.runs.checkpoints.store import HF, LocalStore
from groupax.runs.files import free_name
from groupax.runs.run import Run, RunHooks
from groupax.trainer import GRPOTrainer

TRAINER_STATE = "trainer_state.json"


@dataclass
class TRLFolders(RunHooks):
    """Saves checkpoints in the layout of transformers' trainer, and evaluates and saves when callbacks ask for it.

    Attributes:
        output_dir: Folder of the checkpoints.
        state: Progress of the run, written to each checkpoint.
        revise: Revises a line of the log, of a step.
        control: Requests of callbacks, which are taken back when they are met.
        loads_best: Whether the policy becomes that of the best checkpoint at the end.
    """

    output_dir: Path
    state: State
    revise: Callable[[int, Metrics], Metrics]
    control: Control = field(default_factory=Control)
    loads_best: bool = False
    is_at_end: bool = field(default=False, init=False)

    @property
    def store(self) -> LocalStore:
        """The checkpoints."""
        return LocalStore(self.output_dir, HF)

    def checkpoints_in(self, folder: Path) -> LocalStore:
        """Returns the checkpoints of the run, which do not depend on its folder."""
        del folder
        return self.store

    def checkpoint_files(self, run: Run) -> Callable[[Path], None]:
        """Returns what writes the model and `trainer_state.json` of a checkpoint."""
        trainer = run.trainer
        model = trainer.model_to_write()

        def write(folder: Path) -> None:
            written = trainer.write_model(model, folder.parent / ".model")
            for entry in written.iterdir():
                entry.rename(folder.parent / entry.name)
            written.rmdir()
            if self.state.best_global_step == trainer.cursor.step:
                self.state.best_model_checkpoint = str(self.output_dir / HF.name_of(trainer.cursor.step))
            self.state.save_to_json(folder.parent / TRAINER_STATE)

        return write

    def started(self, run: Run) -> None:
        """Moves the checkpoints of an earlier run to its records if this one starts afresh."""
        run.log.revise = self.revise
        if run.folder.moved_aside or not run.trainer.cursor.step:
            processes.run_on_primary(lambda: self._move_checkpoints_aside(run))

    def _move_checkpoints_aside(self, run: Run) -> None:
        store = self.store
        if not store.steps():
            return
        place = Path(run.folder.moved_aside or free_name(run.folder.path))
        place.mkdir(exist_ok=True)
        for step in store.steps():
            Path(store.where(step)).rename(place / HF.name_of(step))
        run.emit(Message(f"the earlier checkpoints in {self.output_dir} are now in {place}"))

    def save_if_due(self, run: Run) -> None:
        """Saves as natively and at the request of callbacks, which see the checkpoint with the policy of its step."""
        if self.control.take("should_save"):
            run.saver.save_if(due=True)
        else:
            run.saver.save_if_due()
        run.saver.writer.wait()

    def evaluation_is_due(self, run: Run) -> bool:
        """Returns whether an interval ends, or a callback has asked."""
        return self.control.take("should_evaluate") or super().evaluation_is_due(run)

    def end(self, run: Run) -> None:
        """Saves what remains of the run."""
        self.is_at_end = True
        run.save_end()

    def before_result(self, run: Run) -> None:
        """Makes the policy that of the best checkpoint, if the settings ask for it."""
        trainer, step = run.trainer, self.state.best_global_step
        if self.loads_best and self.is_at_end and step in self.store.steps():
            restore_params(trainer.learner, self.store.local(step))
            if isinstance(trainer, GRPOTrainer):
                trainer.engine.params = trainer.learner.policy
            run.emit(Message(f"the policy is now that of the best checkpoint, {self.store.where(step)}"))


def check_output_dir(output_dir: Any) -> None:
    """Checks that a model and checkpoints can be written to an output folder without overwriting others.

    Raises:
        ValueError: There are files of another program, or it is a bucket.
    """
    if is_remote(str(output_dir)):
        raise ValueError(
            f"output_dir {output_dir} is a bucket, and TRL's layout needs a local folder; groupax.GRPOTrainer and "
            "groupax.SFTTrainer take buckets"
        )
    folder = Path(output_dir).expanduser()
    if not folder.is_dir():
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


def checkpoint_to_resume(resume: bool | str | Path, output_dir: Path) -> str:
    """Returns the checkpoint that `resume_from_checkpoint` names: a path, or True for the newest one.

    Raises:
        ValueError: There is none, or another program wrote it.
    """
    if not isinstance(resume, bool):
        folder = Path(resume).expanduser()
        if (folder / TRAINER_STATE).is_file() and not (folder / HF.inside).is_dir():
            raise ValueError(
                f"{resume} is a checkpoint that groupax did not write, or without its folder {HF.inside}/, and a run "
                "cannot continue from it; pass it as model to start a new run from its weights"
            )
        return str(resume)
    store = LocalStore(output_dir, HF)
    if not store.steps():
        raise ValueError(f"resume_from_checkpoint=True: {output_dir} has no checkpoint; start without it, or name one")
    return store.where(store.steps()[-1])
