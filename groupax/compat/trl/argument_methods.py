"""The properties and methods of transformers' `TrainingArguments` that scripts read. Imports no jax."""

import contextlib
import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

from groupax.parallel import processes

# Methods that only set fields, each with the fields to set instead.
SETTERS = {
    "set_dataloader": "per_device_train_batch_size",
    "set_evaluate": "eval_strategy and eval_steps",
    "set_logging": "logging_steps and report_to",
    "set_lr_scheduler": "lr_scheduler_type, num_train_epochs, max_steps and warmup_steps",
    "set_optimizer": "optim, learning_rate and weight_decay",
    "set_push_to_hub": "push_to_hub and hub_model_id",
    "set_save": "save_strategy and save_steps",
    "set_testing": "eval_strategy",
    "set_training": "learning_rate, per_device_train_batch_size, num_train_epochs and max_steps",
}
# Attributes about PyTorch's placement of a model, with the reason why they do not exist.
ABSENT = {
    "ddp_timeout_delta": "processes are connected by JAX",
    "is_torch_greater_or_equal_than_2_8": "it is about PyTorch's version",
    "parallel_mode": "one process drives all devices of a host; parallelism_config has the sizes of the mesh",
    "place_model_on_device": "JAX places the model on the devices",
}


def absence(name: str) -> str | None:
    """Returns why a method or attribute of transformers' class does not exist, and what to do; None if it is none."""
    if name in SETTERS:
        return f"set the fields themselves: {SETTERS[name]}"
    return ABSENT.get(name)


class ArgumentMethods:
    """Properties and methods of arguments; each process of a run has one rank."""

    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    warmup_steps: float
    default_optim = "adamw_torch_fused"

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return processes.num_processes()

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return processes.process_index()

    @property
    def local_process_index(self) -> int:
        """The index of this process on its machine, which has one."""
        return 0

    @property
    def n_gpu(self) -> int:
        """The number of accelerators on which PyTorch computes: none, as JAX has them."""
        return 0

    @property
    def device(self) -> Any:
        """The device of PyTorch's tensors: the CPU."""
        torch = sys.modules.get("torch")
        return "cpu" if torch is None else torch.device("cpu")

    @property
    def train_batch_size(self) -> int:
        """The completions of a micro-batch on a device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """The value of `per_device_eval_batch_size`."""
        return self.per_device_eval_batch_size

    @property
    def should_log(self) -> bool:
        """True if this process prints."""
        return processes.is_primary()

    @property
    def should_save(self) -> bool:
        """True if this process writes."""
        return processes.is_primary()

    def get_process_log_level(self) -> int:
        """Returns the level of messages to print, as a number of `logging`."""
        return logging.INFO if self.should_log else logging.WARNING

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the steps of warm-up, of which `warmup_steps` below 1 is a fraction."""
        steps = self.warmup_steps
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs a block: every process has its own caches, and none waits for another.

        Args:
            local: Not used.
            desc: Not used.
        """
        del local, desc
        yield
