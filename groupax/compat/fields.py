"""Settings with the field names and defaults of another library. Imports no jax.

A class of settings declares the fields that take part in a run, and tables of the others: those without effect in
groupax and those that it cannot honour, each with the reason. A field that is a setting of groupax's config too has its
value unless the class translates it.
"""

import ast
import dataclasses
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from groupax.core.config import GRPOConfig, SFTConfig
from groupax.core.settings.compute import AttnImplementation
from groupax.core.settings.fields import nearest, shown
from groupax.core.settings.sampling import EvalSamplingSettings

T = TypeVar("T", bound="Arguments")
ConfigT = TypeVar("ConfigT", GRPOConfig, SFTConfig)
NOTHING: Mapping[str, str] = MappingProxyType({})
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


# -- classes of settings


@dataclass(frozen=True)
class Fields:
    """The fields of another library's config.

    Attributes:
        library: Name of the library.
        defaults: Default of every field.
        inert: Fields without effect in groupax, each with the reason.
        refused: Fields that may only have their default, each with the reason and what to do instead.
    """

    library: str
    defaults: Mapping[str, Any]
    inert: Mapping[str, str]
    refused: Mapping[str, str]


def arguments(
    library: str, inert: Mapping[str, str] = NOTHING, refused: Mapping[str, str] = NOTHING
) -> Callable[[type[T]], type[T]]:
    """Returns a class decorator that makes a dataclass of settings, with their table in `FIELDS`.

    Args:
        library: Name of the library that the fields come from.
        inert: Fields without effect in groupax as texts like "name=default other=None", by the reason.
        refused: Fields that may only have their default, likewise.
    """

    def complete(cls: type[T]) -> type[T]:
        parent: Fields = getattr(cls, "FIELDS", Fields("", {}, {}, {}))
        reasons = _declare(cls, inert, "Has no effect in groupax"), _declare(cls, refused, "Not supported")
        redeclared = inspect.get_annotations(cls)
        kinds = [
            {name: reason for name, reason in earlier.items() if name not in redeclared} | own
            for earlier, own in zip((parent.inert, parent.refused), reasons, strict=True)
        ]
        own = dataclass(cls)
        own.__init__.__annotations__.clear()  # it accepts and converts more than the fields store
        fields: tuple[Any, ...] = dataclasses.fields(own)  # pyright: ignore[reportArgumentType]
        defaults = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in fields
        }
        own.FIELDS = Fields(library, defaults, *kinds)
        return own

    return complete


def _declare(cls: type, table: Mapping[str, str], effect: str) -> dict[str, str]:
    """Declares the fields of a table of `arguments` in a class, and returns the reason of each."""
    reasons: dict[str, str] = {}
    for reason, text in table.items():
        metadata = {"help": f"{effect}: {reason}.".replace("%", "%%")}
        for name, default in _defaults(text).items():
            reasons[name] = reason
            kind = str | None if default is None else list[str] if default == [] else type(default)
            how: dict[str, Any] = {"default_factory": list} if default == [] else {"default": default}
            cls.__annotations__ = {**inspect.get_annotations(cls), name: kind}
            setattr(cls, name, dataclasses.field(**how, metadata=metadata))
    return reasons


def _defaults(text: str) -> dict[str, Any]:
    """Returns the fields of a text like "name=default other=None", each with its default."""
    return {name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in text.split())}


class Arguments:
    """The base of settings of another library.

    A field without effect is accepted with a warning, and one that cannot be honoured is refused, when it is set to
    something else than its default. Names that are no fields are refused, but a subclass may set attributes of its own.
    """

    FIELDS: ClassVar[Fields]

    def __new__(cls: type[T], *values: Any, **settings: Any) -> T:
        """Refuses unknown names, which the generated constructor would refuse without naming the nearest."""
        del values
        known = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        for name in settings:
            if name not in known:
                raise TypeError(f"{cls.__name__} {_unknown(name, known, cls.FIELDS)}")
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.FIELDS
        if name not in fields.defaults:
            if type(self).__module__.partition(".")[0] == "groupax":
                raise TypeError(f"{type(self).__name__} {_unknown(name, fields.defaults, fields)}")
        elif name in fields.refused:
            if value != fields.defaults[name]:
                raise ValueError(f"{name}={shown(value)} is not supported: {fields.refused[name]}")
        elif name in fields.inert:
            if value != fields.defaults[name]:
                warn(f"{fields.library}'s {name}={value!r} changes nothing in groupax: {fields.inert[name]}")
        else:
            value = as_number(name, value, fields.defaults[name])
        super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Returns every field with its value."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]

    def as_native(
        self,
        translated: Mapping[str, Any],
        origins: Mapping[str, str] = NOTHING,
        kind: type[ConfigT] = GRPOConfig,
    ) -> ConfigT:
        """Returns a config of groupax, with integers converted to floats where the field is a float.

        Args:
            translated: Settings of groupax that are not the fields of the same names.
            origins: The user's settings behind settings of groupax of another name, for error messages.
            kind: Class of the config.

        Raises:
            ValueError: A value is invalid; the message also names the user's setting.
        """
        types = {field.name: field.type for field in dataclasses.fields(kind)}
        taken = self.FIELDS.defaults.keys() - self.FIELDS.inert.keys() - self.FIELDS.refused.keys()
        settings = {**{name: getattr(self, name) for name in taken & types.keys()}, **translated}
        if kind is GRPOConfig:  # evaluations are sampled like rollouts
            settings |= {f"eval_{name}": settings[name] for name in EVAL_SAMPLING if name in settings}
        for name, value in settings.items():
            if types.get(name) is float and type(value) is int:
                settings[name] = float(value)
        try:
            return kind.from_mapping(settings)
        except ValueError as error:
            named = [f"{name} follows from {own}" for name, own in origins.items() if name in str(error)]
            if not named:
                raise
            raise ValueError(f"{error} ({'; '.join(named)})") from error


def _unknown(name: str, known: Iterable[str], fields: Fields) -> str:
    library = fields.library
    return f"has no field {name!r}{nearest(name, known)}; if {library} has it, groupax has no counterpart: leave it out"


# -- translation


# Names that other libraries give to attention without a fused kernel.
_PLAIN_ATTENTION = ("eager", "vanilla", "blockwise")


def native_attention(name: Any) -> AttnImplementation:
    """Returns `attn_implementation` for another library's attention name; every kernel name maps to "auto"."""
    return "plain" if str(getattr(name, "value", name)) in _PLAIN_ATTENTION else "auto"


def scale_rewards(value: Any) -> Any:
    """Returns the native `scale_rewards` for another library's value, which may be a boolean."""
    return {True: "group", False: "none"}.get(value, value)


def as_number(name: str, value: Any, default: Any) -> Any:
    """Returns the value, converted from text if the field's default is a number."""
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


def interval_steps(strategy: Any, steps: Any, steps_per_epoch: int, name: str) -> int:
    """Returns the interval in optimizer steps that a strategy of transformers describes; 0 means never."""
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
    """Returns a dict, parsed if it is JSON text; empty for None."""
    if value is None:
        return {}
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {value!r}")
    return value


def warn_replicated(model: Any, setting: str) -> None:
    """Warns about a model's dims that stay replicated as the mesh that a setting requests does not divide them."""
    from groupax.models.params import split_dims
    from groupax.parallel.mesh import indivisible

    for dim, size, axis in indivisible(split_dims(model.config), model.mesh):
        warn(
            f"{setting}: {dim} ({size}) is not divisible by {axis}={model.mesh.shape[axis]}; it stays replicated on "
            "every device"
        )
