"""EasyDeL's enums, and their values as native settings."""

from enum import StrEnum
from typing import Any

from groupax.settings.fields import nearest


class EasyDeLOptimizers(StrEnum):
    """The optimizers."""

    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


class EasyDeLSchedulers(StrEnum):
    """The learning-rate schedules."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class EasyDeLGradientCheckPointers(StrEnum):
    """The policies of gradient checkpointing."""

    NONE = ""
    EVERYTHING_SAVEABLE = "everything_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"
    CHECKPOINT_DOTS = "checkpoint_dots"
    CHECKPOINT_DOTS_WITH_NO_BATCH_DMIS = "checkpoint_dots_with_no_batch_dims"


class AttentionMechanisms(StrEnum):
    """The attention implementations."""

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
    """Returns the value of an enum member as lower-case text.

    Args:
        value: Member or its value; None means "none".
        known: Valid members or values.
        setting: Name of the setting, for the error message.

    Raises:
        ValueError: The value is not one of `known`.
    """
    names = [str(getattr(each, "value", each)) for each in known]
    text = str(getattr(value, "value", "none" if value is None else value)).lower()
    if text not in names:
        raise ValueError(
            f"{setting} {text!r} is not supported; choose from {', '.join(filter(None, names))}{nearest(text, names)}"
        )
    return text
