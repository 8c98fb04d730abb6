"""The data that the processes of the tests and of the solution exchange, in a form that JSON can represent.

Scalars are sent as they are, other data as lists that begin with their kind. Decoding builds only types of the standard
library, so that an object that imitates another one cannot be received.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

SCALARS = frozenset({bool, int, float, str, type(None)})
MAPPINGS: dict[str, Any] = {
    kind.__name__: kind for kind in (collections.Counter, collections.OrderedDict, collections.defaultdict, dict)
}
SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, set, frozenset, collections.deque, tuple)}
BYTES: dict[str, Any] = {"bytes": bytes, "bytearray": bytearray}
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))  # sent as lists
MUTABLE = (list, dict, set, bytearray, collections.deque)
TYPES: dict[str, type] = {kind.__name__: kind for kind in (*SCALARS, complex, range, object)}
CONTAINERS = MAPPINGS | SEQUENCES | BYTES
TYPES |= CONTAINERS
_DAY, _TIME = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
# Types that are sent as the arguments of their constructors: their modules, and attributes of a value.
PARTS = {
    "range": ("builtins", ("start", "stop", "step")),
    "complex": ("builtins", ("real", "imag")),
    "Fraction": ("fractions", ("numerator", "denominator")),
    "Decimal": ("decimal", ()),  # as text
    "date": ("datetime", _DAY),
    "time": ("datetime", _TIME),
    "datetime": ("datetime", (*_DAY, *_TIME)),
    "timedelta": ("datetime", ("days", "seconds", "microseconds")),
}
BUILTIN_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not name.endswith("Group")
}


class Peer:
    """One end of the two pipes, with the form of data that both ends know.

    Args:
        reader: The pipe from the other end.
        writer: The pipe to it.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.classes: dict[str, type] = {}  # of the tests, whose instances the solution has received
        self.error_kinds: dict[tuple[str, ...], type[BaseException]] = {}
        sys.set_int_max_str_digits(0)  # integers are sent in decimal digits

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object that is not data; raises TypeError if it may not be sent."""
        raise NotImplementedError

    def decode_object(self, kind: str, parts: list[Any]) -> Any:
        """Returns what stands on this side for an object that is not data."""
        raise NotImplementedError

    def class_named(self, name: str) -> type:
        """Returns this side's class of an instance whose attributes were received."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Returns a value in a form that JSON can represent; subclasses of known types as their base class."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        kind = type(value)
        for name, base in CONTAINERS.items():
            if isinstance(value, base) and not self.is_kept(value):
                if isinstance(value, dict):
                    return [name, self.encode_all(value), self.encode_all(value.values())]
                if isinstance(value, (bytes, bytearray)):
                    return [name, value.hex()]
                fields = [list(kind._fields)] if hasattr(kind, "_fields") else []  # of a named tuple
                return [name, self.encode_all(value), *fields]
        if isinstance(value, BaseException):
            return ["error", self._error_names(kind), self.encode_all(value.args)]
        if isinstance(value, type) and value in TYPES.values():
            return ["type", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error type", self._error_names(value)]
        if self.classes.get(kind.__name__) is kind:
            return ["instance", kind.__name__, list(vars(value)), self.encode_all(vars(value).values())]
        module, attributes = PARTS.get(kind.__name__, ("", ()))
        if module == kind.__module__ and getattr(value, "tzinfo", None) is None:
            return [kind.__name__, [getattr(value, name) for name in attributes] or [str(value)]]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return ["array", self.encode(value.tolist())] if value.ndim else self.encode(value.tolist())
        return self.encode(list(value)) if isinstance(value, VIEWS) else self.encode_object(value)

    def encode_all(self, values: Iterable[Any]) -> list[Any]:
        """Returns several values in this form."""
        values = list(values)
        return values if set(map(type, values)) <= SCALARS else [self.encode(value) for value in values]

    def decode(self, node: Any) -> Any:
        """Returns the value of a node; raises any exception if it is not an encoded value."""
        if type(node) in SCALARS:
            return node
        match node:
            case [str() as name, list() as items] if name in SEQUENCES:
                return SEQUENCES[name](self.decode_all(items))
            case ["tuple", list() as items, list() as fields]:
                return collections.namedtuple("record", fields)(*self.decode_all(items))
            case [str() as name, list() as keys, list() as values] if name in MAPPINGS:
                made = MAPPINGS[name]()
                for key, value in zip(self.decode_all(keys), self.decode_all(values), strict=True):
                    made[key] = value
                return made
            case [str() as name, str() as text] if name in BYTES:
                return BYTES[name].fromhex(text)
            case [str() as name, list() as parts] if name in PARTS and set(map(type, parts)) <= SCALARS:
                return getattr(importlib.import_module(PARTS[name][0]), name)(*parts)
            case ["array", items]:
                return importlib.import_module("numpy").array(self.decode(items))
            case ["type", str() as name]:
                return TYPES[name]
            case ["error type", list() as names]:
                return self._error_kind(names)
            case ["error", list() as names, list() as args]:
                kind = self._error_kind(names)
                try:
                    return kind(*self.decode_all(args))
                except TypeError:  # its constructor takes other arguments
                    return kind.__new__(kind, *self.decode_all(args))
            case ["instance", str() as name, list() as names, list() as values]:
                made = object.__new__(self.class_named(name))
                vars(made).update(zip(names, self.decode_all(values), strict=True))
                return made
            case [str() as kind, *parts]:
                return self.decode_object(kind, parts)
        raise ValueError("a node of no known kind")

    def decode_all(self, nodes: list[Any]) -> list[Any]:
        """Returns the values of several nodes."""
        return nodes if set(map(type, nodes)) <= SCALARS else [self.decode(node) for node in nodes]

    def is_kept(self, _value: Any) -> bool:
        """Returns whether a container stays on this side."""
        return False

    def _error_names(self, kind: type[BaseException]) -> list[str]:
        """Returns the names of an exception class and its base classes up to the first built-in one."""
        names = []
        for each in kind.__mro__:
            names.append(each.__name__)
            if BUILTIN_ERRORS.get(each.__name__) is each:
                break
        self.error_kinds.setdefault(tuple(names), kind)  # it may come back
        return names

    def _error_kind(self, names: list[str]) -> type[BaseException]:
        """Returns the exception class of these names; other classes than built-in ones are made once."""
        if len(names) == 1:
            return BUILTIN_ERRORS[names[0]]
        key = tuple(names)
        if key not in self.error_kinds:
            self.error_kinds[key] = type(names[0], (self._error_kind(names[1:]),), {"__module__": "solution"})
        return self.error_kinds[key]
