"""Values as JSON: what can cross between the process of the tests and that of the solution.

A scalar stands for itself, anything else is a list that begins with its kind. Decoding builds only types of the
standard library, so an object that claims to be something cannot arrive. Objects that do not cross are held by their
owner, and stand-ins are made of them.

Containers that can change are numbered in a table that sender and receiver share for one request and its reply, so
that aliases and cycles survive, and changes that a function makes to its arguments come back.
"""

from __future__ import annotations

import collections
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # what `typing` and others import would lengthen the start of each process
    from collections.abc import Callable
    from typing import Any

SCALARS = frozenset({bool, int, float, str, type(None)})
LARGEST = 1 << 63  # integers beyond it are sent in hexadecimal: decimal digits take quadratic time, and are limited
SEQUENCES = {"list": list, "deque": collections.deque}
MAPPINGS = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}
MUTABLE: dict[str, type] = {**SEQUENCES, **MAPPINGS, "set": set, "bytearray": bytearray}
KIND_OF = {kind: name for name, kind in MUTABLE.items()}
VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
# Types that are known by name on both sides.
TYPES: dict[str, type] = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, object, type(None))
}
TYPES |= MUTABLE
NAME_OF = {kind: name for name, kind in TYPES.items()}
DATES = {"date": 3, "time": 4, "datetime": 7, "timedelta": 3}  # kind of `datetime` -> the number of its integers


class MalformedError(Exception):
    """What came is no value in this form."""


class Record(tuple):
    """A named tuple of the other process: a tuple whose items have names too."""

    _items: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._items:
            raise AttributeError(name)
        return self._items[name]

    def _asdict(self) -> dict[str, Any]:
        return dict(self._items)


