"""The surroundings of a trainer's loop: its start, events, evaluations, checkpoints and end."""

import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import jax

from groupax.core.config import GRPOConfig, RunConfig, SFTConfig
from groupax.core.errors import DivergedError, PreemptedError, RewardError, RunError, is_out_of_memory
from groupax.core.storage.buckets import is_remote
from groupax.core.storage.replacing import ForeignFilesError, check_destination
from groupax.core.types import Row
from groupax.episodes.record import FOLDER as RECORDS
from groupax.events import Emit, EventStream, Message, PhaseStarted, RunDescribed, RunEnded, RunStarted
from groupax.models.weights.saving import source_folders
from groupax.parallel import processes
from groupax.parallel.memory import memory_in_use
from groupax.parallel.preemption import PreemptionHandler, RolloutCancelled
from groupax.parallel.runtime import compilation, configure_jax
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.runs.checkpoints.saver import RunSaver, remove_download
from groupax.runs.checkpoints.store import LocalStore
from groupax.runs.diagnostics import skipped_update
from groupax.runs.files import complete_run, free_name, stopping_unwritable
from groupax.runs.folder import RunFolder
from groupax.runs.header import begun_process
from groupax.runs.log import RunLog
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import primary_only, progress_named
from groupax.runs.trackers.tracker import check_trackers
from groupax.runs.trainer import Description, Trainer
from groupax.training.learner import Update
from groupax.training.state import TrainState

TRACEBACK = "Traceback (most recent call last)"
MAX_MESSAGE = 300  # characters of a message whose traceback has all of it
MAX_PART = 1000  # characters of a part of a traceback, whose last one is the message
MAX_TRACEBACK = 4000  # characters of its end that the run folder keeps

ConfigT = TypeVar("ConfigT", GRPOConfig, SFTConfig)


def with_absolute_paths(args: ConfigT) -> ConfigT:
    """Returns settings whose paths mean the same wherever a reward function changes the working directory to."""
    named = {name: getattr(args, name, None) for name in ("resume", "rollout_folder")}
    paths = {name: path for name, path in named.items() if path not in (None, "auto", "never") and not is_remote(path)}
    return replace(args, **{name: str(Path(path).expanduser().absolute()) for name, path in paths.items()})


class RunHooks:
    """Extension points of a run: the place and the time of checkpoints, the times of evaluations, the end.

    A subclass replaces some of them (see `Run.hooks`).
    """

    def checkpoints_in(self, folder: Path) -> LocalStore:
        """Returns the checkpoints of a run in a local run folder."""
        return LocalStore(folder / "checkpoints")

    def checkpoint_files(self, run: "Run") -> Callable[[Path], None] | None:
        """Returns what writes further files next to a checkpoint's folder, if any. All processes call this."""
        del run
        return None

    def started(self, run: "Run") -> None:
        """Is called when the run has started or resumed, before its first step."""

    def evaluation_is_due(self, run: "Run") -> bool:
        """Returns whether an evaluation of the present policy is due before the next step."""
        step, every = run.trainer.cursor.step, run.trainer.args.eval_steps
        return every > 0 and step % every == 0 and run.trainer.cursor.evaluated_step < step

    def save_if_due(self, run: "Run") -> None:
        """Writes a checkpoint if one is due before the next step."""
        run.saver.save_if_due()

    def end(self, run: "Run") -> None:
        """Saves what remains of the run after its last step."""
        run.save_end()

    def before_result(self, run: "Run") -> None:
        """Is called before the model is saved."""


