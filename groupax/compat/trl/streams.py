"""Streaming datasets: the rows that a run needs, read in the order in which TRL's data loader reads them.

A `datasets.IterableDataset` has neither a length nor rows by index, which groupax's prompts need. TRL asks for
`max_steps` with one, so the number of prompts of the run is known: that many rows are read when the trainer is made.
"""

import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.base import AcceleratorConfig

NO_DISPATCH = (
    "Iterable datasets require `dispatch_batches=False`, but accelerator_config has dispatch_batches=True; leave it out"
)

MAX_ROWS = 50_000_000  # of a stream that is read into memory


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset is a streaming one of `datasets`."""
    loaded = sys.modules.get("datasets")
    return loaded is not None and isinstance(dataset, loaded.IterableDataset)


def _has_streams(dataset: Any) -> bool:
    return any(map(is_stream, dataset.values())) if isinstance(dataset, Mapping) else is_stream(dataset)


class Streams:
    """Reads the rows of the streaming datasets of a trainer.

    Args:
        args: TRL's config.
        num_devices: Number of devices that `per_device_train_batch_size` applies to.

    Attributes:
        settings: Native settings that follow from a streaming training set.
    """

    def __init__(self, args: Any, num_devices: int) -> None:
        self.args, self.schedule = args, args.schedule(num_devices)
        self.settings: dict[str, Any] = {}

    def training_rows(self, dataset: Any) -> Any:
        """Returns a dataset, or the rows of a stream that a run trains on, in their order.

        As in TRL a stream is shuffled within a buffer, an epoch drops what does not fill a rollout, and the next epoch
        reads the stream again, in another order.

        Raises:
            ValueError: `max_steps` is not set, or the stream has fewer rows than a rollout takes.
        """
        if not is_stream(dataset):
            return dataset
        self._check_dispatch()
        args, schedule = self.args, self.schedule
        if args.max_steps <= 0:
            raise ValueError(
                "a streaming train_dataset has no length, so nothing says how long an epoch is: set max_steps to the "
                "number of optimizer steps"
            )
        if args.dataloader_num_workers:
            warn("dataloader_num_workers is 0 for a streaming train_dataset, whose rows have an order")
            args.dataloader_num_workers = 0
        self.settings["prompt_order"] = "dataset"
        minibatches = args.max_steps * schedule.minibatches_per_step
        num_rollouts = math.ceil(minibatches / (schedule.minibatches * schedule.num_passes))
        seed = args.seed if args.shuffle_dataset else None
        return _rows_of_run(dataset, schedule.prompts_per_rollout, num_rollouts, seed)

    def evaluation_rows(self, dataset: Any) -> Any:
        """Returns an evaluation set, or several by name, with the rows of streams in memory."""
        if _has_streams(dataset):
            self._check_dispatch()
        return evaluation_rows(dataset)

    def _check_dispatch(self) -> None:
        given = self.args.accelerator_config
        given = parse_mapping(given, "accelerator_config") if isinstance(given, (str, Mapping)) else given
        dispatch = given.get("dispatch_batches") if isinstance(given, Mapping) else given and given.dispatch_batches
        if dispatch:
            raise ValueError(NO_DISPATCH)
        # as TRL's trainer leaves it, without the warning that it has no effect here
        object.__setattr__(self.args, "accelerator_config", AcceleratorConfig(dispatch_batches=False))


def _rows_of_run(stream: Any, prompts_per_rollout: int, num_rollouts: int, seed: int | None) -> list[Any]:
    num_rows = prompts_per_rollout * num_rollouts
    if num_rows > MAX_ROWS:
        raise ValueError(
            f"max_steps takes {num_rows:,} rows of the streaming train_dataset, which are read when the trainer is "
            f"made, at most {MAX_ROWS:,}; lower max_steps, or give a Dataset"
        )
    stream = stream if seed is None else stream.shuffle(seed=seed)
    rows: list[Any] = []
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        found = list(itertools.islice(stream, num_rows - len(rows)))
        whole = len(found) - len(found) % prompts_per_rollout
        rows += found[:whole]
        if len(rows) >= num_rows:
            break
        if not whole:
            raise ValueError(
                f"the streaming train_dataset has {len(found)} rows, fewer than the {prompts_per_rollout} prompts of a "
                "generation; lower per_device_train_batch_size or steps_per_generation"
            )
    return rows


def evaluation_rows(dataset: Any) -> Any:
    """Returns an evaluation set, or several by name, with the rows of streams in memory.

    Raises:
        ValueError: A stream has too many rows.
    """
    if isinstance(dataset, Mapping):
        return {name: evaluation_rows(each) for name, each in dataset.items()}
    if not is_stream(dataset):
        return dataset
    rows = list(itertools.islice(dataset, MAX_ROWS + 1))
    if len(rows) > MAX_ROWS:
        raise ValueError(f"the streaming eval_dataset has more than {MAX_ROWS:,} rows; give dataset.take(n)")
    return rows
