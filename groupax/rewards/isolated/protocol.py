"""The exchange between the process of the tests and that of the solution: calls on two pipes, with plain data.

    ["call", number, operation, arguments, named arguments, printed text]
    ["reply", number, whether it succeeded, result or exception, changed arguments, printed text]

A frame is a length of 8 bytes, followed by JSON. While a process waits for a reply it serves calls of the other one, so
that a function of the tests that the solution calls may call the solution again.

Scalars are sent as they are, other data as lists that begin with their kind. Decoding builds only types of the standard
library, so that an object that imitates another one cannot be received. What is not data stays in its process, and the
other one receives a handle: for the solution a function or generator that calls back, for the tests a `Handle`.

Mutable values are numbered in a table that a call and its reply share, so that aliases and cycles are preserved and
changes to arguments are sent back.
"""

from __future__ import annotations

import _thread
import builtins
import collections
import importlib
import operator
import os

from groupax.rewards.isolated.start import receive_frame, send_frame

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would slow down the start of each process
    from collections.abc import Callable
    from typing import Any

MAX_OUTPUT_CHARS = 1 << 20

SCALARS = frozenset({bool, int, float, str, type(None)})
LARGEST = 1 << 63  # larger integers are sent in hexadecimal, as decimal digits take quadratic time and are limited
MUTABLE: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque),
        *(list, dict, set, bytearray),
    )
}
KIND_OF = {kind: name for name, kind in MUTABLE.items()}
# Types that both sides know by name.
TYPES: dict[str, type] = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, object, type(None))
} | MUTABLE
NAME_OF = {kind: name for name, kind in TYPES.items()}
_DAY, _TIME = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
# Immutable types that are sent as the arguments of their constructors: their modules, and attributes of a value.
PARTS = {
    "range": ("builtins", ("start", "stop", "step")),
    "slice": ("builtins", ("start", "stop", "step")),
    "complex": ("builtins", ("real", "imag")),
    "Fraction": ("fractions", ("numerator", "denominator")),
    "Decimal": ("decimal", ()),  # as text
    "date": ("datetime", _DAY),
    "time": ("datetime", _TIME),
    "datetime": ("datetime", (*_DAY, *_TIME)),
    "timedelta": ("datetime", ("days", "seconds", "microseconds")),
}
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))  # sent as lists
ARRAYS = "biufcSUmM"  # kinds of dtypes that are sent as bytes
BUILTIN_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not name.endswith("Group")
}
ITERATION_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)

# Operators that the tests apply to an object of the solution, and the functions that do so there.
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "matmul")
BINARY += ("lt", "le", "gt", "ge")
_OTHERS = ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "index", "eq", "contains")
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*BINARY, *_OTHERS)},
    **{each.__name__: each for each in (len, iter, next, str, repr, format, hash, bool, int, float, round, reversed)},
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
}


class MalformedError(Exception):
    """The other side sent something that is not a value in this form."""


class BrokenError(BaseException):
    """The other process has exited or violated the protocol. Nothing that it sends counts any more."""


