"""Checks and conversions of the values of settings, by the types and ranges of their fields. Imports no jax."""

import dataclasses
import difflib
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

# How a setting may change when a run is resumed: freely, only where `resume` names the checkpoint, never, or only
# between values that are not 0.
Resume = Literal["free", "explicit", "fixed", "fixed_zero"]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "None"}
_NUMBERS = {int: (int, np.integer), float: (int, float, np.integer, np.floating)}


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a setting may be; none of them is infinite or not a number.

    Attributes:
        low: Smallest allowed number.
        high: Largest allowed number, or with `is_open` the upper limit; infinite for no limit.
        is_open: Whether `high` itself is excluded.
        also: One more allowed number.
        because: Reason of the limits, for error messages.
    """

    low: int | float = 0
    high: int | float = math.inf
    is_open: bool = False
    also: int | float | None = None
    because: str = ""

    def has(self, number: int | float) -> bool:
        """Returns whether the number is in the range."""
        inside = self.low <= number < self.high or (number == self.high < math.inf and not self.is_open)
        return inside or (self.also is not None and number == self.also)

    def __str__(self) -> str:
        also = "" if self.also is None else f"{_number(self.also)} or "
        if self.high == math.inf:
            return f"{also}at least {_number(self.low)}"
        if self.is_open:
            return f"{also}at least {_number(self.low)} and below {_number(self.high)}"
        return f"{also}between {_number(self.low)} and {_number(self.high)}"


def setting(default: Any, *, resume: Resume = "explicit", **metadata: Any) -> Any:
    """Returns a dataclass field whose metadata says how the setting may change when a run is resumed."""
    return dataclasses.field(default=default, metadata={"resume": resume, **metadata})


def ranged(
    default: Any, high: int | float = math.inf, low: int | float = 0, *, resume: Resume = "explicit", **more: Any
) -> Any:
    """Returns a `setting` of a number, or of a list of numbers, with its range (see `Range`)."""
    return setting(default, resume=resume, range=Range(low=low, high=high, **more))


def like(record: type, name: str, **changes: Any) -> Any:
    """Returns a `setting` with the default and the range of another record's field, up to `changes`."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    return setting(**{"default": field.default, **field.metadata, **changes})


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Checks that a setting is in the range of its field, if the field has one.

    Raises:
        ValueError: The value is outside; names the setting, the value, the range and the default.
    """
    allowed = field.metadata.get("range")
    if allowed is None or value is None:
        return
    if all(allowed.has(number) for number in (value if isinstance(value, tuple) else (value,))):
        return
    each = " each" if isinstance(value, tuple) else ""
    none = " or None" if type(None) in _kinds(field.type) else ""
    because = f": {allowed.because}" if allowed.because else ""
    raise ValueError(
        f"{field.name} must{each} be {allowed}{none}, got {shown(value)}{because}; the default is {field.default}"
    )


def check_text(name: str, value: Any) -> None:
    """Checks that a setting's texts are not empty, and that the system can use them.

    Raises:
        ValueError: A text is empty or contains the character NUL.
    """
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and (not text.strip() or "\0" in text):
            raise ValueError(f"{name} must not be an empty text, got {text!r}; leave it out for its default")


def _number(number: int | float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def shown(value: Any) -> str:
    """Returns a value as text for an error message, shortened: whole numbers may have thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # such a number within a list
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns "; did you mean ...?" with the known names nearest to an unknown one, or an empty text.

    Args:
        name: The unknown name.
        known: Names that there are.
        prefix: What is written before each of them.
    """
    matches = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""


def check_type(name: str, value: Any, kind: Any) -> None:
    """Checks that a setting has a value of its field's type.

    Args:
        name: Name of the setting.
        value: Value of the setting.
        kind: Annotation of the field: bool, int, float, str, None, literals, tuples of these, mappings of texts,
            functions, and unions.

    Raises:
        ValueError: The value has another type.
    """
    if not _fits(value, kind):
        hint = nearest(_unknown(value, kind), _choices(kind))
        kinds = [each for each in _kinds(kind) if not (each is str and is_open(kind))]
        raise ValueError(f"{name} must be {' or '.join(map(_words, kinds))}, got {shown(value)}{hint}")


def as_given(value: Any, kind: Any) -> Any:
    """Converts a value to what its field stores.

    Lists become tuples, a text a tuple of one where a tuple is needed, paths texts, numpy scalars Python numbers, and
    mappings new dicts.
    """
    kinds = [get_origin(each) or each for each in _kinds(kind)]
    if isinstance(value, list) and tuple in kinds:
        return tuple(value)
    if isinstance(value, str) and tuple in kinds and str not in kinds:
        return (value,)
    if isinstance(value, os.PathLike) and str in kinds:
        return os.fspath(value)
    if isinstance(value, Mapping) and dict in kinds:
        return dict(value)
    return value.item() if isinstance(value, np.generic) else value


def as_read(value: Any, kind: Any) -> Any:
    """Converts a value read from YAML or JSON: YAML reads 1e-6 as a text, and a list of one may be one item."""
    kinds = _kinds(kind)
    if isinstance(value, str) and str not in kinds and (float in kinds or int in kinds):
        try:
            return float(value) if float in kinds else int(value)
        except ValueError:
            return value
    origins = [get_origin(each) for each in kinds]
    is_one = (
        not isinstance(value, (list, tuple)) and value is not None and not (bool in kinds and isinstance(value, bool))
    )
    return (value,) if tuple in origins and is_one and str not in kinds else value


def _kinds(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, str) and is_open(kind):
        return value in _choices(kind) or ":" in value
    if len(_kinds(kind)) > 1:
        return any(_fits(value, each) for each in _kinds(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(each, get_args(kind)[0]) for each in value)
    if get_origin(kind) is Callable:
        return callable(value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return value is None if kind is type(None) else isinstance(value, kind)


def is_open(kind: Any) -> bool:
    """Returns whether a setting takes functions and "module:function" references in addition to names."""
    return any(get_origin(each) is Callable for each in _kinds(kind))


def _choices(kind: Any) -> tuple[str, ...]:
    """Returns the words that a literal, or each entry of a list of literals, may be, of all types of a union."""
    inner = (get_args(each)[0] if get_origin(each) is tuple else each for each in _kinds(kind))
    return tuple(word for each in inner if get_origin(each) is Literal for word in get_args(each))


def _unknown(value: Any, kind: Any) -> str:
    """Returns the first text that is none of the choices, or an empty one."""
    texts = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
    return next((text for text in texts if text not in _choices(kind)), "")


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is dict:
        return "a mapping of names to values"
    if get_origin(kind) is Callable:
        return "a function, also by reference as 'module:function'"
    return f"a list with each {_words(get_args(kind)[0])}" if get_origin(kind) is tuple else _WORDS[kind]
