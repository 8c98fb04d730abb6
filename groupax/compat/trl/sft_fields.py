"""The fields of TRL 1.16's `SFTConfig`, and the reasons why some have no effect in groupax. Imports no jax."""

from dataclasses import dataclass
from typing import Any, ClassVar

from groupax.compat.trl import training_arguments
from groupax.compat.trl.training_arguments import TrainingArguments

# Fields of `TrainingArguments` that have an effect here, or none that is known to be harmless.
_NOT_INERT = ("data_seed", "dataloader_drop_last", "train_sampling_strategy", "per_device_eval_batch_size")
# Fields without effect in groupax, by reason.
_INERT_BY_REASON: dict[str, tuple[str, ...]] = {
    "tokens are packed without padding": ("pad_to_multiple_of", "padding_free", "pad_token"),
    "examples are encoded in one process, by a tokenizer that uses all cores": ("dataset_num_proc",),
    "groupax never runs code from a model's folder": ("trust_remote_code",),
    "gradient_checkpointing saves the memory of activations": ("activation_offloading",),
}
INERT = {name: why for name, why in training_arguments.INERT.items() if name not in _NOT_INERT} | {
    name: why for why, names in _INERT_BY_REASON.items() for name in names
}
# Fields that cannot be honoured, with the reason and what to do instead.
REFUSED = training_arguments.REFUSED | {
    "label_smoothing_factor": "the loss is that of loss_type ('nll' or 'dft'); leave it out",
    "group_by_length": "examples have no padding, so their lengths need no grouping; leave it out",
    "eval_packing": "evaluations are packed like the training set; leave it out",
    "truncation_mode": "examples lose their end; cut off their start in the dataset",
}
INERT = {name: why for name, why in INERT.items() if name not in REFUSED}
ALIASES = training_arguments.ALIASES


@dataclass
class SFTFields(TrainingArguments):
    """The fields of TRL's `SFTConfig`, in the order and with the defaults of TRL's own class."""

    MAPPINGS: ClassVar[tuple[str, ...]] = (*TrainingArguments.MAPPINGS, "model_init_kwargs", "dataset_kwargs")

    learning_rate: float = 2e-5
    remove_unused_columns: bool | None = True
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_kwargs: dict[str, Any] | str | None = None
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    shuffle_dataset: bool = False
    packing: bool = False
    packing_strategy: str = "bfd"
    padding_free: bool = False
    pad_to_multiple_of: int | str | None = "auto"
    eval_packing: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"
    activation_offloading: bool = False
    pad_token: str | None = None