class Table:
    """The containers of one exchange that can change, by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.before: list[Any] = []

    def add(self, value: Any) -> int:
        """Numbers a container."""
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def remember(self) -> None:
        """Notes what the containers hold, for `changed`."""
        self.before = [_items(each) for each in self.objects]

    def changed(self) -> list[int]:
        """Returns the numbers of those that hold other objects than were noted."""
        return [
            number
            for number, (value, before) in enumerate(zip(self.objects, self.before, strict=False))
            if not _same(_items(value), before)
        ]


class Wire:
    """One side's encoder and decoder.

    Args:
        hold: Returns the list that stands for an object which does not cross, or raises TypeError.
        held: Returns the object, or the stand-in, for such a list.
        named: Returns what is to stand under a name of a named tuple.
    """

    def __init__(
        self,
        hold: Callable[[Any], list[Any]],
        held: Callable[[list[Any], Table], Any],
        named: Callable[[str, Any], Any],
    ) -> None:
        self.hold = hold
        self.held = held
        self.named = named

    def encode(self, value: Any, table: Table) -> Any:
        """Returns a value as what JSON can hold."""
        kind = type(value)
        if kind in SCALARS:
            return value if kind is not int or -LARGEST < value < LARGEST else ["int", hex(value)]
        if kind in KIND_OF:
            return self._container(KIND_OF[kind], value, table)
        if kind is tuple:
            return ["tuple", self._all(value, table)]
        if kind is type and value in NAME_OF:
            return ["type", NAME_OF[value]]
        return self._rest(value, kind, table)

    def contents(self, name: str, value: Any, table: Table) -> list[Any]:
        """Returns what a container holds."""
        if name == "bytearray":
            return [bytes(value).hex()]
        if name in MAPPINGS:
            return [self._all(list(value), table), self._all(list(value.values()), table)]
        return self._all(list(value), table)

    def decode(self, node: Any, table: Table) -> Any:
        """Returns the value; raises MalformedError, or whatever building a value from a wrong description raises."""
        if type(node) in SCALARS:
            return node
        if type(node) is not list or not node or type(node[0]) is not str:
            raise MalformedError
        name, rest = node[0], node[1:]
        if name in MUTABLE:
            return self._build(name, rest, table)
        if name == "tuple":
            return tuple(self._every(rest[0], table))
        if name == "ref":
            return table.objects[_index(rest[0])]
        if name in _READERS:
            return _READERS[name](self, rest, table)
        return self.held(node, table)

    def refill(self, value: Any, payload: Any, table: Table) -> None:
        """Gives a container other contents."""
        if type(payload) is not list:
            raise MalformedError
        if isinstance(value, bytearray):
            value[:] = bytes.fromhex(payload[0])
        elif isinstance(value, dict):
            keys, values = (self._every(part, table) for part in payload)
            value.clear()
            for key, each in zip(keys, values, strict=True):
                value[key] = each
        else:
            items = self._every(payload, table)
            value.clear()
            value.update(items) if isinstance(value, set) else value.extend(items)

    def _all(self, values: Any, table: Table) -> list[Any]:
        kinds = set(map(type, values))
        if kinds <= SCALARS and (int not in kinds or all(type(v) is not int or -LARGEST < v < LARGEST for v in values)):
            return list(values)
        return [self.encode(value, table) for value in values]

    def _every(self, nodes: Any, table: Table) -> list[Any]:
        if type(nodes) is not list:
            raise MalformedError
        return nodes if set(map(type, nodes)) <= SCALARS else [self.decode(node, table) for node in nodes]

    def _container(self, name: str, value: Any, table: Table) -> list[Any]:
        if id(value) in table.numbers:
            return ["ref", table.numbers[id(value)]]
        number = table.add(value)
        extra = {"deque": "maxlen", "defaultdict": "default_factory"}.get(name)
        options = [self.encode(getattr(value, extra), table)] if extra else []
        return [name, number, self.contents(name, value, table), *options]

    def _build(self, name: str, rest: list[Any], table: Table) -> Any:
        number, payload, *options = rest
        value: Any = MUTABLE[name]()
        if number != table.add(value):
            raise MalformedError
        if name == "deque" and options[0] is not None:
            table.objects[number] = value = collections.deque(maxlen=_index(options[0]))
            table.numbers[id(value)] = number
        if name == "defaultdict":
            value.default_factory = self.decode(options[0], table)
        self.refill(value, payload, table)
        return value

    def _rest(self, value: Any, kind: type, table: Table) -> list[Any]:
        """What is rarer, then subclasses of what is known, which cross as what they extend."""
        module = kind.__module__
        if isinstance(value, bytes):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, frozenset):
            return ["frozenset", self._all(list(value), table)]
        if isinstance(value, (range, slice)):
            parts = [self.encode(part, table) for part in (value.start, value.stop, value.step)]
            return ["range" if isinstance(value, range) else "slice", parts]
        if value is Ellipsis:
            return ["ellipsis"]
        if kind in VIEWS:
            return ["view", VIEWS[kind], self.encode(list(value), table)]
        if module == "decimal" and kind.__name__ == "Decimal":
            return ["Decimal", str(value)]
        if module == "fractions" and kind.__name__ == "Fraction":
            return ["Fraction", hex(value.numerator), hex(value.denominator)]
        if module == "datetime" and kind.__name__ in DATES and getattr(value, "tzinfo", None) is None:
            return ["datetime", kind.__name__, list(_date_parts(value, kind.__name__))]
        if kind is type(sys):
            return ["module", value.__name__]
        if module.partition(".")[0] == "numpy" and hasattr(value, "dtype"):
            return _encode_array(self, value, table)
        return self._subclass(value, kind, table)

    def _subclass(self, value: Any, kind: type, table: Table) -> Any:
        if isinstance(value, str):
            return self.encode(str.__str__(value), table)
        if isinstance(value, (int, float)):
            return self.encode(int.__pos__(value) if isinstance(value, int) else float.__pos__(value), table)
        if isinstance(value, tuple):
            fields, items = getattr(kind, "_fields", None), self._all(list(value), table)
            fields = list(value._items) if isinstance(value, Record) else fields
            return ["record", list(fields), items] if fields else ["tuple", items]
        for base, name in KIND_OF.items():
            if isinstance(value, base):
                return self._container(name, value, table)
        return self.hold(value)


def _encode_array(wire: Wire, value: Any, table: Table) -> Any:
    if not hasattr(value, "tobytes") or value.dtype.kind not in "biufcSUmM":
        return wire.encode(value.tolist(), table)
    if not hasattr(value, "__len__") or value.ndim == 0:
        return wire.encode(value.item(), table)
    return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]


def _decode_array(_wire: Wire, rest: list[Any], _table: Table) -> Any:
    import numpy as np

    dtype, shape, data = rest
    kind = np.dtype(dtype)
    if kind.kind not in "biufcSUmM":
        raise MalformedError
    return np.frombuffer(bytes.fromhex(data), kind).reshape([_index(size) for size in shape]).copy()


def _decode_date(_wire: Wire, rest: list[Any], _table: Table) -> Any:
    import datetime

    name, parts = rest
    if len(parts) != DATES[name]:
        raise MalformedError
    return getattr(datetime, name)(*parts)


def _decode_decimal(_wire: Wire, rest: list[Any], _table: Table) -> Any:
    import decimal

    return decimal.Decimal(rest[0])


def _decode_fraction(_wire: Wire, rest: list[Any], _table: Table) -> Any:
    import fractions

    return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))


def _decode_view(wire: Wire, rest: list[Any], table: Table) -> Any:
    name, items = rest[0], wire.decode(rest[1], table)
    if name == "keys":
        return dict.fromkeys(items).keys()
    return dict(enumerate(items)).values() if name == "values" else dict(items).items()


def _decode_record(wire: Wire, rest: list[Any], table: Table) -> Any:
    fields, items = rest
    record = Record(wire._every(items, table))
    record._items = {name: wire.named(name, item) for name, item in zip(fields, record, strict=True)}
    return record


def _parts(wire: Wire, rest: list[Any], table: Table) -> list[Any]:
    start, stop, step = wire._every(rest[0], table)
    return [start, stop, step]


_READERS: dict[str, Callable[[Wire, list[Any], Table], Any]] = {
    "int": lambda _w, rest, _t: int(rest[0], 16),
    "bytes": lambda _w, rest, _t: bytes.fromhex(rest[0]),
    "complex": lambda _w, rest, _t: complex(rest[0], rest[1]),
    "frozenset": lambda w, rest, t: frozenset(w._every(rest[0], t)),
    "range": lambda w, rest, t: range(*_parts(w, rest, t)),
    "slice": lambda w, rest, t: slice(*_parts(w, rest, t)),
    "ellipsis": lambda _w, _rest, _t: Ellipsis,
    "type": lambda _w, rest, _t: TYPES[rest[0]],
    "Decimal": _decode_decimal,
    "Fraction": _decode_fraction,
    "datetime": _decode_date,
    "array": _decode_array,
    "view": _decode_view,
    "record": _decode_record,
}


def _date_parts(value: Any, name: str) -> tuple[int, ...]:
    if name == "timedelta":
        return value.days, value.seconds, value.microseconds
    day = (value.year, value.month, value.day) if name != "time" else ()
    return day if name == "date" else (*day, value.hour, value.minute, value.second, value.microsecond)


def _index(value: Any) -> int:
    """A number that came, which must not count from the end."""
    if type(value) is not int or value < 0:
        raise MalformedError
    return value


def _items(value: Any) -> Any:
    """The objects in a container, as they are."""
    if isinstance(value, bytearray):
        return bytes(value)
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _same(some: Any, others: Any) -> bool:
    if isinstance(some, bytes):
        return some == others
    return len(some) == len(others) and all(map(_is, some, others))


def _is(one: Any, other: Any) -> bool:
    return one is other
