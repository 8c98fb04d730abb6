"""The order in which a run visits the rows of its dataset. Imports no jax."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from groupax.config import PromptOrder


def visit_order(
    num_examples: int,
    start: int,
    count: int,
    seed: int,
    order: PromptOrder = "shuffled",
    per_epoch: int | None = None,
) -> list[int]:
    """The examples at positions start .. start + count - 1 of the run: a new permutation for every epoch.

    A pure function, so that a resumed run needs no iterator state.

    Args:
        num_examples: in the dataset.
        start: first position.
        count: of positions.
        seed: of the permutations.
        order: which permutations.
        per_epoch: positions of an epoch, if it leaves out the last of its permutation.
    """
    per_epoch = per_epoch or num_examples
    places = [divmod(position, per_epoch) for position in range(start, start + count)]
    permutations = {epoch: _PERMUTATIONS[order](num_examples, seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return [int(permutations[epoch][index]) for epoch, index in places]


def _shuffled(num: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num)


def _as_they_stand(num: int, _seed: int, _epoch: int) -> np.ndarray:
    return np.arange(num)


@lru_cache(maxsize=2)
def _shuffled_by_torch(num: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation that call number `epoch` of `torch.randperm(num, generator)` gives after `manual_seed(seed)`.

    PyTorch draws 32 bits of MT19937 for each place but the last, and swaps it with one of those from it on.
    """
    bits = np.random.RandomState(seed)._bit_generator  # seeded as PyTorch seeds it
    draws = bits.random_raw((epoch + 1) * (num - 1))[epoch * (num - 1) :]
    permutation = np.arange(num)
    for place, draw in enumerate(draws):
        other = place + int(draw) % (num - place)
        permutation[place], permutation[other] = permutation[other], permutation[place]
    return permutation


# By `GRPOConfig.prompt_order`.
_PERMUTATIONS: dict[PromptOrder, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": _shuffled,
    "shuffled_by_torch": _shuffled_by_torch,
    "dataset": _as_they_stand,
}