class Run:
    """The surroundings of a trainer's loop: its start, events, evaluations, checkpoints and end.

    Attributes:
        hooks: Extension points, which may be replaced before the run starts.
        folder: The run folder.
        log: The log, while the run trains; so are `saver` and `stop`, the handler of requests to stop.
        train_seconds: Wall time of the loop with evaluations and checkpoints, without loading and saving the model,
            including that of earlier processes of the run.
    """

    log: RunLog
    saver: RunSaver
    stop: PreemptionHandler

    def __init__(self, trainer: Trainer, args: RunConfig, progress: Progress | None) -> None:
        configure_jax()
        self.trainer, self.hooks = trainer, RunHooks()
        self.progress = primary_only(progress or progress_named(args.progress_bar))
        self.progress.is_compiling = lambda: compilation().is_under_way
        self.events = EventStream(self.progress)
        self.emit: Emit = self.events.emit
        self.folder = self._open_folder(args)
        self._shared_records = Path(args.output_dir).expanduser().absolute() / RECORDS
        self.train_seconds = 0.0
        self._is_introduced = False
        self._identity: Identity | None = None
        self._state_before: TrainState | None = None  # while an update is under way

    def _open_folder(self, args: RunConfig) -> RunFolder:
        folder = args.output_dir
        if processes.is_primary():
            check_trackers(args.report_to)
        else:  # others write to a folder that nobody sees
            self._unseen = tempfile.TemporaryDirectory(prefix="groupax-process-")
            folder = self._unseen.name
        log_gb = args.rollout_log_gb if isinstance(args, GRPOConfig) else None
        return RunFolder(folder, None if log_gb is None else int(log_gb * 1e9))

    def records(self) -> Path | None:
        """Returns the folder where calls of tools are recorded; a bucket would only have them when it is too late."""
        if is_remote(self.trainer.args.output_dir):
            return None
        return self.folder.records if processes.is_primary() else self._shared_records

    # -- its start and end ---------------------------------------------------------------------------------------

    @contextmanager
    def training(self) -> Iterator[PreemptionHandler]:
        """Starts or resumes the run for the loop in the block, and ends it; saves its state if the loop fails."""
        with self.holding_folder():
            trainer = self.trainer
            mesh, several = trainer.start_model.mesh, processes.num_processes() > 1
            self.log = RunLog(
                trainer.args,
                self.folder,
                trainer.num_steps,
                self.events,
                trainer.listeners,
                memory=partial(memory_in_use, mesh) if trainer.args.track_memory else dict,
                diagnose=trainer.diagnose(),
            )
            self.stop = PreemptionHandler(processes.first_not_none if several else None, self._stopped_at_once)
            try:
                with self.progress, self.stop, trainer.working(self.stop):
                    self.introduce()
                    self._begin()
                    try:
                        yield self.stop
                    except RolloutCancelled:
                        self.saver.stop(self.stop.reason or "")
                    except Exception as error:
                        if several and not isinstance(error, (RewardError, DivergedError)):  # which all processes raise
                            processes.fail(error)
                        else:
                            self.saver.fail(self._is_whole)
                        raise
                    self.train_seconds = self.log.train_seconds
                    self.hooks.end(self)
                    self.folder.write_end(f"done after step {trainer.cursor.step}")
                    self.emit(RunEnded(trainer.cursor.step))
            except (Exception, KeyboardInterrupt, PreemptedError) as error:
                plans = self.described.plans.values() if is_out_of_memory(error) else ()
                self.folder.write_end(reason := _reason(error, trainer.cursor.step, plans))
                self.log.trackers.ended(reason)
                raise
            finally:
                self.log.close()

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Keeps other runs out of the run folder while the block runs; such blocks may be nested.

        Raises a LockedError if another run works in the folder.
        """
        is_taken = processes.run_on_primary(self.folder.lock)
        try:
            yield
        finally:
            if is_taken:
                self.folder.unlock()

    def _begin(self) -> None:
        """Resumes from the checkpoint that `resume` names, or starts."""
        trainer, hooks, folder = self.trainer, self.hooks, self.folder
        more = partial(hooks.checkpoint_files, self)
        self.saver = RunSaver(trainer, self.identity, self.log, hooks.checkpoints_in, more)
        metrics = folder.path / "metrics.jsonl"  # an earlier run may be moved aside, with its model
        processes.run_on_primary(lambda: metrics.exists() or self._check_destination())
        saved = self.saver.begin()
        folder.write_tokenizer(trainer.tokenizer, trainer.start_model.processor_folder)
        if saved is not None:
            trainer.restore(saved)
            self.log.resume(saved.state["log"], trainer.experience)
            remove_download(saved)
            if trainer.cursor.step >= trainer.num_steps:
                self.emit(Message(complete_run(folder.uri, trainer.num_steps)))
        processes.run_on_primary(self._check_destination)
        described = self.described
        folder.write_process(
            {
                **begun_process(trainer.start_model.mesh, saved),
                "num_steps": trainer.num_steps,
                "run": {**described.facts, **described.plans},
                "settings": trainer.args.to_dict(),
            }
        )
        self.emit(RunStarted(trainer.cursor.step, trainer.num_steps))
        if folder.moved_aside:
            self.emit(Message(f"the earlier run in {folder.uri} is now in {folder.moved_aside}"))
        for text in described.warnings:
            self.emit(Message(text, warning=True))
        self.log.diagnostics.report(trainer.cursor.step, described.findings)
        hooks.started(self)

    def _stopped_at_once(self, reason: str) -> None:
        """Records that a second signal ends the process before it could save the run's state."""
        step = self.trainer.cursor.step
        again = "started again as before, it continues from its newest checkpoint, or from its start if it has none"
        self.folder.write_end(
            f"stopped at once by a second signal ({reason}) after step {step}; {again}", uploads=False
        )

    def save_end(self) -> None:
        """Saves the last checkpoint, the model and the trackers' files, or raises a RunError."""
        self.log.close_sinks()
        self.emit(PhaseStarted("writing the model"))
        with stopping_unwritable(self.folder.uri):
            self.saver.end()
            self.save_result()
            processes.run_on_primary(lambda: (self.folder.settle(), self.folder.sync()))

    def save_result(self) -> None:
        """Saves the model in the run's `model/`, or next to it if somebody wrote into that during the run."""
        self.hooks.before_result(self)
        try:
            self.trainer.save_model()
        except ForeignFilesError as error:
            saved = self.trainer.save_model(free_name(self.folder.path / "model"))
            self.emit(Message(f"the model is in {saved}: {error}", warning=True))

    def _check_destination(self) -> None:
        check_destination(self.folder.path / "model", source_folders(self.trainer.start_model))

    @property
    def identity(self) -> Identity:
        """The identity of the run; the weights of before are only kept until it is known."""
        if self._identity is None:
            trainer = self.trainer
            self._identity = trainer.identity()
            if trainer.start_model.adapter is None:  # the learner has its own copies
                trainer.start_model = replace(trainer.start_model, params=trainer.learner.untrained)
        return self._identity

    def _is_whole(self) -> bool:
        """Returns whether cursor, rollout and learner belong together; they do not if an update failed half-way."""
        state = self._state_before
        leaves = jax.tree.leaves(state)
        return state is None or (state is self.trainer.learner.state and not any(leaf.is_deleted() for leaf in leaves))

    # -- around a step -------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Returns whether all steps are done, or a listener has asked for the end."""
        return self.trainer.cursor.step >= self.trainer.num_steps or any(processes.all_gather_object(self.log.ends))

    def evaluate_if_due(self) -> None:
        """Evaluates the present policy if the settings ask for it before the next step."""
        if not self.hooks.evaluation_is_due(self):
            return
        trainer = self.trainer
        with self.stop.cancellable():
            evaluation = trainer.evaluate()
        trainer.cursor = replace(trainer.cursor, evaluated_step=trainer.cursor.step)
        self.log.evaluation(trainer.cursor.step, evaluation)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Surrounds an update with what else changes in it; if it fails half-way, the state is not saved."""
        self._state_before = self.trainer.learner.state
        self.emit(PhaseStarted("updating"))
        yield
        self._state_before = None

    def stop_if_diverged(self, rows: Sequence[Row], update: Update, advice: str) -> None:
        """Reports an update that was skipped, and raises a DivergedError after `max_bad_steps` in a row."""
        cursor, folder = self.trainer.cursor, self.folder
        path = f"bad_steps/{processes.run_on_primary(lambda: folder.write_bad_batch(cursor.step, rows)).name}"
        found, diagnostics = skipped_update(cursor.step, update.metrics, folder.uri_of(path)), self.log.diagnostics
        if found.keys() <= diagnostics.reported:
            self.emit(Message(found["not_finite"], warning=True))
        diagnostics.report(cursor.step, found)
        if cursor.num_bad_steps < self.trainer.args.max_bad_steps:
            return
        with stopping_unwritable(folder.uri):
            self.save_result()
            processes.run_on_primary(folder.sync)
        saved, batches = processes.run_on_primary(lambda: [*map(folder.uri_of, ("model", "bad_steps"))])
        raise DivergedError(
            f"{cursor.num_bad_steps} updates in a row were not finite (max_bad_steps), the last one in step "
            f"{cursor.step}; the model as it was before them is in {saved}, their batches are in {batches}. {advice}"
        )

    # -- its introduction ------------------------------------------------------------------------------------------

    @cached_property
    def described(self) -> Description:
        """The facts, plans and findings that the trainer has of the run."""
        return self.trainer.describe()

    def introduce(self) -> None:
        """Emits the facts of the run once."""
        if self._is_introduced:
            return
        self._is_introduced = True
        facts = {**self.described.facts, **self.described.plans, "to watch it": f"groupax view {self.folder.uri}"}
        self.emit(RunDescribed(self.trainer.num_steps, facts))


def _reason(error: BaseException, step: int, plans: Iterable[str]) -> str:
    """Returns why a run has ended after a step: in its first line with plans, and below that the traceback."""
    if isinstance(error, PreemptedError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    rest, last = "\n".join(lines[1:]), lines[-1]
    if TRACEBACK in rest:  # of the user's code, below which the exception is, and then advice
        last = next((line for line in lines[1:] if not line.startswith((" ", TRACEBACK))), last)
    elif not isinstance(error, RunError):
        parts = traceback.format_exception(error)
        rest = "".join(part if len(part) < MAX_PART else f"{part[:MAX_PART]}...\n" for part in parts).strip()
    first = " ".join(lines if len(lines) == 1 else (lines[0], last))
    after = f"after step {step}" if step else "before its first step was complete"
    first = f"{first[:MAX_MESSAGE]}…" if rest and len(first) > MAX_MESSAGE else first
    first = f"failed {after}: {type(error).__name__}: {'; planned: '.join([first, *plans])}"
    return f"{first}\n{rest[-MAX_TRACEBACK:]}" if rest else first
