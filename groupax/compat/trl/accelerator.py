"""A stand-in for accelerate's `Accelerator`, which TRL's trainers have as an attribute, as far as scripts use it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from groupax.parallel import processes


@dataclass
class AcceleratorConfig:
    """The fields of accelerate's settings of data loaders, which TRL's trainer sets for streaming datasets."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True


class Accelerator:
    """The processes of a run, with the names of accelerate's class.

    One process uses all devices of its machine, so `num_processes` counts machines.
    """

    sync_gradients = True  # an optimizer step is one call

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: groupax trains with JAX, without accelerate; what it offers is "
            f"{', '.join(each for each in dir(type(self)) if not each.startswith('_'))}"
        )

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return processes.num_processes()

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return processes.process_index()

    @property
    def local_process_index(self) -> int:
        """The index of this process on its machine."""
        return 0

    @property
    def is_main_process(self) -> bool:
        """True for the process that prints and writes."""
        return processes.is_primary()

    @property
    def is_local_main_process(self) -> bool:
        """True for the first process of a machine, and there is one on each."""
        return True

    @property
    def is_last_process(self) -> bool:
        """True for the process with the highest index."""
        return self.process_index == self.num_processes - 1

    @property
    def device(self) -> Any:
        """PyTorch's device for tensors of scripts, which is the CPU: groupax's own arrays are JAX's.

        Raises:
            ImportError: PyTorch is not installed.
        """
        import torch

        return torch.device("cpu")

    def print(self, *values: Any, **named: Any) -> None:
        """Prints in the main process only."""
        if self.is_main_process:
            print(*values, **named)

    def wait_for_everyone(self) -> None:
        """Waits until all processes have come to this call."""
        processes.all_gather_object(None)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Runs the block in the main process first, then in the others."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does nothing in other processes than the main one."""
        return function if self.is_main_process else lambda *_, **__: None

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Returns the model itself, which nothing wraps."""
        return model

    def gather(self, values: Any) -> Any:
        """Returns the tensors of all processes, one after another along the first dimension.

        Args:
            values: A PyTorch tensor, or a list, tuple or dict of such.
        """
        if self.num_processes == 1:
            return values
        import torch

        gathered = processes.all_gather_object(values)
        return jax.tree.map(lambda *each: torch.cat([torch.atleast_1d(one) for one in each]), *gathered)

    gather_for_metrics = gather

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Returns a tensor padded to the longest among the processes.

        Args:
            tensor: A PyTorch tensor.
            dim: Dimension to pad.
            pad_index: Value of the padding.
            pad_first: Whether the padding comes first.
        """
        missing = max(processes.all_gather_object(tensor.shape[dim])) - tensor.shape[dim]
        if not missing:
            return tensor
        import torch

        shape = [missing if index == dim % tensor.dim() else size for index, size in enumerate(tensor.shape)]
        padding = tensor.new_full(shape, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

    def free_memory(self, *objects: Any) -> list[None]:
        """Returns None for each object, for the caller to forget them by."""
        return [None for _ in objects]

    def end_training(self) -> None:
        """Does nothing: `train` closes what it opened."""
