"""Declaration, checks and conversions of settings, by the types and ranges of their fields. Imports no jax."""

import dataclasses
import difflib
import json
import math
import numbers
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

# How a setting may change when a run is resumed: freely, only where `resume` names the checkpoint, never, or only
# between values that are not 0.
Resume = Literal["free", "explicit", "fixed", "fixed_zero"]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "None"}
_WORDS |= {Path: "a path"}
LISTS = (tuple, Collection, Sequence)  # origins of the types of lists
_NUMBERS = {int: numbers.Integral, float: numbers.Real}


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a setting may be; infinite ones and NaN are never allowed."""

    low: int | float = 0  # smallest allowed number
    high: int | float = math.inf  # largest allowed number; infinite for no limit
    is_open: bool = False  # `high` itself is excluded
    also: int | float | None = None  # one more allowed number
    because: str = ""  # reason of the limits, for error messages

    def has(self, number: int | float) -> bool:
        """Returns whether the number is in the range."""
        inside = self.low <= number < self.high or (number == self.high < math.inf and not self.is_open)
        return inside or (self.also is not None and number == self.also)

    def __str__(self) -> str:
        bounds = self.low, self.high, 0 if self.also is None else self.also
        low, high, also = (f"{each:,}" if isinstance(each, int) else f"{each:g}" for each in bounds)
        limits = f"at least {low} and below {high}" if self.is_open else f"between {low} and {high}"
        return ("" if self.also is None else f"{also} or ") + (f"at least {low}" if self.high == math.inf else limits)


def setting(default: Any, *, resume: Resume = "explicit", **metadata: Any) -> Any:
    """Returns a dataclass field whose metadata says how the setting may change when a run is resumed."""
    return dataclasses.field(default=default, metadata={"resume": resume, **metadata})


def ranged(
    default: Any, high: int | float = math.inf, low: int | float = 0, *, resume: Resume = "explicit", **more: Any
) -> Any:
    """Returns a `setting` of a number, or of a list of numbers, with its range (see `Range`)."""
    return setting(default, resume=resume, range=Range(low=low, high=high, **more))


def patterned(high: int | float, low: int | float) -> Any:
    """Returns a `setting` of numbers by patterns of names, by default of none, with the range of the numbers."""
    return dataclasses.field(default_factory=dict, metadata={"resume": "explicit", "range": Range(low=low, high=high)})


def like(record: type, name: str, **changes: Any) -> Any:
    """Returns a `setting` with the default and the range of another record's field, up to `changes`."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    return setting(**{"default": field.default, **field.metadata, **changes})


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises a ValueError if a setting is outside of the range of its field."""
    allowed, is_list = field.metadata.get("range"), isinstance(value, (tuple, Mapping))
    values = value.values() if isinstance(value, Mapping) else value if is_list else (value,)
    if allowed is None or value is None or all(map(allowed.has, values)):
        return
    each, none = " each" * is_list, " or None" * (type(None) in kinds_of(field.type))
    because = f": {allowed.because}" if allowed.because else ""
    default = {} if isinstance(value, Mapping) else field.default
    raise ValueError(
        f"{field.name} must{each} be {allowed}{none}, got {shown(value)}{because}; the default is {default}"
    )


def check_text(name: str, value: Any) -> None:
    """Raises a ValueError if a setting's text is empty or has a NUL, which the system cannot use."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and (not text.strip() or "\0" in text):
            raise ValueError(f"{name} must not be an empty text, got {text!r}; leave it out for its default")


def check_json(value: Any, where: str) -> None:
    """Raises a ValueError if a value cannot be written as JSON in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair, which is not a character; remove it") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} has a value that JSON cannot represent ({error}); make it a text or a number"
        ) from error


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
    """Returns "; did you mean ...?" with the known names nearest to an unknown one, each after a prefix; or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""


