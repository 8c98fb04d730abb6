"""TRL's `SFTConfig` and `SFTTrainer`, wrappers around the native ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from groupax.compat.fields import arguments
from groupax.compat.trl.arguments import TrainingArguments
from groupax.compat.trl.base import BaseTrainer, num_accelerators
from groupax.compat.trl.policy import policy_of
from groupax.core.config import SFTConfig as NativeConfig
from groupax.sft import SFTTrainer as NativeTrainer

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
    "set the attribute eos_token of the tokenizer, and pass it as processing_class": "eos_token=None",
    "examples with input_ids are taken as they are; leave it out": "dataset_kwargs=None",
    "evaluations are packed like the training set; leave it out": "eval_packing=None",
}


@arguments("TRL", inert=_INERT, refused=_REFUSED)
class SFTConfig(TrainingArguments):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    learning_rate: float = 2e-5
    data_seed: int | None = None
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"
    model_init_kwargs: dict[str, Any] | str | None = None
    router_aux_loss_coef: float | None = None
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    max_length: int | None = 1024
    shuffle_dataset: bool = False
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"

    def to_native(self, num_devices: int = 1, steps_per_epoch: int = 1) -> Any:
        """Returns the native config, for a number of devices that `per_device_train_batch_size` applies to.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        if self.train_sampling_strategy not in ORDERS:
            raise ValueError(
                f"train_sampling_strategy {self.train_sampling_strategy!r} is not supported: examples have no padding, "
                f"so their lengths need no grouping; choose from {', '.join(ORDERS)}"
            )
        settings = {
            "metric_definitions": "trl",
            "seed": self.seed if self.data_seed is None else self.data_seed,
            "batch_size": self.per_device_train_batch_size * num_devices * self.gradient_accumulation_steps,
            "example_order": ORDERS[self.train_sampling_strategy],
            "drop_last": self.dataloader_drop_last,
            "loss_type": "nll" if self.loss_type == "chunked_nll" else self.loss_type,
            "chat_template": self.chat_template_path,
            **self.compute_settings(),
            **self.reporting_settings(),
            **self.saving_settings(steps_per_epoch),
            **self.optimizer_settings(),
            "eval_steps": self.evaluated_every(steps_per_epoch),
        }
        return self.as_native(settings, NAMES, NativeConfig)


# Arguments of TRL's trainer that cannot be honoured, with what to do instead.
REFUSED_ARGUMENTS = {
    "data_collator": "examples are packed without padding; give `labels` with -100 where a token is not learned",
    "compute_loss_func": "gradients come from JAX: groupax.SFTConfig(loss_type=function) takes a function in JAX",
    "compute_metrics": "evaluations compute no logits for the host; read eval_loss, or evaluate with groupax.Engine",
    "preprocess_logits_for_metrics": "evaluations compute no logits for the host",
    "optimizer_cls_and_kwargs": "set optim, learning_rate and the other fields of SFTConfig",
}


class SFTTrainer(BaseTrainer):
    """TRL's trainer, implemented with the native trainer in its attribute `native`.

    The arguments are those of TRL's class; those of `REFUSED_ARGUMENTS` must be None, and `optimizers` (None, None). A
    model object, of PyTorch or of `compat.hf`, is trained in place.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    CONFIG = SFTConfig

    def __init__(
        self,
        model: Any,
        args: Any = None,
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
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
    ) -> None:
        given = locals()
        for name, why in REFUSED_ARGUMENTS.items():
            if given[name] is not None:
                raise ValueError(f"{name} is not supported: {why}")
        args = self._check(model, args, optimizers)
        num_devices = num_accelerators()
        policy = policy_of(model, args, quantization_config, peft_config)
        settings = replace(args.to_native(num_devices), base_weights=policy.weights)
        settings = self._prepare(settings, callbacks)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._formatting_func = formatting_func
        if formatting_func is not None and args.completion_only_loss:
            raise ValueError("formatting_func returns texts, which have no completions; leave completion_only_loss out")
        self.native = NativeTrainer(
            policy.model,
            settings,
            self._rows(train_dataset),
            self._sets(eval_dataset),
            processing_class,
            policy.peft_config,
            self._listeners,
        )
        every = args.to_native(num_devices, self.native.steps_per_epoch)
        self.native.args = replace(self.native.args, save_steps=every.save_steps, eval_steps=every.eval_steps)
        self._finish(policy)

    def _pace(self) -> tuple[int, int]:
        """Returns the optimizer steps of an epoch, and the examples of a step."""
        return self.native.steps_per_epoch, self.native.args.batch_size

    def _evaluations(self, dataset: Any, prefix: str) -> list[dict[str, float]]:
        """Returns the losses of all sets."""
        evaluation = self.native.evaluate(None if dataset is None else self._sets(dataset))
        return [{f"{prefix}_{name}": value for name, value in evaluation.metrics.items()}]

    def _sets(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._rows(each) for name, each in dataset.items()}
        return self._rows(dataset)

    def _rows(self, dataset: Any) -> Any:
        """Returns a dataset as the native trainer takes it, with formatted texts."""
        if dataset is None or isinstance(dataset, (str, Path)):
            return dataset
        if not hasattr(dataset, "__len__"):
            raise ValueError("a stream has no length; give rows, e.g. Dataset.from_list(list(dataset.take(10_000)))")
        if self.args.shuffle_dataset:  # as `datasets` shuffles
            order = np.random.default_rng(self.args.seed).permutation(len(dataset))
            chosen = order.tolist()
            dataset = dataset.select(chosen) if hasattr(dataset, "select") else [dataset[index] for index in chosen]
        if self._formatting_func is not None:
            return [{self.args.dataset_text_field: self._formatting_func(row)} for row in dataset]
        return dataset
