"""TRL's `SFTConfig` and its translation to a native config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.compat.arguments import arguments
from groupax.compat.fields import as_native, interval_steps, parse_mapping, warn
from groupax.compat.trl.optimizer import optimizer_settings
from groupax.compat.trl.run_settings import RunArguments
from groupax.compat.trl.sft_fields import ALIASES, INERT, REFUSED, SFTFields
from groupax.config import SFTConfig as NativeConfig

# Settings with the same name and meaning in groupax.
SAME = (
    "num_train_epochs",
    "max_steps",
    "max_length",
    "dataset_text_field",
    "completion_only_loss",
    "assistant_only_loss",
    "packing",
    "packing_strategy",
    "router_aux_loss_coef",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
# TRL's settings behind native settings of another name, for error messages.
NAMES = {
    "batch_size": "per_device_train_batch_size * gradient_accumulation_steps",
    "learning_rate_end": "lr_scheduler_kwargs",
    "warmup_ratio": "warmup_steps below 1, or warmup_ratio",
}
ORDERS = {"random": "seeded_by_epoch", "sequential": "dataset"}  # by `train_sampling_strategy`


@arguments("TRL", INERT, REFUSED, ALIASES)
@dataclass
class SFTConfig(SFTFields, RunArguments):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    __repr__ = RunArguments.__repr__  # with what differs from the defaults only

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
        settings = {name: getattr(self, name) for name in SAME}
        settings |= {
            "metric_definitions": "trl",
            "output_dir": self.output_dir,
            "seed": self.seed if self.data_seed is None else self.data_seed,
            "batch_size": self.batch_size(num_devices),
            "example_order": ORDERS[self.train_sampling_strategy],
            "drop_last": self.dataloader_drop_last,
            "loss_type": "nll" if self.loss_type == "chunked_nll" else self.loss_type,
            "chat_template": self._chat_template(),
            "max_grad_norm": self.max_grad_norm or 0.0,
            **self.compute_settings(),
            **self.reporting_settings(),
            **self.saving_settings(steps_per_epoch),
            **optimizer_settings(self),
            "eval_steps": interval_steps(
                self.eval_strategy, self.eval_steps or self.logged_every(), steps_per_epoch, "eval_strategy"
            ),
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