def check_known(name: str, known: Collection[str], fault: str) -> None:
    """Raises a ValueError that lists the known names, and the nearest, if a name is none of them."""
    if name not in known:
        raise ValueError(f"{fault}; choose from {', '.join(known)}{nearest(name, known)}")


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raises a ValueError if the value of a setting does not have its field's type.

    Types are bool, int, float, str, Path, None, literals, tuples of these, mappings, functions, and unions.
    """
    if _fits(value, kind):
        return
    words = choices_of(kind)
    texts = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
    unknown = next((text for text in texts if text not in words), "")
    kinds = [each for each in kinds_of(kind) if not (each is str and is_open(kind))]
    raise ValueError(f"{name} must be {' or '.join(map(_words, kinds))}, got {shown(value)}{nearest(unknown, words)}")


def as_given(value: Any, kind: Any) -> Any:
    """Converts a value to what its field stores.

    Lists become tuples, a text a tuple of one where a tuple is needed, paths texts, numpy scalars Python numbers, and
    mappings new dicts.
    """
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    origins = [get_origin(each) or each for each in kinds_of(kind)]
    if isinstance(value, list) and tuple in origins:
        return tuple(value)
    if isinstance(value, str) and tuple in origins and str not in origins:
        return (value,)
    if isinstance(value, os.PathLike) and str in origins:
        return os.fspath(value)
    if isinstance(value, Mapping) and dict in origins:
        return dict(value)
    return value


def as_read(value: Any, kind: Any) -> Any:
    """Converts a value read from YAML or JSON: YAML reads 1e-6 as a text, and a list of one may be one item."""
    kinds = kinds_of(kind)
    if isinstance(value, str) and str not in kinds and (float in kinds or int in kinds):
        return _from_text(value, kinds)
    is_many = isinstance(value, (list, tuple, Mapping, types.NoneType)) or (bool in kinds and value in (0, 1))
    return (value,) if not is_many and takes_many(kind) and str not in kinds else value


def from_texts(texts: Sequence[str], kind: Any) -> Any:
    """Converts the texts that follow a flag to a value of its type, or to one that `check_type` refuses.

    Raises a ValueError if a mapping is not written as JSON, or a key has no value.
    """
    kinds = kinds_of(kind)
    if get_origin(kind) is dict:
        return read_mapping(texts[0])
    if get_origin(kind) is Mapping:
        keys, values = get_args(kind)
        if len(texts) % 2:
            raise ValueError(f"{texts[-1]} has no value; write pairs of a key and its value")
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return {_from_text(key, (keys,)): _from_text(value, (values,)) for key, value in pairs}
    if bool in kinds and len(texts) <= 1 and "".join(texts).lower() in ("", "true", "false"):
        return "".join(texts).lower() != "false"
    if takes_many(kind) and not (list(texts) == ["None"] and type(None) in kinds):
        [inner] = [get_args(each)[0] for each in kinds if takes_many(each)]
        return tuple(_from_text(text, kinds_of(inner)) for text in texts)
    return _from_text(texts[0], kinds)


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def takes_many(kind: Any) -> bool:
    """Returns whether a setting may be a list."""
    return any(get_origin(each) in (*LISTS, Mapping) for each in kinds_of(kind))


def is_open(kind: Any) -> bool:
    """Returns whether a setting takes functions and "module:function" references in addition to names."""
    return any(get_origin(each) is Callable for each in kinds_of(kind))


def choices_of(kind: Any) -> tuple[str, ...]:
    """Returns the words that a literal, or each entry of a list of literals, may be, of all types of a union."""
    inner = (get_args(each)[0] if get_origin(each) is tuple else each for each in kinds_of(kind))
    return tuple(word for each in inner if get_origin(each) is Literal for word in get_args(each))


def _from_text(text: str, kinds: Sequence[Any]) -> Any:
    if text == "None" and type(None) in kinds:
        return None
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                pass
    return Path(text) if Path in kinds else text


def read_mapping(text: str) -> dict[str, Any]:
    """Returns the mapping that a flag has as JSON."""
    example = """e.g. '{"enable_thinking": false}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text:.100} is not JSON ({error}); write an object, {example}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text:.100} is not a JSON object; write one, {example}")
    return value


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, str) and is_open(kind):
        return value in choices_of(kind) or ":" in value
    if len(kinds_of(kind)) > 1:
        return any(_fits(value, each) for each in kinds_of(kind))
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin in LISTS:
        is_list = isinstance(value, tuple) and all(_fits(each, inner[0]) for each in value)
        return is_list and (len(inner) == 1 or inner[1] is ... or len(value) == len(inner))
    if origin is Callable:
        return callable(value)
    if origin in (dict, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else ()
        fits = (_fits(key, inner[0]) and (inner[1] is Any or _fits(each, inner[1])) for key, each in pairs)
        return isinstance(value, Mapping) and all(fits)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return value is None if kind is type(None) else isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, inner = get_origin(kind), list(get_args(kind))
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin in (dict, Mapping):
        each = "" if inner[1] is Any else f", each {' or '.join(map(_words, kinds_of(inner[1])))}"
        return f"a mapping of names to values{each}"
    if origin is Callable:
        return "a function, also by reference as 'module:function'"
    if origin in LISTS:
        number = f" of {len(inner)}" if len(inner) > 1 and inner[1] is not ... else ""
        return f"a list{number} with each {_words(inner[0])}"
    return _WORDS[kind]