class Table:
    """The mutable values of a call and its reply, by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def add(self, value: Any) -> int:
        """Adds a value and returns its number."""
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1


class Peer:
    """One end of the two pipes."""

    kept_ids: Any = frozenset()  # of instances that extend a container and are not sent as that container

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.lock = _thread.RLock()
        self.shared: list[Any] = []  # objects of this side that the other one has handles of, by number
        self.error_kinds: dict[tuple[str, ...], type[BaseException]] = {}
        self.is_broken = False

    # Methods that differ between the two sides.

    def perform(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Executes an operation that the other side requests."""
        raise NotImplementedError

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object that is not data; raises TypeError if it may not be sent."""
        raise NotImplementedError

    def decode_object(self, node: list[Any]) -> Any:
        """Returns the object of this side, or the handle of one of the other side, that a node refers to."""
        raise NotImplementedError

    def has_shared_class(self, value: Any) -> bool:
        """Returns whether both sides have a value's class, so that its attributes are sent."""
        raise NotImplementedError

    def class_named(self, name: Any) -> type:
        """Returns this side's class of an instance whose attributes were received."""
        raise NotImplementedError

    def check_member(self, owner: type, name: Any, value: Any) -> None:
        """Checks an attribute that was received of an instance of a class of this side."""

    def printed(self) -> str:
        """Returns the text that was printed here since the last frame."""
        return ""

    def show(self, text: str) -> None:
        """Prints the text that was printed on the other side."""

    # Calls.

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an operation on the other side, or raises what it raises there."""
        with self.lock:
            if self.is_broken:
                raise BrokenError
            table, number = Table(), os.urandom(8).hex()
            nodes = self._encode_all(args, table)
            named = {name: self.encode(value, table) for name, value in kwargs.items()}
            self._send(["call", number, operation, nodes, named, self.printed()])
            try:
                while (frame := self.receive())[0] == "call":
                    self.serve(frame)
                done, value = self._reply(frame, number, table)
            except (MalformedError, *MALFORMED) as error:
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
        """Executes a call and sends the reply."""
        tag, number, operation, nodes, named, output = frame
        if tag != "call" or type(nodes) is not list or type(operation) is not str or type(number) is not str:
            raise MalformedError
        self._show(output)
        table = Table()
        args = [self.decode(node, table) for node in nodes]
        kwargs = {name: self.decode(node, table) for name, node in named.items()}
        before = [self._contents(each, table) for each in table.objects]
        try:
            done, result = True, self.perform(operation, args, kwargs)
        except (BrokenError, MalformedError):
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised on the other side
            done, result = False, error
        try:
            node, changes = self.encode(result, table), []
            for index, known in enumerate(before):
                contents = self._contents(table.objects[index], table)
                if contents != known:
                    changes.append([index, contents])
            self._send(["reply", number, done, node, changes, self.printed()])
        except (TypeError, ValueError, RecursionError) as error:
            fault = TypeError(f"the value cannot be sent between the processes: {type(error).__name__}")
            self._send(["reply", number, False, self._encode_error(fault), [], self.printed()])

    def receive(self) -> Any:
        """Returns the next frame; raises BrokenError if there is none, and ValueError if it is not JSON."""
        try:
            return receive_frame(self.reader)
        except EOFError as error:
            raise self.broken() from error

    def _reply(self, frame: Any, number: str, table: Table) -> tuple[bool, Any]:
        tag, echo, done, node, changes, output = frame
        if tag != "reply" or echo != number or type(done) is not bool:
            raise MalformedError
        known = len(table.objects)
        value = self.decode(node, table)
        for index, payload in changes:
            if _index(index) >= known:
                raise MalformedError
            self._refill(table.objects[index], payload, table)
        self._show(output)
        return done, value

    def _show(self, text: Any) -> None:
        if type(text) is not str or len(text) > MAX_OUTPUT_CHARS:
            raise MalformedError
        if text:
            self.show(text)

    def _send(self, frame: list[Any]) -> None:
        try:
            send_frame(self.writer, frame)
        except OSError as error:
            raise self.broken() from error

    # Values.

    def encode(self, value: Any, table: Table) -> Any:
        """Returns a value in a form that JSON can represent; subclasses of known types as their base class."""
        if value is None or isinstance(value, (str, bool, float)):
            return value
        if isinstance(value, int):
            return value if -LARGEST < value < LARGEST else ["int", hex(value)]
        if id(value) in table.numbers:
            return ["ref", table.numbers[id(value)]]
        kind = type(value)
        name = KIND_OF.get(kind)
        if name is None and id(value) not in self.kept_ids:
            name = next((name for base, name in KIND_OF.items() if isinstance(value, base)), None)
        if name is not None or self.has_shared_class(value):
            number = table.add(value)
            node = [name or "instance", number, self._contents(value, table)]
            if name == "deque":
                node.append(value.maxlen)
            elif name == "defaultdict":
                node.append(self.encode(value.default_factory, table))
            return node
        if isinstance(value, tuple):
            fields = getattr(kind, "_fields", None)
            items = self._encode_all(value, table)
            return ["tuple", items] if fields is None else ["record", list(fields), items]
        if isinstance(value, frozenset):
            return ["frozenset", self._encode_all(value, table)]
        if isinstance(value, bytes):
            return ["bytes", value.hex()]
        if isinstance(value, BaseException):
            return self._encode_error(value)
        if isinstance(value, type) and value in NAME_OF:
            return ["type", NAME_OF[value]]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error type", self._error_names(value)]
        module, attributes = PARTS.get(kind.__name__, ("", ()))
        if module == kind.__module__ and getattr(value, "tzinfo", None) is None:
            parts = [getattr(value, name) for name in attributes] or [str(value)]
            return [kind.__name__, *self._encode_all(parts, table)]
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype"):
            if value.ndim == 0 or value.dtype.kind not in ARRAYS:
                return self.encode(value.tolist(), table)
            return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]
        return self.encode([*value], table) if isinstance(value, VIEWS) else self.encode_object(value)

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
            case ["instance", number, [name, *_] as payload]:
                return self._filled(object.__new__(self.class_named(name)), number, payload, table)
            case ["deque", number, payload, length]:
                made = collections.deque(maxlen=None if length is None else _index(length))
                return self._filled(made, number, payload, table)
            case ["defaultdict", number, payload, factory]:
                made = self._filled(collections.defaultdict(), number, payload, table)
                made.default_factory = self.decode(factory, table)
                return made
            case [name, number, payload] if name in MUTABLE:
                return self._filled(MUTABLE[name](), number, payload, table)
            case ["ref", number]:
                return table.objects[_index(number)]
            case ["int", text]:
                return int(text, 16)
            case ["bytes", text]:
                return bytes.fromhex(text)
            case ["type", name]:
                return TYPES[name]
            case ["tuple" | "frozenset" as name, items]:
                return TYPES[name](self._decode_all(items, table))
            case ["record", fields, items]:
                record = collections.namedtuple("record", fields)(*self._decode_all(items, table))
                for name, value in record._asdict().items():
                    self.check_member(object, name, value)
                return record
            case ["array", dtype, shape, data]:
                numpy = importlib.import_module("numpy")
                kind = numpy.dtype(dtype)
                if kind.kind not in ARRAYS:
                    raise MalformedError
                return numpy.frombuffer(bytes.fromhex(data), kind).reshape([_index(size) for size in shape]).copy()
            case ["error type", names]:
                return self._error_kind(names)
            case ["error", names, text, args, fields]:
                return self._decode_error(names, text, args, fields)
            case [name, *parts] if name in PARTS:
                parts = self._decode_all(parts, table)
                if not SCALARS.issuperset(map(type, parts)):
                    raise MalformedError
                return getattr(importlib.import_module(PARTS[name][0]), name)(*parts)
            case _:
                return self.decode_object(node)

    def _encode_all(self, values: Any, table: Table) -> list[Any]:
        kinds = set(map(type, values))
        if kinds <= SCALARS and (int not in kinds or all(type(v) is not int or -LARGEST < v < LARGEST for v in values)):
            return list(values)
        return [self.encode(value, table) for value in values]

    def _decode_all(self, nodes: Any, table: Table) -> list[Any]:
        if type(nodes) is not list:
            raise MalformedError
        return nodes if set(map(type, nodes)) <= SCALARS else [self.decode(node, table) for node in nodes]

    def _contents(self, value: Any, table: Table) -> list[Any]:
        """Returns the encoded contents of a mutable value."""
        if isinstance(value, bytearray):
            return [bytes(value).hex()]
        if isinstance(value, dict):
            return [self._encode_all(list(value), table), self._encode_all(list(value.values()), table)]
        if isinstance(value, (list, set, collections.deque)):
            return self._encode_all(value, table)
        own = vars(value)
        return [type(value).__name__, list(own), self._encode_all(own.values(), table)]

    def _filled(self, value: Any, number: Any, payload: Any, table: Table) -> Any:
        if number != table.add(value):
            raise MalformedError
        self._refill(value, payload, table)
        return value

    def _refill(self, value: Any, payload: Any, table: Table) -> None:
        """Replaces the contents of a mutable value by encoded ones."""
        if isinstance(value, bytearray):
            value[:] = bytes.fromhex(payload[0])
        elif isinstance(value, (list, set, collections.deque)):
            items = self._decode_all(payload, table)
            value.clear()
            value.update(items) if isinstance(value, set) else value.extend(items)
        else:
            *_, names, values = payload
            own = value if isinstance(value, dict) else vars(value)
            pairs = list(zip(self._decode_all(names, table), self._decode_all(values, table), strict=True))
            if own is not value:
                for name, each in pairs:
                    self.check_member(type(value), name, each)
            own.clear()
            for name, each in pairs:
                own[name] = each

    # Exceptions.

    def _error_names(self, kind: type[BaseException]) -> list[str]:
        """Returns the names of an exception class and its base classes up to the first built-in one."""
        names = []
        for each in kind.__mro__:
            names.append(each.__name__)
            if BUILTIN_ERRORS.get(each.__name__) is each:
                break
        self.error_kinds.setdefault(tuple(names), kind)  # it may come back
        return names

    def _error_kind(self, names: Any) -> type[BaseException]:
        """Returns the exception class of these names; other classes than built-in ones are made once."""
        if type(names) is not list or not names or any(type(name) is not str for name in names):
            raise MalformedError
        if len(names) == 1:
            return BUILTIN_ERRORS[names[0]]
        key = tuple(names)
        if key not in self.error_kinds:
            own = {"__module__": "solution", "__str__": _error_text}
            self.error_kinds[key] = type(names[0], (self._error_kind(names[1:]),), own)
        return self.error_kinds[key]

    def _encode_error(self, error: BaseException) -> list[Any]:
        own = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        args, *values = (self._encode_known(each) for each in (error.args, *own.values()))
        return ["error", self._error_names(type(error)), str(error), args, [list(own), values]]

    def _encode_known(self, value: Any) -> Any:
        try:
            return self.encode(value, Table())
        except TypeError:  # its type may not be sent
            return ["tuple", []] if isinstance(value, tuple) else f"<{type(value).__name__}>"

    def _decode_error(self, names: Any, text: Any, args: Any, fields: Any) -> BaseException:
        kind, args = self._error_kind(names), self.decode(args, Table())
        if type(text) is not str or type(args) is not tuple:
            raise MalformedError
        try:
            error = kind(*args)
        except TypeError:  # its constructor takes other arguments
            error = kind.__new__(kind)
            error.args = args
        for name, node in zip(*fields, strict=True):
            value = self.decode(node, Table())
            self.check_member(kind, name, value)
            error.__dict__[name] = value
        error.__dict__["_groupax_text"] = text
        return error


def _index(value: Any) -> int:
    """Returns a received index, which must not count from the end."""
    if type(value) is not int or value < 0:
        raise MalformedError
    return value


def _error_text(error: BaseException) -> str:
    return error.__dict__.get("_groupax_text", BaseException.__str__(error))
