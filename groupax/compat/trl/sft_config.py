"""TRL's `SFTConfig`, as settings of groupax."""

from pathlib import Path
from typing import Any, ClassVar

from groupax.compat.fields import arguments, as_native, inert, parse_mapping, refused, same, warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.config import SFTConfig as NativeConfig

# TRL's settings behind native settings of another name, for error messages.
NAMES = {
    "batch_size": "per_device_train_batch_size * gradient_accumulation_steps",
    "learning_rate_end": "lr_scheduler_kwargs",
    "warmup_ratio": "warmup_steps below 1, or warmup_ratio",
}
ORDERS = {"random": "seeded_by_epoch", "sequential": "dataset"}  # by `train_sampling_strategy`

_packed = inert("tokens are packed without padding")


@arguments("TRL")
class SFTConfig(TrainingArguments):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    The fields are in the order and have the defaults of TRL's own class.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    MAPPINGS: ClassVar[tuple[str, ...]] = (*TrainingArguments.MAPPINGS, "model_init_kwargs", "dataset_kwargs")

    learning_rate: float = same(2e-5)
    remove_unused_columns: bool | None = inert("only the columns of the examples are read")(True)
    data_seed: int | None = None
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"
    label_smoothing_factor: float = refused(0.0, "the loss is that of loss_type ('nll' or 'dft'); leave it out")
    group_by_length: bool = refused(False, "examples have no padding, so their lengths need no grouping; leave it out")
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = inert("groupax never runs code from a model's folder")(False)
    router_aux_loss_coef: float | None = same(None)
    chat_template_path: str | None = None
    dataset_text_field: str = same("text")
    dataset_kwargs: dict[str, Any] | str | None = None
    dataset_num_proc: int | None = inert("examples are encoded in one process, by a tokenizer that uses all cores")(
        None
    )
    eos_token: str | None = None
    max_length: int | None = same(1024)
    truncation_mode: str = refused("keep_start", "examples lose their end; cut off their start in the dataset")
    shuffle_dataset: bool = False
    packing: bool = same(False)
    packing_strategy: str = same("bfd")
    padding_free: bool = _packed(False)
    pad_to_multiple_of: int | str | None = _packed("auto")
    eval_packing: bool | None = refused(None, "evaluations are packed like the training set; leave it out")
    completion_only_loss: bool | None = same(None)
    assistant_only_loss: bool = same(False)
    loss_type: str = "nll"
    activation_offloading: bool = inert("gradient_checkpointing saves the memory of activations")(False)
    pad_token: str | None = _packed(None)

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
            **self.same_settings(),
            "metric_definitions": "trl",
            "output_dir": self.output_dir,
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
        return as_native(settings, NAMES, NativeConfig)

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
