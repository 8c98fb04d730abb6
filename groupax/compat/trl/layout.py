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
    """Evaluates and saves when transformers' trainer does, in its layout of folders.

    Attributes:
        output_dir: Folder of the checkpoints.
        state: Progress of the run, written to each checkpoint.
        control: Requests of callbacks, which are taken back when they are met.
        only_best: Whether to save at evaluations that are the best so far, instead of at intervals.
        limit: Number of checkpoints to keep, of which the best is one; None for all.
        loads_best: Whether the policy becomes that of the best checkpoint at the end.
        has_eval_sets: Whether there are evaluation sets.
    """

    output_dir: Path
    state: State
    control: Control = field(default_factory=Control)
    only_best: bool = False
    limit: int | None = None
    loads_best: bool = False
    has_eval_sets: bool = True
    is_at_end: bool = field(default=False, init=False)

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

    def checkpoints_in(self, folder: Path) -> LocalStore:
        """Returns the checkpoints of the run, which do not depend on its folder."""
        del folder
        return self.store

    def checkpoint_files(self, run: Run) -> Callable[[Path], None]:
        """Returns what writes the model and `trainer_state.json` of a checkpoint."""
        trainer = run.trainer
        params = trainer.host_params()

        def write(folder: Path) -> None:
            model = trainer.write_model(params, folder.parent / ".model")
            for entry in model.iterdir():
                entry.rename(folder.parent / entry.name)
            model.rmdir()
            self.note_best(trainer.cursor.step)
            self.state.save_to_json(folder.parent / TRAINER_STATE)

        return write

    def started(self, run: Run) -> None:
        """Moves the checkpoints of an earlier run to its records if this one starts afresh."""
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
        """Saves at intervals, at callbacks' request, or at the best evaluation so far."""
        cursor, writer = run.trainer.cursor, run.saver.writer
        step = cursor.step
        is_best = cursor.evaluated_step == step == self.state.best_global_step
        writer.look()
        due = (
            writer.due(step)
            or self.control.take("should_save")
            or (self.only_best and is_best and writer.last_step != step)
        )
        run.saver.save_if(due)
        writer.wait()  # callbacks see the checkpoint and the policy of the same step
        processes.run_on_primary(lambda: self.rotate(self.limit))

    def evaluation_is_due(self, run: Run) -> bool:
        """Returns whether an interval ends, or a callback has asked."""
        step, every = run.trainer.cursor.step, run.trainer.args.eval_steps
        if run.trainer.cursor.evaluated_step >= step or not self.has_eval_sets:
            return False
        is_timely = every > 0 and (step % every == 0 or step == run.trainer.num_steps)  # the last epoch may be short
        return self.control.take("should_evaluate") or is_timely

    def end(self, run: Run) -> None:
        """Saves what remains of the run, and deletes checkpoints beyond the limit."""
        self.is_at_end = True
        run.save_end()
        one = 1 if self.limit == 1 and self.state.best_model_checkpoint else None
        processes.run_on_primary(lambda: self.rotate(one or self.limit))

    def before_result(self, run: Run) -> None:
        """Makes the policy that of the best checkpoint, if the settings ask for it."""
        trainer = run.trainer
        if self.loads_best and self.is_at_end and self.state.best_model_checkpoint:
            step = self.state.best_global_step
            assert step is not None, "the best checkpoint has one"
            restore_params(trainer.learner, self.store.local(step))
            if isinstance(trainer, GRPOTrainer):
                trainer.engine.params = trainer.learner.policy
            run.emit(Message(f"the policy is now that of the best checkpoint, {self.store.where(step)}"))


def run_folder(output_dir: str) -> str:
    """Returns the run folder in an output folder; a bucket is a run folder itself."""
    return output_dir if is_remote(output_dir) else str(Path(output_dir) / HF.inside)


def folders_of(args: Any, output_dir: str, state: State) -> TRLFolders | None:
    """Returns when a run with TRL's settings evaluates and saves; None if its output folder is in a bucket.

    Raises:
        ValueError: The settings ask for the best checkpoint in a bucket.
    """
    only_best = getattr(args.save_strategy, "value", args.save_strategy) == "best"
    if is_remote(output_dir):
        if only_best or args.load_best_model_at_end:
            raise ValueError(
                f"output_dir {output_dir} is a bucket, in which checkpoints are a run's own; save_strategy 'best' and "
                "load_best_model_at_end need a local folder"
            )
        return None
    return TRLFolders(
        Path(output_dir).expanduser(),
        state,
        only_best=only_best,
        limit=args.save_total_limit,
        loads_best=args.load_best_model_at_end,
    )


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
    if not isinstance(resume, bool):
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
