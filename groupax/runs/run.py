"""A run: its model and parts, its loop's surroundings, and what is written of it."""

import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from groupax.config import GRPOConfig, SFTConfig
from groupax.errors import DivergedError, RewardError
from groupax.events import EventStream, Listener, Message, PhaseStarted, RunDescribed, RunEnded, RunStarted
from groupax.models.adapted import apply_adapter
from groupax.models.lora import LoRAConfig, count_params, trainable_params_line
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model, add_adapter
from groupax.models.weights.saving import save_adapter, save_model, source_folders
from groupax.parallel import processes
from groupax.parallel.collectives import to_host_on_primary
from groupax.parallel.memory import memory_in_use
from groupax.parallel.preemption import PreemptionHandler, RolloutCancelled
from groupax.parallel.runtime import compilation, configure_jax
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.adapters import adapter_models, result_folders, save_adapters
from groupax.runs.build import check_adapter, model_for
from groupax.runs.checkpoints.choose import Saved, complete_identity
from groupax.runs.checkpoints.fingerprint import Identity, differences
from groupax.runs.checkpoints.record import stored_dtype
from groupax.runs.checkpoints.saver import RunSaver, retry_while_disk_full
from groupax.runs.checkpoints.store import LocalStore
from groupax.runs.diagnostics import Diagnose
from groupax.runs.files import complete_run, free_name
from groupax.runs.folder import RunFolder
from groupax.runs.guards import report_skipped_update
from groupax.runs.log import Evaluation, RunLog
from groupax.runs.model_card import shown_name
from groupax.runs.process import begun_process
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import primary_only, progress_named
from groupax.runs.trackers.tracker import check_trackers
from groupax.storage.buckets import is_remote
from groupax.storage.hub import push_folder
from groupax.storage.replacing import ForeignFilesError, check_destination, replace_card
from groupax.training.adapters import AdapterLearners, PolicyLearner
from groupax.training.learner import Learner, LearnerSettings, Update
from groupax.training.state import TrainState
from groupax.types import Metrics, Row

ConfigT = TypeVar("ConfigT", GRPOConfig, SFTConfig)


def _with_absolute_paths(args: ConfigT) -> ConfigT:
    """Returns settings whose paths mean the same wherever a reward function changes the working directory to."""
    named = {name: getattr(args, name, None) for name in ("resume", "rollout_folder")}
    paths = {name: path for name, path in named.items() if path not in (None, "auto", "never") and not is_remote(path)}
    return replace(args, **{name: str(Path(path).expanduser().absolute()) for name, path in paths.items()})


