"""The exchange between the process of the tests and that of the solution: requests on two pipes.

A frame is a length of 8 bytes, followed by JSON. A request names an operation and its arguments. While a process waits
for the reply, it serves requests of the other one, so that a function of the tests that the solution calls may call the
solution again. A reply names the number of its request. Printed text is sent with every frame.

Scalars are sent as they are, anything else as a list that starts with its kind. Decoding builds only types of the
standard library, so an object that imitates another one cannot be received. Other objects stay in their process, and
the other side receives stand-ins for them.

Mutable containers are numbered in a table that sender and receiver share for one request and its reply, so that
aliases and cycles are preserved, and changes that a function makes to its arguments are sent back.
"""

from __future__ import annotations

import _thread
import builtins
import collections
import json
import operator
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would slow down the start of each process
    from collections.abc import Callable
    from typing import Any

MAX_FRAME_BYTES = 32 << 20
MAX_OUTPUT_CHARS = 1 << 20

# -- values

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
_DAY, _TIME = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
# Kind of `datetime` -> the attributes that are its arguments.
DATES = {"date": _DAY, "time": _TIME, "datetime": (*_DAY, *_TIME), "timedelta": ("days", "seconds", "microseconds")}
ARRAYS = "biufcSUmM"  # kinds of dtypes that are sent as bytes


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
        pairs = enumerate(zip(self.objects, self.before, strict=False))
        return [number for number, (value, before) in pairs if not _same(_items(value), before)]


