"""Settings under another library's names. Imports no jax."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

from groupax.config import GRPOConfig
from groupax.settings.compute import AttnImplementation
from groupax.settings.fields import nearest, shown
from groupax.settings.sampling import EvalSamplingSettings

MOST = 1e15  # of any number that is a setting
# Sampling parameters whose values in evaluation do not follow those of rollouts.
EVAL_SAMPLING = tuple(EvalSamplingSettings().eval_sampling)


class CompatWarning(UserWarning):
    """A warning that a setting has no meaning in groupax, or another one, and why."""


def tell(text: str) -> None:
    """Warns the user of a difference."""
    warnings.warn(text, CompatWarning, stacklevel=3)


# Other libraries' names of attention without a kernel.
_PLAIN_ATTENTION = ("eager", "vanilla", "blockwise")


def attention_setting(name: Any) -> AttnImplementation:
    """Returns the setting for another library's name of attention; any kernel becomes the device's own."""
    return "plain" if str(getattr(name, "value", name)) in _PLAIN_ATTENTION else "auto"


@dataclass(frozen=True)
class Fields:
    """The settings of another library.

    Attributes:
        library: Name of the library.
        defaults: Default of every field.
        inert: Fields that have no meaning here, with the reason.
        former: Current names of fields by their names in earlier versions.
    """

    library: str
    defaults: Mapping[str, Any]
    inert: Mapping[str, str]
    former: Mapping[str, str]


class ForeignConfig:
    """Settings with another library's names and defaults; they can be changed until a trainer is created from them.

    Args:
        settings: Settings by name.

    Raises:
        TypeError: A name is unknown; names the nearest one.
    """

    FIELDS: ClassVar[Fields]

    def __init__(self, **settings: Any) -> None:
        object.__setattr__(self, "given", {})
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.FIELDS
        name = fields.former.get(name, name)
        if name not in fields.defaults:
            raise TypeError(f"{type(self).__name__} has no field {name!r}{nearest(name, fields.defaults)}")
        if name not in fields.inert:
            value = _as_number(name, value, fields.defaults[name])
        elif value != fields.defaults[name]:
            tell(f"{fields.library}'s {name}={value!r} changes nothing in groupax: {fields.inert[name]}")
        self.given[name] = value

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            raise AttributeError(name)
        fields = self.FIELDS
        name = fields.former.get(name, name)
        if name not in fields.defaults:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}{nearest(name, fields.defaults)}")
        return self.given.get(name, fields.defaults[name])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def to_dict(self) -> dict[str, Any]:
        """Returns every field with its value."""
        return {name: getattr(self, name) for name in self.FIELDS.defaults}


def _as_number(name: str, value: Any, default: Any) -> Any:
    """Returns the value of a setting whose default is a number; files sometimes contain numbers as texts.

    Raises:
        ValueError: The value is not a finite number.
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
    if isinstance(value, (int, float)) and not abs(value) <= MOST:
        raise ValueError(f"{name} must be a number of at most {MOST:g}, got {shown(value)}; the default is {default}")
    return value


def as_native(settings: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> GRPOConfig:
    """Returns a native config; lists become tuples, and whole numbers floats where the field is a float.

    Args:
        settings: Settings by native name.
        names: Names that the user has set, by the native names that follow from them.

    Raises:
        ValueError: A value is invalid; names the user's setting too.
    """
    floats = {field.name for field in fields(GRPOConfig) if field.type is float}
    is_whole = {name for name, value in settings.items() if isinstance(value, int) and not isinstance(value, bool)}
    try:
        return GRPOConfig.from_mapping(
            {name: float(value) if name in floats & is_whole else value for name, value in settings.items()}
        )
    except ValueError as error:
        origins = [f"{name} follows from {foreign}" for name, foreign in names.items() if name in str(error)]
        if not origins:
            raise
        raise ValueError(f"{error} ({'; '.join(origins)})") from error


def sampled_alike(settings: Mapping[str, Any], num_generations: int) -> dict[str, Any]:
    """Returns the settings that sample evaluations as rollouts are sampled.

    Args:
        settings: native settings of rollouts.
        num_generations: number of completions of each prompt in evaluation.
    """
    alike = {f"eval_{name}": settings[name] for name in EVAL_SAMPLING if name in settings}
    return {**alike, "eval_num_generations": num_generations}


def steps_of(strategy: Any, steps: Any, steps_per_epoch: int, name: str) -> int:
    """Returns the number of optimizer steps between two events, by transformers' strategies; 0 for never.

    Raises:
        ValueError: The strategy is unknown.
    """
    strategy = getattr(strategy, "value", strategy)
    if strategy in ("no", None, False):
        return 0
    if strategy == "epoch":
        return steps_per_epoch
    if strategy != "steps":
        raise ValueError(f"{name} must be no, steps or epoch, got {strategy!r}")
    if steps < 1:
        raise ValueError(f"{name} 'steps' with a share of the run ({steps}) is not supported; give a number of steps")
    return int(steps)