class Run(Generic[ConfigT]):
    """The parts that every run has: a model, a tokenizer, a learner, a folder, its start, its end and its results.

    A trainer derives from it, sets what is listed below, and adds the loop.

    Args:
        args: Settings.
        listeners: Called with every event of the run; one that returns True ends the run.
        progress: Display of the run; None takes the one that `progress_bar` names.

    Attributes:
        tokenizer: Tokenizer of the model.
        learner: The policy under training.
        num_steps: Number of optimizer steps of the run.
        cursor: Progress of the run.
        experience: The rollout that is not used up, if there are rollouts.
        dataset_name: Source of what the run trains on (see `header.data_name`).
        last_metrics: Metrics of the last logged step.
        train_seconds: Wall time of the loop with evaluations and checkpoints, without loading and saving the model,
            including that of earlier processes of the run.
    """

    tokenizer: Any
    learner: PolicyLearner
    num_steps: int
    dataset_name: str
    DIVERGED = "Lower learning_rate, or look at these batches"  # advice

    def __init__(self, args: ConfigT, listeners: Sequence[Listener] = (), progress: Progress | None = None) -> None:
        self.args: ConfigT = _with_absolute_paths(args)
        configure_jax()
        self.progress = primary_only(progress or progress_named(args.progress_bar))
        self.progress.is_compiling = lambda: compilation().is_under_way
        self.listeners, self.events = listeners, EventStream(self.progress)
        self.emit = self.events.emit
        self._is_introduced = self._is_reported_complete = False
        self._identity: Identity | None = None
        self.cursor = Cursor()
        self.experience: Experience | None = None
        self._state_before: TrainState | None = None  # while an update is under way
        self.last_metrics: Metrics = {}
        self.train_seconds = 0.0

    def __repr__(self) -> str:
        """Returns the model, the progress and the folder in one line; fields that are not created yet are left out."""
        own = vars(self)
        parts = [shown_name(own["_model"].name)] if "_model" in own else []
        parts += [f"step {self.cursor.step:,} of {self.num_steps:,}"] if "num_steps" in own else []
        parts += [self.run_folder.uri] if "run_folder" in own else []
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    # -- what the trainers differ in -----------------------------------------------------------------------------

    @abstractmethod
    def _loop(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        """Takes the remaining optimizer steps."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluates the present policy on held-out data."""

    @abstractmethod
    def _describe(self) -> Identity:
        """Returns everything that a resumed run must have in common with this one."""

    @abstractmethod
    def _restore(self, saved: Saved, log: RunLog) -> None:
        """Continues from a checkpoint, after the learner did."""

    @property
    @abstractmethod
    def _facts(self) -> dict[str, str]:
        """Facts of the run by label."""

    @property
    @abstractmethod
    def _plans(self) -> dict[str, str]:
        """The memory that the run plans to use, by label."""

    @property
    def _expectations(self) -> dict[str, str]:
        """Expectations of the run by label, which are shown at its start and not recorded."""
        return {}

    @abstractmethod
    def _card(self) -> str:
        """Returns the card of the model."""

    @abstractmethod
    def _report_setup(self, log: RunLog) -> None:
        """Reports what the user should know before the first step."""

    @property
    @abstractmethod
    def _diagnose(self) -> Diagnose:
        """Finds what is wrong with the run in its metrics."""

    def _working(self, stop: PreemptionHandler) -> AbstractContextManager[object]:
        """Starts what only runs during training, and stops it at the end."""
        del stop
        return nullcontext()

    def _policies(self, cursor: Cursor) -> Mapping[int, Policy]:
        """Returns earlier policies that a checkpoint has to keep."""
        del cursor
        return {}

    # -- its parts -----------------------------------------------------------------------------------------------

    def _open_folder(self, log_bytes: int | None = None) -> None:
        if processes.is_primary():
            check_trackers(self.args.report_to)
        # other processes than the primary one write to a folder that nobody sees
        self._unseen: Any = None if processes.is_primary() else tempfile.TemporaryDirectory(prefix="groupax-process-")
        folder = self._unseen.name if self._unseen else self.args.output_dir
        self.run_folder = RunFolder(folder, log_bytes, self.emit)

    def _load_model(self, model: str | Path | Model, lora: LoRAConfig | None) -> None:
        self._model = model_for(self.args, model)
        if lora is not None:
            self._model = add_adapter(self._model, lora, self.args.seed)
        check_adapter(self.args, self._model, was_loaded=not isinstance(model, Model))
        if self._model.config.num_labels:
            raise ValueError(f"{self._model.source or 'the model'} classifies sequences; a policy needs a causal model")

    @property
    def _adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters that are trained together; empty for a run that trains one policy."""
        return self.args.adapters if isinstance(self.args, GRPOConfig) else ()

    def _make_learner(self, settings: LearnerSettings, longest: tuple[int, int]) -> None:
        given, names = (settings, self.num_steps, longest), self._adapter_names
        self.learner = AdapterLearners(self._model, names, *given) if names else Learner(self._model, *given)
        if self._model.adapter is not None and self.learner.frozen is not None:
            adapter = replace(self._model.adapter, frozen=self.learner.frozen)  # frees those loaded in another dtype
            self._model = replace(self._model, params=apply_adapter(adapter.frozen, adapter.trained), adapter=adapter)

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self) -> RunLog:
        """Runs the loop between the start and the end of the run; returns its log."""
        memory = partial(memory_in_use, self._model.mesh) if self.args.track_memory else dict
        given = self.args, self.run_folder, self.num_steps, self.events, self.listeners
        log = RunLog(*given, memory, self._diagnose)
        try:
            watch = self._model.mesh.devices.flat[0].platform == "tpu"
            several = processes.num_processes() > 1
            with (
                self.progress,
                PreemptionHandler(watch, processes.first_not_none if several else None) as stop,
                self._working(stop),
            ):
                self._introduce()
                saver = self._begin(log)
                try:
                    self._loop(log, saver, stop)
                except RolloutCancelled:
                    saver.stop(*self._settled(log), stop.reason or "")
                except Exception as error:
                    if several and not isinstance(error, (RewardError, DivergedError)):  # which all processes raise
                        processes.fail(error)
                    else:
                        saver.fail(*self._settled(log), self._is_whole)
                    raise
                self.train_seconds = log.train_seconds
                self._end(log, saver, stop)
                self.emit(RunEnded(self.cursor.step))
        finally:
            log.close()
        return log

    def _save_if_due(self, saver: RunSaver) -> None:
        saver.save_if_due(self.cursor, self.experience)

    def _is_over(self, log: RunLog) -> bool:
        return self.cursor.step >= self.num_steps or any(processes.all_gather_object(log.ends))

    @property
    def _evaluation_is_due(self) -> bool:
        step, every = self.cursor.step, self.args.eval_steps
        return every > 0 and step % every == 0 and self.cursor.evaluated_step < step

    def _evaluate_if_due(self, log: RunLog, stop: PreemptionHandler) -> None:
        if not self._evaluation_is_due:
            return
        with stop.cancellable():
            evaluation = self.evaluate()
        self.cursor = replace(self.cursor, evaluated_step=self.cursor.step)
        log.evaluation(self.cursor.step, evaluation)

    def _stop_if_diverged(self, stop: PreemptionHandler, rows: Sequence[Row], update: Update) -> None:
        """Reports an update that was skipped, and ends the run after `max_bad_steps` in a row."""
        if update.applied:
            return
        report_skipped_update(self.cursor.step, update, rows, self.run_folder, self.emit)
        if self.cursor.num_bad_steps < self.args.max_bad_steps:
            return
        self._save_result()
        retry_while_disk_full(lambda: processes.run_on_primary(self.run_folder.sync), self.run_folder, self.emit, stop)
        folder, batches = processes.run_on_primary(lambda: [*map(self.run_folder.uri_of, ("model", "bad_steps"))])
        raise DivergedError(
            f"{self.cursor.num_bad_steps} updates in a row were not finite (max_bad_steps), the last one in step "
            f"{self.cursor.step}; the model as it was before them is in {folder}, their batches are in "
            f"{batches}. {self.DIVERGED}"
        )

    # -- its start and end ---------------------------------------------------------------------------------------

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Keeps other runs out of the run folder while the block runs; such blocks may be nested.

        Raises:
            LockedError: another run works in it.
        """
        is_taken = processes.run_on_primary(self.run_folder.lock)
        try:
            yield
        finally:
            if is_taken:
                self.run_folder.unlock()

    def checkpoints_in(self, folder: Path) -> LocalStore:
        """Returns the checkpoints of the run in a local run folder."""
        return LocalStore(folder / "checkpoints")

    def checkpoint_files(self) -> Callable[[Path], None] | None:
        """Returns what writes further files next to a checkpoint's folder, if any. All processes call this."""
        return None

    def _begin(self, log: RunLog) -> RunSaver:
        """Resumes from the checkpoint that `resume` names, or starts."""
        parts = self._own_identity(), self._model, self.run_folder, self.learner, log, self._policies
        saver = RunSaver(self.args, *parts, self.checkpoints_in, self.checkpoint_files)
        model_folder = self.run_folder.path / "model"
        metrics = self.run_folder.path / "metrics.jsonl"  # an earlier run may be moved aside, with its model
        processes.run_on_primary(lambda: metrics.exists() or self._check_destination(model_folder))
        saved = saver.begin()
        self.run_folder.write_tokenizer(self.tokenizer, self._model.processor_folder)
        if saved is not None:
            self._restore(saved, log)
            if self.cursor.step >= self.num_steps:
                self._report_complete_run()
        processes.run_on_primary(lambda: self._check_destination(model_folder))
        facts = {"num_steps": self.num_steps, "run": self._facts | self._plans, "settings": self.args.to_dict()}
        self.run_folder.write_process({**begun_process(self._model.mesh, saved), **facts})
        self.emit(RunStarted(self.cursor.step, self.num_steps))
        if self.run_folder.moved_aside:
            self.emit(Message(f"the earlier run in {self.run_folder.uri} is now in {self.run_folder.moved_aside}"))
        self._report_setup(log)
        return saver

    def _check_destination(self, folder: Path) -> None:
        for each in result_folders(folder, self._adapter_names):
            check_destination(each, source_folders(self._model))

    def _own_identity(self) -> Identity:
        """Returns the identity of the run; the weights of before are only kept until it is known."""
        if self._identity is None:
            self._identity = self._describe()
            if self._model.adapter is None:  # the learner has its own copies
                self._model = replace(self._model, params=self.learner.untrained)
        return self._identity

    def _will_resume_complete(self) -> bool:
        """Returns whether the run folder has this run with all its steps. A bucket is not searched for it."""
        if self.args.resume != "auto" or self.run_folder.remote is not None:
            return False
        store = self.checkpoints_in(self.run_folder.path)
        found = processes.run_on_primary(lambda: complete_identity(store, self.num_steps))
        return found is not None and not differences(found, self._own_identity())

    def _report_complete_run(self) -> None:
        """Reports once that the run is complete."""
        if not self._is_reported_complete:
            self._is_reported_complete = True
            self.emit(Message(complete_run(self.run_folder.uri, self.num_steps)))

    def _end(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        """Saves the last checkpoint, the model and the trackers' files; waits as long as the disk is full."""

        def save() -> None:
            self.emit(PhaseStarted("writing the model"))
            processes.run_on_primary(self.run_folder.flush)
            saver.end(*self._settled(log))
            self._save_result()
            processes.run_on_primary(lambda: (self.run_folder.settle(), self.run_folder.sync()))

        log.close_sinks()
        retry_while_disk_full(save, self.run_folder, self.emit, stop)

    def _save_result(self) -> None:
        """Saves the model in the run's `model/`, or next to it if somebody wrote into that during the run."""
        try:
            self.save_model()
        except ForeignFilesError as error:
            saved = self.save_model(free_name(self.run_folder.path / "model"))
            self.emit(Message(f"the model is in {saved}: {error}", warning=True))

    def _settled(self, log: RunLog) -> tuple[Cursor, Experience | None]:
        """Returns the state of the run that a checkpoint saves."""
        del log
        return self.cursor, self.experience

    @property
    def _is_whole(self) -> bool:
        """Returns whether cursor, rollout and learner belong together; they do not if an update failed half-way."""
        state = self._state_before
        leaves = jax.tree.leaves(state)
        return state is None or (state is self.learner.state and not any(leaf.is_deleted() for leaf in leaves))

    # -- its results -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The present policy.

        Raises:
            ValueError: the run trains several adapters (see `adapters`).
        """
        if self._adapter_names:
            raise ValueError(
                f"this run has a policy for each of its adapters: use adapters[{self._adapter_names[0]!r}]"
            )
        adapter = self._model.adapter and replace(self._model.adapter, trained=self.learner.state.params)
        return replace(self._model, params=self.learner.policy, adapter=adapter)

    @property
    def adapters(self) -> dict[str, Model]:
        """The present policies of a run that trains several adapters, by their names; empty for other runs."""
        if not self._adapter_names:
            return {}
        return adapter_models(self._model, self.learner.state.params)

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Saves the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype.

        If an adapter is trained, only the adapter is saved, in PEFT's format; each of several ones in a folder of its
        name. All processes must call this; the primary one writes.
        """
        params = self.learner.state.params
        params = to_host_on_primary(params) if processes.num_processes() > 1 else params
        return processes.run_on_primary(
            lambda: self._write_model(params, Path(folder or self.run_folder.path / "model"))
        )

    def _write_model(self, params: Params, folder: Path) -> Path:
        if self._adapter_names:
            return save_adapters(self._model, params, folder, self.tokenizer, self._card())
        if self._model.adapter is not None:
            adapter = replace(self._model.adapter, trained=params)
            return save_adapter(replace(self._model, adapter=adapter), folder, self.tokenizer, self._card())
        trained = replace(self._model, params={**self.learner.untrained, **params})
        return save_model(trained, folder, self.tokenizer, jnp.dtype(stored_dtype(self._model)), card=self._card())

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Saves the current policy in the run's `model/`, uploads it, and returns its address (see `hub.push_folder`).

        Args:
            repo_id: "owner/name".
            private: Whether a new repository is private.

        Raises:
            ValueError: the run trains several adapters, each of which is pushed by itself (`groupax push`).
        """
        if self._adapter_names:
            raise ValueError("push each adapter by itself: groupax push RUN/model/NAME OWNER/REPOSITORY")
        folder = self.save_model()
        return processes.run_on_primary(lambda: push_folder(folder, repo_id, private))

    def write_card(self) -> None:
        """Rewrites the card of the run's `model/` with the evaluations since it was saved."""
        for folder in result_folders(self.run_folder.path / "model", self._adapter_names):
            processes.run_on_primary(partial(replace_card, folder, self._card()))

    def print_trainable_parameters(self) -> None:
        """Prints the number of trained parameters in PEFT's format."""
        adapter = self._model.adapter
        print(trainable_params_line(*count_params(self._model.config, adapter and adapter.config)))

    def _introduce(self) -> None:
        """Emits the facts of the run once; of a complete run first that it is, and then no plans."""
        if self._is_introduced:
            return
        self._is_introduced = True
        facts = self._facts
        if self._will_resume_complete():
            self._report_complete_run()
        else:
            facts |= self._plans | self._expectations
        self.emit(RunDescribed(self.num_steps, facts | {"to watch it": f"groupax view {self.run_folder.uri}"}))
