"""The time of an optimizer step, expected before the first one from the stated peaks of the devices."""

from collections.abc import Sequence

from groupax.models.config import ModelConfig
from groupax.models.flops import forward_flops
from groupax.parallel.accelerators import Chip


def seconds_at_peak(
    config: ModelConfig,
    chip: Chip,
    num_devices: int,
    rows: Sequence[tuple[int, list[int]]],
    num_decoded: float,
    weight_bytes: float,
) -> float:
    """Returns the seconds of an optimizer step at the peaks of its devices.

    Decoding reads the weights once per token of a rollout's longest completion, and an update does three times the
    arithmetic of a forward pass. All else is left out, so that the time is a lower bound.

    Args:
        config: Architecture of the model.
        chip: The devices.
        num_devices: Number of devices.
        rows: Length of each prompt of the step and lengths of its completions.
        num_decoded: Tokens of a completion that are decoded, per optimizer step: those of a rollout, divided by the
            updates on it; 0 if other machines sample.
        weight_bytes: Bytes of the weights that a device reads for each of these tokens.
    """
    decode_s = num_decoded * weight_bytes / chip.memory_bytes_per_s
    return decode_s + 3 * forward_flops(config, rows) / (num_devices * chip.flops)
