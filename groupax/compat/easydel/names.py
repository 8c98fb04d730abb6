"""The enums of EasyDeL's settings."""

from enum import StrEnum
from typing import Any

from groupax.settings.fields import nearest


class EasyDeLOptimizers(StrEnum):
    """Optimizers."""

    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


class EasyDeLSchedulers(StrEnum):
    """Schedules of the learning rate."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class EasyDeLGradientCheckPointers(StrEnum):
    """Policies of gradient checkpointing: what the backward pass recomputes."""

    NONE = ""
    EVERYTHING_SAVEABLE = "everything_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"
    CHECKPOINT_DOTS = "checkpoint_dots"
    CHECKPOINT_DOTS_WITH_NO_BATCH_DMIS = "checkpoint_dots_with_no_batch_dims"


class AttentionMechanisms(StrEnum):
    """Ways to compute attention."""

    AUTO = "auto"
    VANILLA = "vanilla"
    FLASH_ATTN2 = "flash_attn2"
    SPLASH = "splash"
    RING = "ring"
    CUDNN = "cudnn"
    BLOCKWISE = "blockwise"
    SDPA = "sdpa"
    CUDA_FLASH_ATTN2 = "cuda_flash_attn2"
    PAGED_ATTENTION = "paged_attention"


SCHEDULES = {"none": "constant", "": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
CHECKPOINTING = {
    "": "none",
    "none": "none",
    "everything_saveable": "none",
    "nothing_saveable": "full",
    "checkpoint_dots": "dots",
    "checkpoint_dots_with_no_batch_dims": "dots",
}


def named(value: Any, known: Any, setting: str) -> str:
    """Returns the text of an enum's member, given as the member, its name or its value.

    Raises:
        ValueError: There is no such member.
    """
    names = [str(getattr(each, "value", each)) for each in known]
    text = str(getattr(value, "value", "none" if value is None else value)).lower()
    if text not in names:
        raise ValueError(
            f"{setting} {text!r} is not supported{nearest(text, names)}; there are {', '.join(filter(None, names))}"
        )
    return text