class Wire:
    """One side's encoder and decoder.

    Args:
        peer: The side, which encodes and decodes the objects that cannot be sent as data.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def encode(self, value: Any, table: Table) -> Any:
        """Returns a value in a form that JSON can represent; subclasses of known types as their base class."""
        kind = type(value)
        if kind in SCALARS:
            return value if kind is not int or -LARGEST < value < LARGEST else ["int", hex(value)]
        if kind in KIND_OF:
            return self._container(KIND_OF[kind], value, table)
        if kind is tuple:
            return ["tuple", self._encode_items(value, table)]
        if kind is type and value in NAME_OF:
            return ["type", NAME_OF[value]]
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
        if kind is type(sys):
            return ["module", value.__name__]
        module = kind.__module__
        if module == "decimal" and kind.__name__ == "Decimal":
            return ["Decimal", str(value)]
        if module == "fractions" and kind.__name__ == "Fraction":
            return ["Fraction", hex(value.numerator), hex(value.denominator)]
        if module == "datetime" and kind.__name__ in DATES and getattr(value, "tzinfo", None) is None:
            return ["datetime", kind.__name__, [getattr(value, part) for part in DATES[kind.__name__]]]
        if module.partition(".")[0] == "numpy" and hasattr(value, "dtype"):
            return self._encode_array(value, table)
        if isinstance(value, str):
            return self.encode(str.__str__(value), table)
        if isinstance(value, int):
            return self.encode(int.__pos__(value), table)
        if isinstance(value, float):
            return self.encode(float.__pos__(value), table)
        if isinstance(value, tuple):
            fields, items = getattr(kind, "_fields", None), self._encode_items(list(value), table)
            fields = list(value._items) if isinstance(value, Record) else fields
            return ["record", list(fields), items] if fields else ["tuple", items]
        for base, name in KIND_OF.items():
            if isinstance(value, base):
                return self._container(name, value, table)
        return self.peer.encode_object(value)

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
        match node:
            case [name, number, payload, *options] if name in MUTABLE:
                return self._build(name, number, payload, options, table)
            case ["tuple", items]:
                return tuple(self._decode_items(items, table))
            case ["ref", number]:
                return table.objects[_index(number)]
            case ["int", text]:
                return int(text, 16)
            case ["bytes", text]:
                return bytes.fromhex(text)
            case ["complex", real, imaginary]:
                return complex(real, imaginary)
            case ["frozenset", items]:
                return frozenset(self._decode_items(items, table))
            case ["range" | "slice" as name, [_, _, _] as parts]:
                return (range if name == "range" else slice)(*self._decode_items(parts, table))
            case ["ellipsis"]:
                return Ellipsis
            case ["type", name]:
                return TYPES[name]
            case ["Decimal", text]:
                import decimal

                return decimal.Decimal(text)
            case ["Fraction", above, below]:
                import fractions

                return fractions.Fraction(int(above, 16), int(below, 16))
            case ["datetime", name, parts] if len(parts) == len(DATES[name]):
                import datetime

                return getattr(datetime, name)(*parts)
            case ["array", dtype, shape, data]:
                import numpy as np

                kind = np.dtype(dtype)
                if kind.kind not in ARRAYS:
                    raise MalformedError
                return np.frombuffer(bytes.fromhex(data), kind).reshape([_index(size) for size in shape]).copy()
            case ["view", name, items]:
                items = self.decode(items, table)
                if name == "keys":
                    return dict.fromkeys(items).keys()
                return dict(enumerate(items)).values() if name == "values" else dict(items).items()
            case ["record", fields, items]:
                record = Record(self._decode_items(items, table))
                pairs = zip(fields, record, strict=True)
                record._items = {name: self.peer.member(name, item) for name, item in pairs}
                return record
            case _:
                return self.peer.decode_object(node, table)

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

    def _encode_array(self, value: Any, table: Table) -> Any:
        if not hasattr(value, "tobytes") or value.dtype.kind not in ARRAYS:
            return self.encode(value.tolist(), table)
        if not hasattr(value, "__len__") or value.ndim == 0:
            return self.encode(value.item(), table)
        return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]

    def _container(self, name: str, value: Any, table: Table) -> list[Any]:
        if id(value) in table.numbers:
            return ["ref", table.numbers[id(value)]]
        number = table.add(value)
        extra = {"deque": "maxlen", "defaultdict": "default_factory"}.get(name)
        options = [self.encode(getattr(value, extra), table)] if extra else []
        return [name, number, self.contents(name, value, table), *options]

    def _build(self, name: str, number: Any, payload: Any, options: list[Any], table: Table) -> Any:
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
    return (
        some == others if isinstance(some, bytes) else len(some) == len(others) and all(map(operator.is_, some, others))
    )


# -- stand-ins for the objects of the other process, and the operators that they pass on to it

UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "matmul")
BINARY += ("divmod",)
COMPARISONS = ("lt", "le", "gt", "ge")
# Special methods that the other side executes with no operand but the object, and the functions that do so there.
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "round": round,
    "reversed": reversed,
    "enter": lambda value: value.__enter__(),
    "exit": lambda value, *how: value.__exit__(*how),
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
}
OPERATORS: dict[str, Callable[..., Any]] = {
    **CONVERSIONS,
    **{name: getattr(operator, f"__{name}__") for name in (*UNARY, *BINARY[:-1], *COMPARISONS, "eq", "contains")},
    "divmod": divmod,
}
OPERANDS = frozenset({*BINARY, *COMPARISONS})


class StandIn:
    """A stand-in for an object of the other process, which executes all operations there.

    Args:
        peer: The `Peer` that is connected to the other process.
        number: Number of the object there.
        rights: What the tests may do with it (see `test_process`).
    """

    __slots__ = ("__weakref__", "_groupax_number", "_groupax_peer", "_groupax_rights")

    def __init__(self, peer: Any, number: int, rights: str = "") -> None:
        object.__setattr__(self, "_groupax_peer", peer)
        object.__setattr__(self, "_groupax_number", number)
        object.__setattr__(self, "_groupax_rights", rights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._groupax_peer.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_groupax"):
            raise AttributeError(name)
        return self._groupax_peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._groupax_peer.request("setattr", self, name, value)

    def __mro_entries__(self, _bases: Any) -> Any:
        raise TypeError("a class of the other process cannot be extended")

    def __copy__(self) -> Any:
        return self._groupax_peer.request("copy", self)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self._groupax_peer.request("deepcopy", self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn) or other._groupax_peer is not self._groupax_peer:
            return False  # not left to the other side, which would answer yes to everything
        if other._groupax_number == self._groupax_number:
            return True
        return self._groupax_peer.request("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._groupax_peer.request("hash", self)

    def __contains__(self, item: Any) -> bool:
        peer = self._groupax_peer
        return peer.contains(self, item)

    def __iter__(self) -> Any:
        return self._groupax_peer.request("iter", self)

    def __exit__(self, *how: Any) -> bool:
        self._groupax_peer.request("exit", self, None, None, None)
        return False  # no exception of the tests is suppressed

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._groupax_peer.request("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._groupax_peer.request("issubclass", value, self) is True


def _operation(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any) -> Any:
        return self._groupax_peer.operate(self, name, args, is_reflected)

    return method


for _name in {*OPERATORS} - {"eq", "hash", "iter", "contains", "exit"}:
    setattr(StandIn, f"__{_name}__", _operation(_name))
for _name in BINARY:
    setattr(StandIn, f"__r{_name}__", _operation(_name, is_reflected=True))


# -- requests

ITERATION_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
BUILTIN_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not name.endswith("Group")
}


class BrokenError(BaseException):
    """The other process has exited or violated the protocol. Nothing that it sends counts any more."""


class Peer:
    """One end of the two pipes.

    Args:
        reader: Descriptor to read from.
        writer: Descriptor to write to.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.lock = _thread.RLock()
        self.wire = Wire(self)
        self.shared: list[Any] = []  # objects of this side that the other one refers to, by number
        self.numbers: dict[int, int] = {}
        self.stand_ins: dict[Any, Any] = {}
        self.error_kinds: dict[tuple[str, ...], type[BaseException]] = {}
        self.is_broken = False

    # Methods that differ between the two sides.

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Executes an operation that the other side requests."""
        raise NotImplementedError

    def call(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an object of the other side."""
        return self.request("call", stand_in, *args, **kwargs)

    def attribute(self, stand_in: StandIn, name: str) -> Any:
        """Returns an attribute of an object of the other side."""
        return self.request("getattr", stand_in, name)

    def operate(self, stand_in: StandIn, name: str, args: tuple[Any, ...], is_reflected: bool) -> Any:
        """Returns the result of an operator on an object of the other side."""
        if is_reflected:
            return self.request("reflected", stand_in, name, *args)
        return self.request(name, stand_in, *args)

    def member(self, _name: str, value: Any) -> Any:
        """Returns the value of a named field or attribute of an object that was received."""
        return value

    def contains(self, stand_in: StandIn, item: Any) -> bool:
        """Returns whether an object of the other side contains an item."""
        return self.request("contains", stand_in, item) is True

    def may_share(self, value: Any) -> bool:
        """Returns whether the other side may receive a stand-in for an object that cannot be sent as data."""
        return value is not self

    def printed(self) -> str:
        """Returns the text that was printed here since the last frame."""
        return ""

    def show(self, text: str) -> None:
        """Prints the text that was printed on the other side."""

    def check_silent(self) -> None:
        """Checks that nothing unrequested was received."""

    # Requests.

    def request(self, operation: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an operation on an object of the other side, or raises what it raises there."""
        with self.lock:
            if self.is_broken:
                raise BrokenError
            table, number = Table(), os.urandom(8).hex()
            nodes = [self.wire.encode(arg, table) for arg in (target, *args)]
            named = [[name, self.wire.encode(value, table)] for name, value in kwargs.items()]
            frame = ["call", number, operation, nodes, named, self.printed()]
            self.check_silent()
            self._send(frame)
            try:
                done, value = self._reply(number, table)
            except BrokenError:
                raise
            except (MalformedError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                raise self.broken() from error
            except (RecursionError, MemoryError) as error:
                raise self.broken() from error
        if done:
            return value
        if not isinstance(value, BaseException):
            raise self.broken()
        if isinstance(value, ITERATION_ENDS) and operation != "next":  # it would end a loop on this side
            raise RuntimeError(f"{operation} raised {type(value).__name__}") from value
        raise value

    def broken(self) -> BrokenError:
        """Returns the error to raise. From now on every request raises it."""
        self.is_broken = True
        return BrokenError()

    def serve(self, frame: list[Any]) -> None:
        """Executes a request and sends the reply."""
        tag, number, operation, nodes, named, output = frame
        if tag != "call" or type(nodes) is not list or type(operation) is not str or type(number) is not str:
            raise MalformedError
        self._show(output)
        table = Table()
        target, *args = (self.wire.decode(node, table) for node in nodes)
        kwargs = {name: self.wire.decode(node, table) for name, node in named}
        table.remember()
        done, result = True, None
        try:
            result = self.perform(operation, target, args, kwargs)
        except (BrokenError, MalformedError):
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised on the other side
            done, result = False, error
        if done:
            try:
                self._send(self._answer(number, done, result, table))
                return
            except (TypeError, ValueError, RecursionError) as error:
                result = TypeError(f"the value cannot be sent between the processes: {type(error).__name__}")
        self._send(self._answer(number, False, result, table))

    def _answer(self, number: str, done: bool, result: Any, table: Table) -> list[Any]:
        count = len(table.objects)
        node = self.wire.encode(result, table)
        numbers = [each for each in table.changed() if each < count]
        changes = [[each, self._contents(table.objects[each], table)] for each in numbers]
        return ["reply", number, done, node, changes, self.printed()]

    def _contents(self, value: Any, table: Table) -> list[Any]:
        kinds = (dict, bytearray)
        name = "dict" if isinstance(value, kinds[0]) else "bytearray" if isinstance(value, kinds[1]) else "list"
        return self.wire.contents(name, value, table)

    def _reply(self, number: str, table: Table) -> tuple[bool, Any]:
        known = len(table.objects)
        while True:
            frame = self.receive()
            if type(frame) is not list or not frame:
                raise MalformedError
            if frame[0] == "call":
                self.serve(frame)
                continue
            tag, echo, done, node, changes, output = frame
            if tag != "reply" or echo != number or type(done) is not bool:
                raise MalformedError
            value = self.wire.decode(node, table)
            for each, payload in changes:
                if type(each) is not int or not 0 <= each < known:
                    raise MalformedError
                self.wire.refill(table.objects[each], payload, table)
            self._show(output)
            return done, value

    def _show(self, text: Any) -> None:
        if type(text) is not str or len(text) > MAX_OUTPUT_CHARS:
            raise MalformedError
        if text:
            self.show(text)

    # Frames.

    def _send(self, frame: list[Any]) -> None:
        data = json.dumps(frame).encode()
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(data)} bytes is too large; at most {MAX_FRAME_BYTES} can be sent")
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            try:
                view = view[os.write(self.writer, view) :]
            except OSError as error:
                raise self.broken() from error

    def receive(self) -> Any:
        """Returns the next frame.

        Raises:
            BrokenError: There is none.
            ValueError: It is not JSON.
        """
        size = int.from_bytes(self._read(8), "little")
        if size > MAX_FRAME_BYTES:
            raise self.broken()
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.reader, min(size, 1 << 20))
            if not part:
                raise self.broken()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def is_silent(self) -> bool:
        """Returns whether there is nothing to read."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        return not poll.poll(0)

    # Objects that are not sent as data.

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object that cannot be sent as data."""
        if isinstance(value, StandIn):
            return ["yours", value._groupax_number]
        if isinstance(value, BaseException):
            return self._encode_error(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error type", _error_names(value)]
        if not self.may_share(value):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the solution")
        return ["mine", self._number(value), _kind_of(value)]

    def decode_object(self, node: list[Any], table: Table) -> Any:
        """Returns the object of this side that is referred to, or the stand-in for one of the other side."""
        name, rest = node[0], node[1:]
        if name == "yours":
            return self.shared[self._checked_number(rest[0])]
        if name == "mine":
            number, kind = rest
            return self.stand_in(number, kind)
        if name == "module":
            return self.module(rest[0])
        if name == "error type":
            return self.error_kind(rest[0])
        if name == "error":
            return self._decode_error(rest, table)
        raise MalformedError

    def stand_in(self, number: Any, kind: Any) -> Any:
        """Returns the stand-in for the other side's object with this number."""
        if type(number) is not int or type(kind) is not str:
            raise MalformedError
        if number not in self.stand_ins:
            self.stand_ins[number] = StandIn(self, number)
        return self.stand_ins[number]

    def module(self, _name: Any) -> Any:
        """Returns the module that the other side names."""
        raise MalformedError

    def error_kind(self, names: Any) -> type[BaseException]:
        """Returns an exception class, given its name and those of its base classes up to the first built-in one."""
        if type(names) is not list or not names or any(type(name) is not str for name in names):
            raise MalformedError
        base = BUILTIN_ERRORS[names[-1]]
        if len(names) == 1:
            return base
        key = tuple(names)
        if key not in self.error_kinds:
            self.error_kinds[key] = type(
                names[0], (self.error_kind(names[1:]),), {"__module__": "solution", "__str__": _error_text}
            )
        return self.error_kinds[key]

    def _encode_error(self, error: BaseException) -> list[Any]:
        number = getattr(error, "_groupax_number", None)
        if type(number) is int:
            return ["yours", number]
        table = Table()  # a separate one, as it has no container of the request
        values = [self._encoded_or_name(value, table) for value in error.args]
        fields = [
            [name, self._encoded_or_name(each, table)] for name, each in vars(error).items() if not name.startswith("_")
        ]
        return ["error", _error_names(type(error)), values, fields, str(error), self._number(error)]

    def _encoded_or_name(self, value: Any, table: Table) -> Any:
        try:
            return self.wire.encode(value, table)
        except TypeError:  # its type may not be sent
            return f"<{type(value).__name__}>"

    def _decode_error(self, rest: list[Any], _table: Table) -> BaseException:
        names, values, fields, text, number = rest
        if type(number) is not int or type(text) is not str:
            raise MalformedError
        kind, table = self.error_kind(names), Table()
        args = [self.wire.decode(value, table) for value in values]
        try:
            error = kind(*args)
        except TypeError:  # its constructor takes other arguments
            error = kind.__new__(kind)
            error.args = tuple(args)
        for name, node in fields:
            if type(name) is not str or name.startswith("_"):
                raise MalformedError
            error.__dict__[name] = self.member(name, self.wire.decode(node, table))
        error.__dict__.update(_groupax_number=number, _groupax_text=text)
        return error

    def _number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.shared)
            self.shared.append(value)
        return self.numbers[id(value)]

    def _checked_number(self, number: Any) -> int:
        if type(number) is not int or not 0 <= number < len(self.shared):
            raise MalformedError
        return number


def _error_names(kind: type[BaseException]) -> list[str]:
    """Returns the names of an exception class and its base classes up to the first built-in one."""
    names = []
    for each in kind.__mro__:
        names.append(each.__name__)
        if BUILTIN_ERRORS.get(each.__name__) is each:
            break
    return names


def _error_text(error: BaseException) -> str:
    return error.__dict__.get("_groupax_text", BaseException.__str__(error))


def _kind_of(value: Any) -> str:
    kind = type(value)
    if kind.__name__ == "coroutine":
        return "coroutine"
    return "enum" if hasattr(kind, "__members__") else "object"
