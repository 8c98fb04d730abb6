"""TRL's `SFTConfig` and `SFTTrainer`, wrappers around the native ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from groupax.compat.callbacks import CallbackListener
from groupax.compat.fields import arguments, parse_mapping, warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.compat.trl.base import BaseTrainer, TrainOutput, check_optimizers, num_accelerators
from groupax.compat.trl.layout import check_output_dir
from groupax.compat.trl.overridden import REFUSED as REFUSED_OVERRIDES
from groupax.compat.trl.overridden import check_overrides
from groupax.compat.trl.policy import policy_of
from groupax.compat.trl.streams import is_stream
from groupax.config import SFTConfig as NativeConfig
from groupax.data.examples import Examples
from groupax.data.supervised import TrainingSet
from groupax.data.tokenizer import load_tokenizer
from groupax.sft import SFTTrainer as NativeTrainer
from groupax.storage.folders import resolve_folder
from groupax.types import Metrics

# TRL's settings behind native settings of another name, for error messages.
NAMES = {
    "batch_size": "per_device_train_batch_size * gradient_accumulation_steps",
    "learning_rate_end": "lr_scheduler_kwargs",
    "warmup_ratio": "warmup_steps below 1, or warmup_ratio",
}
ORDERS = {"random": "seeded_by_epoch", "sequential": "dataset"}  # by `train_sampling_strategy`

_INERT = {
    "only the columns of the examples are read": "remove_unused_columns=True",
    "groupax never runs code from a model's folder": "trust_remote_code=False",
    "examples are encoded in one process, by a tokenizer that uses all cores": "dataset_num_proc=None",
    "tokens are packed without padding": "padding_free=False pad_to_multiple_of='auto' pad_token=None",
    "gradient_checkpointing saves the memory of activations": "activation_offloading=False",
}
_REFUSED = {
    "the loss is that of loss_type ('nll' or 'dft'); leave it out": "label_smoothing_factor=0.0",
    "examples have no padding, so their lengths need no grouping; leave it out": "group_by_length=False",
    "examples lose their end; cut off their start in the dataset": "truncation_mode='keep_start'",
    "evaluations are packed like the training set; leave it out": "eval_packing=None",
}


@arguments("TRL", inert=_INERT, refused=_REFUSED)
class SFTConfig(TrainingArguments):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    MAPPINGS: ClassVar[tuple[str, ...]] = (*TrainingArguments.MAPPINGS, "model_init_kwargs", "dataset_kwargs")

    learning_rate: float = 2e-5
    data_seed: int | None = None
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"
    model_init_kwargs: dict[str, Any] | str | None = None
    router_aux_loss_coef: float | None = None
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_kwargs: dict[str, Any] | str | None = None
    eos_token: str | None = None
    max_length: int | None = 1024
    shuffle_dataset: bool = False
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"

    def batch_size(self, num_devices: int = 1) -> int:
        """Returns the number of sequences of an optimizer step on all devices."""
        return self.per_device_train_batch_size * num_devices * self.gradient_accumulation_steps

    def to_native(self, num_devices: int = 1, steps_per_epoch: int = 1) -> Any:
        """Returns the native config.

        Args:
            num_devices: Number of devices that `per_device_train_batch_size` applies to.
            steps_per_epoch: Number of optimizer steps in an epoch.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        if self.train_sampling_strategy not in ORDERS:
            raise ValueError(
                f"train_sampling_strategy {self.train_sampling_strategy!r} is not supported: examples have no padding, "
                f"so their lengths need no grouping; choose from {', '.join(ORDERS)}"
            )
        if self.shuffle_dataset and self.packing:
            raise ValueError(
                "shuffle_dataset with packing is not supported; shuffle the dataset itself: dataset.shuffle(seed=...)"
            )
        self._check_dataset_kwargs()
        settings = {
            "metric_definitions": "trl",
            "seed": self.seed if self.data_seed is None else self.data_seed,
            "batch_size": self.batch_size(num_devices),
            "example_order": ORDERS[self.train_sampling_strategy],
            "drop_last": self.dataloader_drop_last,
            "loss_type": "nll" if self.loss_type == "chunked_nll" else self.loss_type,
            "chat_template": self._chat_template(),
            **self.compute_settings(),
            **self.reporting_settings(),
            **self.saving_settings(steps_per_epoch),
            **self.optimizer_settings(),
            "eval_steps": self.evaluated_every(steps_per_epoch),
        }
        return self.as_native(settings, NAMES, NativeConfig)

    def _check_dataset_kwargs(self) -> None:
        given = dict(parse_mapping(self.dataset_kwargs, "dataset_kwargs"))
        if given.pop("skip_prepare_dataset", False):
            warn("skip_prepare_dataset changes nothing: examples with input_ids are taken as they are")
        if given:
            raise ValueError(f"dataset_kwargs {given} are not supported; the only one is skip_prepare_dataset")

    def _chat_template(self) -> str | None:
        path = self.chat_template_path
        if path is not None and not Path(path).is_file():
            raise ValueError(
                f"chat_template_path {path!r} is no file: give a Jinja template; the template of another tokenizer may "
                "have tokens that this model does not know"
            )
        return path


