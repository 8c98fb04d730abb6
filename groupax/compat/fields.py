"""Settings with the field names and defaults of another library. Imports no jax.

A class of settings is one table: each field is declared with its default and with what becomes of it: `same`, `inert`,
`refused` or `former`. Fields that are declared plainly are translated by the code of their class.
"""

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from groupax.config import GRPOConfig, SFTConfig
from groupax.settings.compute import AttnImplementation
from groupax.settings.fields import nearest, shown
from groupax.settings.sampling import EvalSamplingSettings

T = TypeVar("T", bound="Arguments")
U = TypeVar("U")
ConfigT = TypeVar("ConfigT", GRPOConfig, SFTConfig)
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


def same(default: Any) -> Any:
    """Returns a field whose value is that of groupax's setting of the same name."""
    return _declared(default, "same", "")


def inert(why: str) -> Callable[[Any], Any]:
    """Returns what declares fields without effect in groupax, for a reason, from their defaults."""
    return lambda default: _declared(default, "inert", why)


def refused(default: Any, why: str) -> Any:
    """Returns a field that may only have its default, with the reason and what to do instead."""
    return _declared(default, "refused", why)


def former(current: str) -> Any:
    """Returns a field that is a former name of another one."""
    return _declared(None, "former", current)


def _declared(default: Any, kind: str, text: str) -> Any:
    if isinstance(default, list):  # an empty one
        return dataclasses.field(default_factory=list, metadata={kind: text})
    return dataclasses.field(default=default, metadata={kind: text})


@dataclass(frozen=True)
class Fields:
    """The fields of another library's config.

    Attributes:
        library: Name of the library.
        defaults: Default of every field that is not a former name.
        declared: Kind and text of each declared field: "same", "inert", "refused" or "former".
    """

    library: str
    defaults: Mapping[str, Any]
    declared: Mapping[str, tuple[str, str]]

    def of(self, kind: str) -> dict[str, str]:
        """Returns the fields of a kind, each with its text: the reason, or the current name."""
        return {name: text for name, (own, text) in self.declared.items() if own == kind}


NO_FIELDS = Fields("", {}, {})


def arguments(library: str, like: type["Arguments"] | None = None) -> Callable[[type[T]], type[T]]:
    """Returns a class decorator that makes a dataclass of declared fields, with their table in `FIELDS`.

    Args:
        library: Name of the library that the fields come from.
        like: Another such class, whose declarations hold for fields of the same names.
    """

    def complete(cls: type[T]) -> type[T]:
        own = dataclass(cls, repr=False)
        fields: tuple[Any, ...] = dataclasses.fields(own)  # pyright: ignore[reportArgumentType]
        declared: dict[str, tuple[str, str]] = {}
        for each in (own.__mro__[1], like):
            declared |= getattr(each, "FIELDS", NO_FIELDS).declared
        for field in fields:
            if (kind := next(iter(field.metadata), "help")) != "help":
                text = field.metadata[kind]
                declared[field.name] = kind, text
                shown = {"help": f"Has no effect in groupax: {text}.".replace("%", "%%")} if kind == "inert" else {}
                field.metadata = MappingProxyType(shown)  # which parsers of command lines read
            elif field.name in vars(cls).get("__annotations__", {}):
                declared.pop(field.name, None)
        names = {field.name for field in fields}
        declared = {name: each for name, each in declared.items() if name in names}
        defaults = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in fields
            if declared.get(field.name, ("",))[0] != "former"
        }
        own.FIELDS = Fields(library, defaults, declared)
        return accepting_more(own)

    return complete


def accepting_more(cls: type[U]) -> type[U]:
    """Removes the annotations of a dataclass's constructor, which accepts and converts more than its fields store."""
    cls.__init__.__annotations__.clear()
    return cls


class Arguments:
    """The base of settings of another library.

    A field without effect is accepted with a warning, and one that cannot be honoured is refused, when it is set to
    something else than its default. Names that are no fields are refused, but a subclass may set attributes of its own.
    """

    FIELDS: ClassVar[Fields]
    # Attributes of the other library that do not exist here, each with the reason or what to do instead.
    ABSENT: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[T], *values: Any, **settings: Any) -> T:
        """Refuses unknown names, which the generated constructor would refuse without naming the nearest."""
        del values
        known = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        for name in settings:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.FIELDS
        kind, text = fields.declared.get(name, ("", ""))
        if kind == "former":
            if value is not None:  # a former name that is used
                setattr(self, text, value)
            return
        if name not in fields.defaults:
            if type(self).__module__.partition(".")[0] == "groupax":
                raise TypeError(f"{type(self).__name__} has no field {name!r}{nearest(name, fields.defaults)}")
        elif kind == "refused":
            if value != fields.defaults[name]:
                raise ValueError(f"{name}={shown(value)} is not supported: {text}")
        elif kind != "inert":
            value = as_number(name, value, fields.defaults[name])
        elif value != fields.defaults[name]:
            warn(f"{fields.library}'s {name}={value!r} changes nothing in groupax: {text}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        kind, text = self.FIELDS.declared.get(name, ("", ""))
        if kind == "former":
            return getattr(self, text)
        if name in self.ABSENT:
            raise AttributeError(f"{type(self).__name__} has no {name}: {self.ABSENT[name]}")
        raise AttributeError(f"{type(self).__name__} has no field {name!r}{nearest(name, self.FIELDS.defaults)}")

    def __repr__(self) -> str:
        defaults = self.FIELDS.defaults
        given = (f"{name}={value!r}" for name, value in self.to_dict().items() if value != defaults.get(name))
        return f"{type(self).__name__}({', '.join(given)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns every field with its value, without former names."""
        former = self.FIELDS.of("former")
        names = (field.name for field in dataclasses.fields(self))  # pyright: ignore[reportArgumentType]
        return {name: getattr(self, name) for name in names if name not in former}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns every field, those that are no numbers or texts as texts."""
        plain = (bool, int, float, str)
        return {name: value if type(value) in plain else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Returns the fields as JSON text; what JSON cannot express as its Python representation."""
        return json.dumps(self.to_dict(), indent=2, default=repr)

    def same_settings(self) -> dict[str, Any]:
        """Returns the values of the fields that are settings of groupax under the same names."""
        return {name: getattr(self, name) for name in self.FIELDS.of("same")}


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


def as_native(
    settings: Mapping[str, Any],
    names: Mapping[str, str] = MappingProxyType({}),
    kind: type[ConfigT] = GRPOConfig,
) -> ConfigT:
    """Returns a native config, with integers converted to floats where the field is a float.

    Args:
        settings: Values by native field name.
        names: The user's settings behind native fields of another name, for error messages.
        kind: Class of the config.

    Raises:
        ValueError: A value is invalid; the message also names the user's setting.
    """
    floats = {own.name for own in dataclasses.fields(kind) if own.type is float}
    integers = {name for name, value in settings.items() if isinstance(value, int) and not isinstance(value, bool)}
    try:
        return kind.from_mapping(
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


def warn_replicated(model: Any, setting: str) -> None:
    """Warns about a model's dims that stay replicated as the mesh that a setting requests does not divide them."""
    from groupax.models.params import split_dims
    from groupax.parallel.mesh import indivisible

    for dim, size, axis in indivisible(split_dims(model.config), model.mesh):
        warn(
            f"{setting}: {dim} ({size}) is not divisible by {axis}={model.mesh.shape[axis]}; it stays replicated on "
            "every device"
        )
