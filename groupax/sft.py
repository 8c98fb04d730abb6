"""Supervised fine-tuning: the same rows, optimizer steps, checkpoints and run folder as GRPO, without rollouts.

encode      examples as tokens, of which some are learned, and their sequences     data/supervised.py
update      minimize the loss of the next sequences                               training/learner.py
log, save   events to every sink, checkpoints                                      runs/run.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupax.core.config import SFTConfig
from groupax.core.schedule import supervised_steps
from groupax.core.settings.objective import EntropySettings, ObjectiveSettings
from groupax.core.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.core.settings.sft import ExampleSettings
from groupax.core.types import Metrics, Row
from groupax.data.examples import Examples, describe_source, load_examples, visit_order
from groupax.data.files import EVAL_SPLITS, TRAIN_SPLITS
from groupax.data.images import without_images
from groupax.data.supervised import (
    TokenExample,
    TrainingSet,
    columns_of_examples,
    encode_training_set,
    prompt_of,
    rows_of,
)
from groupax.evaluation.items import ONLY_SET, named_sets
from groupax.events import Listener, PhaseAdvanced, PhaseStarted, StepStarted
from groupax.models.vision.processing import prompt_encoder
from groupax.models.weights.checkpoint import Model
from groupax.objective.losses import Loss, find_loss, zero_metrics
from groupax.objective.variants import dft_loss, nll_loss
from groupax.rollouts.state import Cursor
from groupax.runs.build import check_datasets, lora_for, model_for, tokenizer_for
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, identity_of
from groupax.runs.diagnostics import Diagnose, supervised_diagnostics
from groupax.runs.header import data_name
from groupax.runs.model_card import SFT, run_card
from groupax.runs.progress.display import Progress, headline_text, short_number
from groupax.runs.run import Run, with_absolute_paths
from groupax.runs.trainer import Description, Trainer, make_learner
from groupax.training.learner import LearnerSettings, Update

OF_SAMPLING = ("ratio/", "rollout/")  # metrics of a comparison with a policy that sampled
# By `loss_type`; `settings.sft.SFTLossType` has the same names.
SUPERVISED_LOSSES = {"nll": Loss(nll_loss), "dft": Loss(dft_loss)}


@dataclass(frozen=True)
class SFTResult:
    """The result of `SFTTrainer.train`.

    Attributes:
        num_steps: Optimizer steps.
        train_seconds: Wall time of the loop, as in `TrainResult`.
        metrics: Metrics of the last logged step.
    """

    num_steps: int
    train_seconds: float
    metrics: Metrics

    def __repr__(self) -> str:
        """Returns the main figures in one line."""
        return f"<SFTResult: {self.num_steps:,} steps in {self.train_seconds:.1f} s, {headline_text(self.metrics)}>"


@dataclass(frozen=True)
class HeldOut:
    """The losses of a model on its evaluation sets: mean loss and entropy over the learned tokens of each, in nats.

    If the sets have names, they precede those of the metrics.
    """

    metrics: Metrics
    sets: Mapping[str, Any] = field(default_factory=dict)  # empty: there are no completions
    errors: Mapping[str, str] = field(default_factory=dict)  # empty: there are no rewards

    def __repr__(self) -> str:
        """Returns the metrics in one line."""
        return f"<HeldOut: {', '.join(f'{name} {short_number(value)}' for name, value in self.metrics.items())}>"


class SFTTrainer(Trainer):
    """Trains a language model on given examples.

    Args:
        model: Folder, hub id, or `Model`, whose own weights are not changed.
        args: Settings; None takes the defaults.
        train_dataset: Examples: a `datasets.Dataset`, a list of dicts, a file of rows, a folder, or a hub id. Each has
            `messages`, a `prompt` with a `completion`, a `text`, or `input_ids` (see docs/sft.md).
        eval_dataset: Held-out examples for `evaluate` and `eval_steps`, or a dict of several sets by name.
        processing_class: Tokenizer; None takes the one in the model's folder.
        peft_config: A `LoRAConfig` or a `peft.LoraConfig`, to train an adapter instead of the model's weights. Without
            it a model that has an adapter continues to train that one.
        listeners: Called with every event of the run (see `groupax.events`); one that returns True ends the run.
        progress: Display of the run; None takes the one that `progress_bar` names.

    Raises:
        ValueError: an argument or a setting would fail later.

    Example:
        >>> trainer = SFTTrainer("Qwen/Qwen3-0.6B-Base", train_dataset="solutions.jsonl")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SFTConfig

    def __init__(
        self,
        model: str | Path | Model,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        listeners: Sequence[Listener] = (),
        progress: Progress | None = None,
    ) -> None:
        self.args = args = with_absolute_paths(args or SFTConfig())
        self.run = Run(self, args, progress)
        self.listeners, self.progress, self.emit = listeners, self.run.progress, self.run.emit
        self.run_folder = self.run.folder

        self.emit(PhaseStarted("loading the data"))
        settings = learner_settings(args)
        zero_metrics(settings.objective)
        lora = lora_for(args, peft_config)
        check_datasets(args, train_dataset, eval_dataset)
        self.emit(PhaseStarted("loading the model"))
        self.start_model = model_for(args, model, lora)
        self.tokenizer = tokenizer_for(args, self.start_model, processing_class)
        self.emit(PhaseStarted("encoding the examples"))
        examples = self._load(train_dataset, "train_dataset", TRAIN_SPLITS)
        self.examples = self.encode(examples, describe_source(train_dataset, "train_dataset"))
        self.first_prompt = without_images(prompt_of(examples[0], args.dataset_text_field))
        self.eval_examples = {} if eval_dataset is None else self._encode_sets(eval_dataset)
        self.emit(PhaseStarted("preparing the devices"))
        self.steps_per_epoch, self.num_steps = supervised_steps(args, len(self.examples))
        rows = rows_of(self.examples.sequences)
        longest = max(len(row.prompt) for row in rows), max(len(row.completion) for row in rows)
        self.learner = make_learner(self, settings, longest)
        self.dataset_name = data_name(train_dataset, len(examples))

    # -- the loop --------------------------------------------------------------------------------------------------

    def train(self) -> SFTResult:
        """Runs the remaining steps, writes the run folder, and saves the trained model in its `model/`.

        Raises:
            DivergedError: `max_bad_steps` updates in a row were not finite. The model of before is saved.
            PreemptedError: SIGTERM or SIGINT asked the run to stop; its state is saved.
            RunError: the run cannot continue; its state is saved if there is room.
            ValueError: `resume` names a checkpoint that this run cannot continue, or no checkpoint there can be read.
            LockedError: another run works in the folder.
        """
        run = self.run
        with run.training() as stop:
            while True:
                run.evaluate_if_due()
                run.hooks.save_if_due(run)
                if run.is_over():
                    break
                stop.check()
                self.emit(StepStarted(self.cursor.step))
                sequences = [self.examples.sequences[index] for index in self.visited(self.cursor.step)]
                rows = rows_of(sequences, self.examples.images)
                update = self._update(rows, sequences)
                self._log(update)
                if not update.applied:
                    run.stop_if_diverged(rows, update, "Lower learning_rate, or look at these batches")
        return SFTResult(self.cursor.step, run.train_seconds, run.log.last)

    def visited(self, step: int) -> list[int]:
        """Returns the indices of the sequences that a step trains on."""
        num, args = len(self.examples), self.args
        epoch, batch = divmod(step, self.steps_per_epoch)
        first = batch * args.batch_size
        count = min(args.batch_size, num - first)
        return visit_order(num, epoch * num + first, count, args.seed, args.example_order)

    def _update(self, rows: Sequence[Row], sequences: Sequence[Sequence[TokenExample]]) -> Update:
        with self.run.updating():
            update = self.learner.update(rows)
            num_tokens = sum(len(example.ids) for sequence in sequences for example in sequence)
            self.cursor = replace(
                self.cursor,
                step=self.cursor.step + 1,
                num_prompts=self.cursor.num_prompts + len(sequences),
                num_tokens=self.cursor.num_tokens + num_tokens,
                num_bad_steps=0 if update.applied else self.cursor.num_bad_steps + 1,
            )
        return update

    def _log(self, update: Update) -> None:
        metrics = {name: value for name, value in update.metrics.items() if not name.startswith(OF_SAMPLING)}
        metrics |= {"epoch": self.cursor.step / self.steps_per_epoch, "num_tokens": float(self.cursor.num_tokens)}
        self.run.log.step(self.cursor.step, metrics)
        self.last_metrics = self.run.log.last

    def evaluate(self, eval_dataset: Any = None) -> HeldOut:
        """Computes the loss of the present policy on the `eval_dataset`s.

        Args:
            eval_dataset: Examples to evaluate on instead of the trainer's, in any form that it takes.

        Raises:
            ValueError: there are no examples, or they cannot be encoded.
        """
        sets = self.eval_examples if eval_dataset is None else self._encode_sets(eval_dataset)
        if not sets:
            raise ValueError("there is no eval_dataset to evaluate on; give one to SFTTrainer or to evaluate")
        metrics: Metrics = {}
        with self.progress:
            self.run.introduce()
            for name, examples in sets.items():
                prefix = "" if set(sets) == {ONLY_SET} else f"{name}_"
                metrics |= {f"{prefix}{key}": value for key, value in self.losses(name, examples).items()}
        return HeldOut(metrics)

    def losses(self, name: str, examples: TrainingSet) -> Metrics:
        """Returns the mean loss and entropy over the learned tokens of an evaluation set."""
        size, totals, num_tokens = self.args.batch_size, [0.0, 0.0], 0
        self.emit(PhaseStarted(f"evaluating: {name}", len(examples)))
        for start in range(0, len(examples), size):
            rows = rows_of(examples.sequences[start : start + size], examples.images)
            values = self.learner.logprobs(self.learner.policy, rows)
            for index, own in enumerate(values):
                totals[index] += sum(float(x[row.mask].sum()) for x, row in zip(own, rows, strict=True))
            num_tokens += sum(int(row.mask.sum()) for row in rows)
            self.emit(PhaseAdvanced(min(start + size, len(examples))))
        return {"loss": -totals[0] / num_tokens, "entropy": totals[1] / num_tokens}

    # -- its parts -------------------------------------------------------------------------------------------------

    def _load(self, dataset: Any, name: str, splits: Sequence[str]) -> Examples:
        sees_images = self.start_model.config.vision is not None
        return load_examples(dataset, name, splits, columns_of_examples(self.args.part(ExampleSettings)), sees_images)

    def _encode_sets(self, dataset: Any) -> dict[str, TrainingSet]:
        encoded = {}
        for name, each in named_sets(dataset).items():
            label = f"eval_dataset {name!r}"
            encoded[name] = self.encode(self._load(each, label, EVAL_SPLITS), label)
        return encoded

    def encode(self, examples: Examples, name: str) -> TrainingSet:
        """Returns examples as tokens; `name` is that of their dataset, for errors."""
        settings, config = self.args.part(ExampleSettings), self.start_model.config
        model, cache_bytes = self.start_model, int(self.args.image_cache_gb * 1e9)
        encoder = prompt_encoder(config.vision, model.source, self.tokenizer, cache_bytes)
        encoded = encode_training_set(examples, self.tokenizer, settings, config.max_positions, name, encoder)
        largest = max(int(example.ids.max()) for sequence in encoded.sequences for example in sequence)
        if largest >= config.vocab_size:
            raise ValueError(
                f"{name} has token {largest}, the model's vocabulary has {config.vocab_size} tokens: is this its "
                "tokenizer?"
            )
        return encoded

    # -- what its run asks of it -----------------------------------------------------------------------------------

    def identity(self) -> Identity:
        """Returns everything that a resumed run must have in common with this one."""
        examples = [example for sequence in self.examples.sequences for example in sequence]
        tokens = [array for example in examples for array in (example.ids, example.learned)]
        images = () if self.examples.images is None else self.examples.images.digests
        return identity_of(self.args, self.start_model, self.tokenizer, tokens, (), self.num_steps, images)

    def restore(self, saved: Saved) -> None:
        """Continues from a checkpoint, after the learner did."""
        self.cursor = Cursor(**saved.state["cursor"])

    def diagnose(self) -> Diagnose:
        """Returns what finds faults of the run in its metrics."""
        return supervised_diagnostics

    def describe(self) -> Description:
        """Returns what a user should know of the run before its first step."""
        args, examples = self.args, self.examples
        held_out = "".join(f", {each.num_examples:,} held out ({name})" for name, each in self.eval_examples.items())
        packed = f" in {len(examples):,} sequences" if args.packing else ""
        unit = "sequences" if args.packing else "examples"
        facts = {
            "examples": f"{examples.num_examples:,}{packed}{held_out}",
            "steps": f"{self.num_steps:,}, each on {args.batch_size:,} {unit}",
        }
        sets = {"train_dataset": examples}
        sets |= {f"eval_dataset {name!r}": each for name, each in self.eval_examples.items()}
        warnings = [
            f"{name}: {each.num_truncated} are longer than {each.max_length} tokens and cut off, {each.num_dropped} "
            f"have no token to learn and are dropped, {each.num_examples} are left"
            for name, each in sets.items()
            if each.num_dropped + each.num_truncated
        ]
        return replace(self.description(facts, args.batch_size), warnings=warnings)

    def card(self) -> str:
        """Returns the card of the model."""
        return run_card(self.trained(is_chat=bool(getattr(self.tokenizer, "chat_template", None))), SFT)


def learner_settings(args: SFTConfig) -> LearnerSettings:
    """Returns the settings of updates: the loss is an objective in which every token has the advantage 1."""
    return args.part(
        LearnerSettings,
        objective=args.part(ObjectiveSettings, loss_type=find_loss(args.loss_type, SUPERVISED_LOSSES)),
        entropy=EntropySettings(),
        optimizer=args.part(OptimizerSettings),
        schedule=args.part(LearningRateSettings),
    )
