"""Streaming datasets: the rows that a run needs, read in the order in which TRL's data loader reads them.

A `datasets.IterableDataset` has neither a length nor rows by index, which groupax's prompts need. TRL asks for
`max_steps` with one, so the number of prompts of the run is known: that many rows are read when the trainer is made.
"""

import itertools
import math
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.batches import TRLSchedule

MAX_ROWS = 50_000_000  # of a stream that is read into memory


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset is a streaming one of `datasets`."""
    loaded = sys.modules.get("datasets")
    return loaded is not None and isinstance(dataset, loaded.IterableDataset)


def check_streams(args: Any, *datasets: Any) -> None:
    """Sets what TRL's trainer sets in its config if there are streams."""
    sets = [each for dataset in datasets for each in (dataset.values() if isinstance(dataset, Mapping) else [dataset])]
    if not any(map(is_stream, sets)):
        return
    given = args.accelerator_config
    given = vars(given) if hasattr(given, "__dict__") else parse_mapping(given, "accelerator_config")
    if given.get("dispatch_batches"):
        raise ValueError(
            "Iterable datasets require `dispatch_batches=False`, but accelerator_config has dispatch_batches=True; "
            "leave it out"
        )
    # without the warning that it has no effect here
    object.__setattr__(args, "accelerator_config", SimpleNamespace(dispatch_batches=False))


def training_rows(stream: Any, args: Any, schedule: TRLSchedule) -> list[Any]:
    """Returns the rows of a stream that a run trains on, in their order.

    As in TRL a stream is shuffled within a buffer, an epoch drops what does not fill a rollout, and the next epoch
    reads the stream again, in another order.

    Raises:
        ValueError: `max_steps` is not set or too large, or the stream has fewer rows than a rollout takes.
    """
    if args.max_steps <= 0:
        raise ValueError(
            "a streaming train_dataset has no length, so nothing says how long an epoch is: set max_steps to the "
            "number of optimizer steps"
        )
    if args.dataloader_num_workers:
        warn("dataloader_num_workers is 0 for a streaming train_dataset, whose rows have an order")
        args.dataloader_num_workers = 0
    minibatches, per_rollout = args.max_steps * schedule.minibatches_per_step, schedule.prompts_per_rollout
    num_rows = per_rollout * math.ceil(minibatches / (schedule.minibatches * schedule.num_passes))
    if num_rows > MAX_ROWS:
        raise ValueError(
            f"max_steps takes {num_rows:,} rows of the streaming train_dataset, which are read when the trainer is "
            f"made, at most {MAX_ROWS:,}; lower max_steps, or give a Dataset"
        )
    stream = stream.shuffle(seed=args.seed) if args.shuffle_dataset else stream
    rows: list[Any] = []
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        found = list(itertools.islice(stream, num_rows - len(rows)))
        whole = len(found) - len(found) % per_rollout
        rows += found[:whole]
        if len(rows) >= num_rows:
            break
        if not whole:
            raise ValueError(
                f"the streaming train_dataset has {len(found)} rows, fewer than the {per_rollout} prompts of a "
                "generation; lower per_device_train_batch_size or steps_per_generation"
            )
    return rows


def evaluation_rows(dataset: Any) -> Any:
    """Returns an evaluation set, or several by name, with the rows of streams in memory."""
    if isinstance(dataset, Mapping):
        return {name: evaluation_rows(each) for name, each in dataset.items()}
    if not is_stream(dataset):
        return dataset
    rows = list(itertools.islice(dataset, MAX_ROWS + 1))
    if len(rows) > MAX_ROWS:
        raise ValueError(f"the streaming eval_dataset has more than {MAX_ROWS:,} rows; give dataset.take(n)")
    return rows
