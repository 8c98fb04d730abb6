"""The order in which a run visits the rows of its dataset. Imports no jax."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from groupax.settings.run import PromptOrder


def visit_order(
    num_examples: int,
    start: int,
    count: int,
    seed: int,
    order: PromptOrder = "shuffled",
    per_epoch: int | None = None,
) -> list[int]:
    """Returns the examples at positions start .. start + count - 1 of a run, with a new permutation for every epoch.

    A pure function, so that a resumed run needs no iterator state.

    Args:
        num_examples: Number of rows in the dataset.
        start: First position.
        count: Number of positions.
        seed: Seed of the permutations.
        order: Kind of permutation.
        per_epoch: Number of positions in an epoch, if it leaves out the end of its permutation.
    """
    per_epoch = per_epoch or num_examples
    positions = [divmod(position, per_epoch) for position in range(start, start + count)]
    epochs = {epoch for epoch, _ in positions}
    permutations = {epoch: _PERMUTATIONS[order](num_examples, seed, epoch) for epoch in epochs}
    return [int(permutations[epoch][index]) for epoch, index in positions]


@lru_cache(maxsize=2)
def _shuffled(num: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num)


def _identity(num: int, _seed: int, _epoch: int) -> np.ndarray:
    return np.arange(num)


@lru_cache(maxsize=2)
def _shuffled_by_torch(num: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the result of call number `epoch` of `torch.randperm(num, generator)` after `manual_seed(seed)`.

    PyTorch draws 32 bits of MT19937 for each index but the last, and swaps its entry with one at or after it.
    """
    bits = np.random.RandomState(seed)._bit_generator  # seeded as PyTorch seeds it
    draws = bits.random_raw((epoch + 1) * (num - 1))[epoch * (num - 1) :]
    permutation = np.arange(num)
    for index, draw in enumerate(draws):
        other = index + int(draw) % (num - index)
        permutation[index], permutation[other] = permutation[other], permutation[index]
    return permutation


def _seeded_by_epoch(num: int, seed: int, epoch: int) -> np.ndarray:
    return _shuffled_by_torch(num, seed + epoch, 0)


# By `GRPOConfig.prompt_order`.
_PERMUTATIONS: dict[PromptOrder, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": _shuffled,
    "shuffled_by_torch": _shuffled_by_torch,
    "seeded_by_epoch": _seeded_by_epoch,
    "dataset": _identity,
}
