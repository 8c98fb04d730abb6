"""Settings of a run as a whole: its folder, its seed, its length. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.fields import ranged, setting

PromptOrder = Literal["shuffled", "shuffled_by_torch", "seeded_by_epoch", "dataset"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Folder, seed, length and data order of a run."""

    output_dir: str = setting("runs/grpo", resume="free")
    """Run folder, local or in a bucket (s3://, gs://): config.json, metrics.jsonl, rollouts/, checkpoints/ and the
    trained model/. An earlier run in it is continued if it is the same run (see resume), and otherwise moved aside."""
    seed: int = ranged(0, 2**63 - 1, resume="fixed")
    """Seed of data order and sampling. The same seed gives the same run on the same machine."""
    num_train_epochs: float = ranged(3.0, 1e6)
    """Passes over the dataset; ignored if max_steps is set."""
    max_steps: int = ranged(-1, 10**9, low=1, also=-1, because="-1 follows num_train_epochs")
    """Optimizer steps; -1 follows num_train_epochs."""
    max_bad_steps: int = ranged(3, 10**9, low=1, resume="free")
    """Stop after this many consecutive updates that were skipped because the loss or a gradient was not finite."""

    def check(self) -> None:
        """Raises a ValueError if there would be nothing to train."""
        if self.max_steps == -1 and not self.num_train_epochs:
            raise ValueError(
                "num_train_epochs is 0 and max_steps -1, so that there is nothing to train; set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class PromptOrderSettings:
    """The order in which a run visits its prompts."""

    prompt_order: PromptOrder = setting("shuffled", resume="fixed")
    """Order of the prompts in an epoch: a new permutation each epoch, one that PyTorch's generator draws, in one
    sequence for the seed ("shuffled_by_torch") or for seed + epoch ("seeded_by_epoch"), or the order of the dataset."""
    drop_last: bool = setting(False, resume="fixed")
    """Drop the last incomplete rollout of each epoch, as a PyTorch DataLoader does with drop_last; otherwise rollouts
    continue into the next epoch."""