# Arguments of TRL's trainer that cannot be honoured, with what to do instead.
REFUSED_ARGUMENTS = {
    "data_collator": "examples are packed without padding; give `labels` with -100 where a token is not learned",
    "compute_loss_func": "gradients come from JAX: groupax.SFTConfig(loss_type=function) takes a function in JAX",
    "compute_metrics": "evaluations compute no logits for the host; read eval_loss, or evaluate with groupax.Engine",
    "preprocess_logits_for_metrics": "evaluations compute no logits for the host",
    "optimizer_cls_and_kwargs": "set optim, learning_rate and the other fields of SFTConfig",
}


class TRLExamples(NativeTrainer):
    """A native trainer with TRL's order and losses of held-out examples.

    Args:
        config: TRL's config.
        num_devices: Number of devices that its batch sizes apply to.
        arguments: Those of `groupax.SFTTrainer`.
    """

    def __init__(self, config: SFTConfig, num_devices: int, *arguments: Any, **named: Any) -> None:
        self._config, self._num_devices = config, num_devices
        super().__init__(*arguments, **named)

    def encode(self, examples: Examples, name: str) -> TrainingSet:
        """Returns examples as tokens, in TRL's order."""
        encoded = super().encode(examples, name)
        if not self._config.shuffle_dataset:
            return encoded
        order = np.random.default_rng(self._config.seed).permutation(len(encoded))  # as `datasets` shuffles
        return replace(encoded, sequences=[encoded.sequences[index] for index in order])

    def losses(self, name: str, examples: TrainingSet) -> Metrics:
        """Returns means over examples of the means over the tokens of their batches, as transformers computes them."""
        size, means = self._config.per_device_eval_batch_size * self._num_devices, []
        for start in range(0, len(examples), size):
            sequences = examples.sequences[start : start + size]
            batch = replace(examples, sequences=sequences)
            means.append((len(sequences), super().losses(name, batch)))
        weights = [count for count, _ in means]
        return {key: float(np.average([each[key] for _, each in means], weights=weights)) for key in means[0][1]}


