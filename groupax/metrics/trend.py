"""The change of a logged value over a run."""

from collections.abc import Sequence

MAX_STEPS = 10  # of the start and of the end


def first_and_last(values: Sequence[float]) -> tuple[float, float, int]:
    """Returns the means of the first and of the last values, and how many each is of: at most half of all.

    Args:
        values: The values in their order, at least one.
    """
    num = max(1, min(MAX_STEPS, len(values) // 2))
    return sum(values[:num]) / num, sum(values[-num:]) / num, num
