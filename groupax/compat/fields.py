"""Settings with the field names and defaults of another library. Imports no jax."""

import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

from groupax.config import GRPOConfig
from groupax.settings.compute import AttnImplementation
from groupax.settings.fields import nearest, shown
from groupax.settings.sampling import EvalSamplingSettings

MAX_NUMBER = 1e15  # largest magnitude of a numeric setting
# Sampling parameters that evaluations do not inherit from rollouts.
EVAL_SAMPLING = tuple(EvalSamplingSettings().eval_sampling)


class CompatWarning(UserWarning):
    """A warning that a setting of another library has no effect or a different effect in groupax."""


def warn(text: str) -> None:
    """Warns the user of a difference between groupax and the other library, at the line outside of groupax."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_within(frame.f_globals.get("__name__", ""), frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, CompatWarning, stacklevel=level)


def _is_within(module: str, file: str) -> bool:
    """Returns whether code belongs to groupax, or is the constructor that `dataclasses` generates."""
    return module.partition(".")[0] in ("groupax", "dataclasses") or file == "<string>"


# Names that other libraries give to attention without a fused kernel.
_PLAIN_ATTENTION = ("eager", "vanilla", "blockwise")


def native_attention(name: Any) -> AttnImplementation:
    """Returns `attn_implementation` for another library's attention name; every kernel name maps to "auto"."""
    return "plain" if str(getattr(name, "value", name)) in _PLAIN_ATTENTION else "auto"


def scale_rewards(value: Any) -> Any:
    """Returns the native `scale_rewards` for another library's value, which may be a boolean."""
    return {True: "group", False: "none"}.get(value, value)


@dataclass(frozen=True)
class Fields:
    """The fields of another library's config.

    Attributes:
        library: Name of the library.
        defaults: Default of every field.
        inert: Fields without effect in groupax, each with the reason.
        aliases: Current field name for each alternative or former name.
        refused: Fields that may only have their default, each with the reason and what to do instead.
    """

    library: str
    defaults: Mapping[str, Any]
    inert: Mapping[str, str]
    aliases: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)


class ForeignConfig:
    """A mutable config with another library's field names and defaults.

    Args:
        settings: Values by field name.

    Raises:
        TypeError: A field is unknown; the message suggests the nearest name.
        ValueError: A field cannot be honoured.
    """

    FIELDS: ClassVar[Fields]

    def __init__(self, **settings: Any) -> None:
        object.__setattr__(self, "given", {})
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.FIELDS
        name = fields.aliases.get(name, name)
        if name not in fields.defaults:
            raise TypeError(f"{type(self).__name__} has no field {name!r}{nearest(name, fields.defaults)}")
        if name in fields.refused:
            if value != fields.defaults[name]:
                raise ValueError(f"{name}={shown(value)} is not supported: {fields.refused[name]}")
        elif name not in fields.inert:
            value = as_number(name, value, fields.defaults[name])
        elif value != fields.defaults[name]:
            warn(f"{fields.library}'s {name}={value!r} changes nothing in groupax: {fields.inert[name]}")
        self.given[name] = value

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            raise AttributeError(name)
        fields = self.FIELDS
        name = fields.aliases.get(name, name)
        if name not in fields.defaults:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}{nearest(name, fields.defaults)}")
        return self.given.get(name, fields.defaults[name])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def to_dict(self) -> dict[str, Any]:
        """Returns every field with its value."""
        return {name: getattr(self, name) for name in self.FIELDS.defaults}


def as_number(name: str, value: Any, default: Any) -> Any:
    """Returns the value, converted from text if the field's default is a number.

    Raises:
        ValueError: The field's default is a number and the value is not a finite number.
    """
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return value
    if isinstance(value, str):
        try:
            value = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, got {value!r}; the default is {default}") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value}; the default is {default}")
    if isinstance(value, (int, float)) and not abs(value) <= MAX_NUMBER:
        raise ValueError(
            f"{name} must be a number of at most {MAX_NUMBER:g}, got {shown(value)}; the default is {default}"
        )
    return value


def as_native(settings: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> GRPOConfig:
    """Returns a native config, with integers converted to floats where the field is a float.

    Args:
        settings: Values by native field name.
        names: The user's settings behind native fields of another name, for error messages.

    Raises:
        ValueError: A value is invalid; the message also names the user's setting.
    """
    floats = {own.name for own in fields(GRPOConfig) if own.type is float}
    integers = {name for name, value in settings.items() if isinstance(value, int) and not isinstance(value, bool)}
    try:
        return GRPOConfig.from_mapping(
            {name: float(value) if name in floats & integers else value for name, value in settings.items()}
        )
    except ValueError as error:
        origins = [f"{name} follows from {foreign}" for name, foreign in names.items() if name in str(error)]
        if not origins:
            raise
        raise ValueError(f"{error} ({'; '.join(origins)})") from error


def matching_eval_sampling(settings: Mapping[str, Any], num_generations: int) -> dict[str, Any]:
    """Returns evaluation settings that sample like rollouts.

    Args:
        settings: Native settings of rollouts.
        num_generations: Number of completions per prompt in evaluation.
    """
    matching = {f"eval_{name}": settings[name] for name in EVAL_SAMPLING if name in settings}
    return {**matching, "eval_num_generations": num_generations}


def interval_steps(strategy: Any, steps: Any, steps_per_epoch: int, name: str) -> int:
    """Returns the interval in optimizer steps that a strategy of transformers describes; 0 means never.

    Raises:
        ValueError: The strategy is unknown, or the interval is a fraction of the run.
    """
    strategy = getattr(strategy, "value", strategy)
    if strategy in ("no", None, False):
        return 0
    if strategy == "epoch":
        return steps_per_epoch
    if strategy != "steps":
        raise ValueError(f"{name} must be no, steps or epoch, got {strategy!r}")
    if steps < 1:
        raise ValueError(
            f"{name} 'steps' with a fraction of the run ({steps}) is not supported; give a number of steps"
        )
    return int(steps)


def parse_mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Returns a dict, parsed if it is JSON text; empty for None.

    Raises:
        ValueError: The value is not a dict.
    """
    if value is None:
        return {}
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {value!r}")
    return value