class SFTTrainer(BaseTrainer):
    """TRL's trainer, implemented with the native trainer in its attribute `native`.

    Args:
        model: Folder, hub id, or a model object: one of PyTorch or of `compat.hf` is trained in place.
        args: Settings.
        data_collator: Must be None, as `compute_loss_func`, `compute_metrics`, `preprocess_logits_for_metrics` and
            `optimizer_cls_and_kwargs`.
        train_dataset: Examples to train on.
        eval_dataset: Examples to evaluate on.
        processing_class: Tokenizer; by default the model's.
        compute_loss_func: Must be None.
        compute_metrics: Must be None.
        callbacks: Callbacks of transformers.
        optimizers: Must be (None, None).
        optimizer_cls_and_kwargs: Must be None.
        preprocess_logits_for_metrics: Must be None.
        peft_config: Settings of a LoRA adapter.
        formatting_func: Function that returns the text of an example.
        quantization_config: Quantization of a model that is not loaded yet.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    REFUSED_OVERRIDES: ClassVar[Mapping[str, str]] = REFUSED_OVERRIDES | dict.fromkeys(
        ("_prepare_dataset", "log"), "change the dataset before training, and log in a callback's on_log"
    )

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        quantization_config: Any = None,
    ) -> None:
        given = locals()
        for name, why in REFUSED_ARGUMENTS.items():
            if given[name] is not None:
                raise ValueError(f"{name} is not supported: {why}")
        self.args = args = args or SFTConfig(f"{Path(str(getattr(model, 'name', model))).name}-SFT")
        check_overrides(self, SFTTrainer)
        check_optimizers(optimizers)
        check_output_dir(args.output_dir)
        policy = policy_of(model, args, quantization_config, peft_config)
        num_devices = num_accelerators()
        settings, policy = self._prepare(args, args.to_native(num_devices), policy, callbacks)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._formatting_func = formatting_func
        if formatting_func is not None and args.completion_only_loss:
            raise ValueError("formatting_func returns texts, which have no completions; leave completion_only_loss out")
        self.native = TRLExamples(
            args,
            num_devices,
            policy.model,
            settings,
            self._rows(train_dataset),
            self._sets(eval_dataset),
            _with_tokens(processing_class, policy.model, args),
            policy.peft_config,
            self._listeners,
        )
        every = args.to_native(num_devices, self.native.steps_per_epoch)
        self.native.args = replace(self.native.args, save_steps=every.save_steps, eval_steps=every.eval_steps)
        self._finish(policy, has_eval_sets=bool(self.native.eval_examples))

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains the policy.

        Args:
            resume_from_checkpoint: True to resume from the newest checkpoint in `output_dir`, or a checkpoint's path.
        """
        is_resumed = self._resume(resume_from_checkpoint)
        listener = self._callback_listener()
        self._listeners[:] = [self._trained, listener]
        if self.args.eval_on_start and not is_resumed:
            self.evaluate()
        return self._output(self.native.train(), listener)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Computes the loss of the current policy on held-out examples.

        Args:
            eval_dataset: Examples, or several sets by name, or the name of one of the trainer's sets; by default those
                that the trainer was given.
            ignore_keys: Not used: there are no outputs of a model to gather.
            metric_key_prefix: Beginning of the metrics' names, before the name of a set.
        """
        del ignore_keys
        if isinstance(eval_dataset, str):
            eval_dataset = self._eval_set(eval_dataset)
        evaluation = self.native.evaluate(None if eval_dataset is None else self._sets(eval_dataset))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in evaluation.metrics.items()}
        self._callback_listener().evaluated(self.native.cursor.step, metrics)
        return {**metrics, "epoch": self.state.epoch}

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history` and calls the callbacks.

        Args:
            logs: Values by name.
            start_time: Not used: the times are among the values.
        """
        del start_time
        self._callback_listener().record(self.native.cursor.step, dict(logs))

    def _callback_listener(self) -> CallbackListener:
        if self._listener is None:
            self._listener = self._new_listener(self.native.steps_per_epoch, self.native.args.batch_size)
        return self._listener

    def _sets(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._rows(each) for name, each in dataset.items()}
        return self._rows(dataset)

    def _rows(self, dataset: Any) -> Any:
        """Returns a dataset as the native trainer takes it: texts formatted, conversations under `messages`.

        Raises:
            ValueError: It is a stream.
        """
        if dataset is None or isinstance(dataset, (str, Path)):
            return dataset
        if is_stream(dataset):
            raise ValueError(
                "a streaming dataset has no length; give rows that were taken from it, e.g. "
                "Dataset.from_list(list(dataset.take(10_000)))"
            )
        if self._formatting_func is not None:
            return [{self.args.dataset_text_field: self._formatting_func(row)} for row in dataset]
        first = dataset[0] if len(dataset) else {}
        if "conversations" in first:
            return [_chatml(row) for row in dataset]
        return dataset


def _chatml(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row whose `conversations` have `from` and `value` as one whose `messages` have `role` and `content`."""
    messages = [
        {"role": message["from"], "content": message["value"]} if "from" in message else message
        for message in row["conversations"]
    ]
    return {**{name: value for name, value in row.items() if name != "conversations"}, "messages": messages}


def _with_tokens(tokenizer: Any, model: Any, args: SFTConfig) -> Any:
    """Returns the tokenizer with the end-of-sequence token and the chat template that the settings ask for.

    Raises:
        ValueError: The vocabulary lacks the token.
    """
    if args.eos_token is None:
        return tokenizer
    if tokenizer is None:
        source = model.source if hasattr(model, "source") else resolve_folder(model)
        tokenizer = load_tokenizer(source, args.chat_template_path)
    if args.eos_token not in tokenizer.get_vocab():
        raise ValueError(f"eos_token {args.eos_token!r} is not in the vocabulary of the tokenizer")
    tokenizer.eos_token = args.eos_token
    return tokenizer
