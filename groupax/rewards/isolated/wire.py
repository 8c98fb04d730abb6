"""Values as JSON, for the exchange between the process of the tests and that of the solution.

Scalars are sent as they are, anything else as a list that starts with its kind. Decoding builds only types of the
standard library, so an object that imitates another one cannot be received. Other objects stay in their process, and
the other side receives stand-ins for them.

Mutable containers are numbered in a table that sender and receiver share for one request and its reply, so that
aliases and cycles are preserved, and changes that a function makes to its arguments are sent back.
"""

from __future__ import annotations

import collections
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would slow down the start of each process
    from collections.abc import Callable
    from typing import Any

SCALARS = frozenset({bool, int, float, str, type(None)})
LARGEST = 1 << 63  # larger integers are sent in hexadecimal, as decimal digits take quadratic time and are limited
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
# Types that both sides know by name.
TYPES: dict[str, type] = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, object, type(None))
}
TYPES |= MUTABLE
NAME_OF = {kind: name for name, kind in TYPES.items()}
DATES = {"date": 3, "time": 4, "datetime": 7, "timedelta": 3}  # kind of `datetime` -> number of its integers


class MalformedError(Exception):
    """The other side sent something that is not a value in this form."""


class Record(tuple):
    """A named tuple of the other process: a tuple whose items also have names."""

    _items: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._items:
            raise AttributeError(name)
        return self._items[name]

    def _asdict(self) -> dict[str, Any]:
        return dict(self._items)


class Table:
    """The mutable containers of one exchange, by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.before: list[Any] = []

    def add(self, value: Any) -> int:
        """Adds a container and returns its number."""
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def remember(self) -> None:
        """Saves the contents of the containers, for `changed`."""
        self.before = [_items(each) for each in self.objects]

    def changed(self) -> list[int]:
        """Returns the numbers of the containers whose contents are no longer the saved objects."""
        return [
            number
            for number, (value, before) in enumerate(zip(self.objects, self.before, strict=False))
            if not _same(_items(value), before)
        ]


class Wire:
    """One side's encoder and decoder.

    Args:
        encode_object: Returns the list that refers to an object that cannot be sent as data, or raises TypeError.
        decode_object: Returns the object, or the stand-in, for such a list.
        member: Returns the value of a named field of a named tuple, given its name and the received value.
    """

    def __init__(
        self,
        encode_object: Callable[[Any], list[Any]],
        decode_object: Callable[[list[Any], Table], Any],
        member: Callable[[str, Any], Any],
    ) -> None:
        self.encode_object = encode_object
        self.decode_object = decode_object
        self.member = member

    def encode(self, value: Any, table: Table) -> Any:
        """Returns a value in a form that JSON can represent."""
        kind = type(value)
        if kind in SCALARS:
            return value if kind is not int or -LARGEST < value < LARGEST else ["int", hex(value)]
        if kind in KIND_OF:
            return self._container(KIND_OF[kind], value, table)
        if kind is tuple:
            return ["tuple", self._encode_items(value, table)]
        if kind is type and value in NAME_OF:
            return ["type", NAME_OF[value]]
        return self._encode_other(value, kind, table)

    def contents(self, name: str, value: Any, table: Table) -> list[Any]:
        """Returns the encoded contents of a container."""
        if name == "bytearray":
            return [bytes(value).hex()]
        if name in MAPPINGS:
            return [self._encode_items(list(value), table), self._encode_items(list(value.values()), table)]
        return self._encode_items(list(value), table)

    def decode(self, node: Any, table: Table) -> Any:
        """Returns the value of a node.

        Raises:
            MalformedError: The node is not an encoded value. Building the value may raise other exceptions too.
        """
        if type(node) in SCALARS:
            return node
        if type(node) is not list or not node or type(node[0]) is not str:
            raise MalformedError
        name, rest = node[0], node[1:]
        if name in MUTABLE:
            return self._build(name, rest, table)
        if name == "tuple":
            return tuple(self._decode_items(rest[0], table))
        if name == "ref":
            return table.objects[_index(rest[0])]
        if name in _DECODERS:
            return _DECODERS[name](self, rest, table)
        return self.decode_object(node, table)

    def refill(self, value: Any, payload: Any, table: Table) -> None:
        """Replaces the contents of a container by encoded ones."""
        if type(payload) is not list:
            raise MalformedError
        if isinstance(value, bytearray):
            value[:] = bytes.fromhex(payload[0])
        elif isinstance(value, dict):
            keys, values = (self._decode_items(part, table) for part in payload)
            value.clear()
            for key, each in zip(keys, values, strict=True):
                value[key] = each
        else:
            items = self._decode_items(payload, table)
            value.clear()
            value.update(items) if isinstance(value, set) else value.extend(items)

    def _encode_items(self, values: Any, table: Table) -> list[Any]:
        kinds = set(map(type, values))
        if kinds <= SCALARS and (int not in kinds or all(type(v) is not int or -LARGEST < v < LARGEST for v in values)):
            return list(values)
        return [self.encode(value, table) for value in values]

    def _decode_items(self, nodes: Any, table: Table) -> list[Any]:
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

    def _encode_other(self, value: Any, kind: type, table: Table) -> list[Any]:
        """Encodes rarer types, then subclasses of known types, which are sent as their base class."""
        module = kind.__module__
        if isinstance(value, bytes):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, frozenset):
            return ["frozenset", self._encode_items(list(value), table)]
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
            fields, items = getattr(kind, "_fields", None), self._encode_items(list(value), table)
            fields = list(value._items) if isinstance(value, Record) else fields
            return ["record", list(fields), items] if fields else ["tuple", items]
        for base, name in KIND_OF.items():
            if isinstance(value, base):
                return self._container(name, value, table)
        return self.encode_object(value)


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
    record = Record(wire._decode_items(items, table))
    record._items = {name: wire.member(name, item) for name, item in zip(fields, record, strict=True)}
    return record


def _slice_parts(wire: Wire, rest: list[Any], table: Table) -> list[Any]:
    start, stop, step = wire._decode_items(rest[0], table)
    return [start, stop, step]


_DECODERS: dict[str, Callable[[Wire, list[Any], Table], Any]] = {
    "int": lambda _w, rest, _t: int(rest[0], 16),
    "bytes": lambda _w, rest, _t: bytes.fromhex(rest[0]),
    "complex": lambda _w, rest, _t: complex(rest[0], rest[1]),
    "frozenset": lambda w, rest, t: frozenset(w._decode_items(rest[0], t)),
    "range": lambda w, rest, t: range(*_slice_parts(w, rest, t)),
    "slice": lambda w, rest, t: slice(*_slice_parts(w, rest, t)),
    "ellipsis": lambda _w, _encode_other, _t: Ellipsis,
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
    """Returns a received index, which must not count from the end."""
    if type(value) is not int or value < 0:
        raise MalformedError
    return value


def _items(value: Any) -> Any:
    """Returns the objects in a container, not encoded."""
    if isinstance(value, bytearray):
        return bytes(value)
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _same(some: Any, others: Any) -> bool:
    if isinstance(some, bytes):
        return some == others
    return len(some) == len(others) and all(map(_is, some, others))


def _is(one: Any, other: Any) -> bool:
    return one is other
