"""Requests between two processes on two pipes, and stand-ins for the objects that stay on the other side.

A frame is a length of 8 bytes and JSON. A request names an operation and its arguments; until its reply comes, requests
of the other side are served, so a function of the tests that the solution calls may call the solution again. A reply
names the number of its request. Printed text travels with every frame.
"""

from __future__ import annotations

import _thread
import builtins
import json
import operator
import os
import select

from groupax.rewards.isolated.wire import MalformedError, Table, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_FRAME_BYTES = 32 << 20
MAX_OUTPUT_CHARS = 1 << 20
UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "matmul")
BINARY += ("divmod",)
COMPARISONS = ("lt", "le", "gt", "ge")
# Dunder methods that are asked of the other side with no operand but the object, and what does them there.
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
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
OPERANDS = frozenset({*BINARY, *COMPARISONS})
BUILTIN_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not name.endswith("Group")
}


class BrokenError(BaseException):
    """The other side is gone, or does not keep to the protocol. Nothing that it says counts any more."""


class Peer:
    """One end of the two pipes.

    Args:
        reader: Descriptor to read from.
        writer: Descriptor to write to.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.lock = _thread.RLock()
        self.wire = Wire(self.hold, self.held, self.named)
        self.kept: list[Any] = []  # objects of this side that the other knows, by number
        self.numbers: dict[int, int] = {}
        self.stand_ins: dict[Any, Any] = {}
        self.error_kinds: dict[tuple[str, ...], type[BaseException]] = {}
        self.is_broken = False

    # What the two sides do differently.

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Does what the other side asks for."""
        raise NotImplementedError

    def call(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an object of the other side."""
        return self.request("call", stand_in, *args, **kwargs)

    def attribute(self, stand_in: StandIn, name: str) -> Any:
        """Returns an attribute of an object of the other side."""
        return self.request("getattr", stand_in, name)

    def operate(self, stand_in: StandIn, name: str, args: tuple[Any, ...], is_reflected: bool) -> Any:
        """Returns what an operator gives for an object of the other side."""
        if is_reflected:
            return self.request("reflected", stand_in, name, *args)
        return self.request(name, stand_in, *args)

    def named(self, _name: str, value: Any) -> Any:
        """Returns what stands under a name in an object that crossed."""
        return value

    def contains(self, stand_in: StandIn, item: Any) -> bool:
        """Whether an object of the other side contains something."""
        return self.request("contains", stand_in, item) is True

    def may_hold(self, value: Any) -> bool:
        """Whether an object that does not cross may be known to the other side."""
        return value is not self

    def printed(self) -> str:
        """Returns what was printed here since the last frame."""
        return ""

    def show(self, text: str) -> None:
        """Prints what was printed on the other side."""

    def quiet(self) -> None:
        """Checks that nothing has come that was not asked for."""

    # Requests.

    def request(self, operation: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what the operation on an object of the other side gives, or raises what it raises there."""
        with self.lock:
            if self.is_broken:
                raise BrokenError
            table, number = Table(), os.urandom(8).hex()
            nodes = [self.wire.encode(arg, table) for arg in (target, *args)]
            named = [[name, self.wire.encode(value, table)] for name, value in kwargs.items()]
            frame = ["call", number, operation, nodes, named, self.printed()]
            self.quiet()
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
        if isinstance(value, ENDS) and operation != "next":  # it would end a loop of this side
            raise RuntimeError(f"{operation} raised {type(value).__name__}") from value
        raise value

    def broken(self) -> BrokenError:
        """Returns the error to raise; from now on every request raises it."""
        self.is_broken = True
        return BrokenError()

    def serve(self, frame: list[Any]) -> None:
        """Does what a request asks for and replies."""
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
        except BaseException as error:  # noqa: BLE001  (it is raised on the other side)
            done, result = False, error
        if done:
            try:
                self._send(self._answer(number, done, result, table))
                return
            except (TypeError, ValueError, RecursionError) as error:
                result = TypeError(f"the value cannot cross between the processes: {type(error).__name__}")
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
            raise ValueError(f"{len(data)} bytes are more than the {MAX_FRAME_BYTES} that can cross")
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            try:
                view = view[os.write(self.writer, view) :]
            except OSError as error:
                raise self.broken() from error

    def receive(self) -> Any:
        """Returns the next frame; raises BrokenError if there is none, and what `json.loads` raises."""
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
        """Whether nothing waits to be read."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        return not poll.poll(0)

    # Objects that stay.

    def hold(self, value: Any) -> list[Any]:
        """Returns what stands for an object that does not cross."""
        if isinstance(value, StandIn):
            return ["yours", value._groupax_number]
        if isinstance(value, BaseException):
            return self._encode_error(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error type", _error_names(value)]
        if not self.may_hold(value):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the solution")
        return ["mine", self._number(value), _kind(value)]

    def held(self, node: list[Any], table: Table) -> Any:
        """Returns an object of this side that comes back, or the stand-in of one of the other side."""
        name, rest = node[0], node[1:]
        if name == "yours":
            return self.kept[self._known(rest[0])]
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
        """Returns the stand-in of the other side's object of this number."""
        if type(number) is not int or type(kind) is not str:
            raise MalformedError
        if number not in self.stand_ins:
            self.stand_ins[number] = StandIn(self, number)
        return self.stand_ins[number]

    def module(self, _name: Any) -> Any:
        """Returns the module that the other side names."""
        raise MalformedError

    def error_kind(self, names: Any) -> type[BaseException]:
        """Returns the exception class for the names of a class and those that it extends, the built-in one last."""
        if type(names) is not list or not names or any(type(name) is not str for name in names):
            raise MalformedError
        base = BUILTIN_ERRORS[names[-1]]
        if len(names) == 1:
            return base
        key = tuple(names)
        if key not in self.error_kinds:
            self.error_kinds[key] = type(
                names[0], (self.error_kind(names[1:]),), {"__module__": "solution", "__str__": _text}
            )
        return self.error_kinds[key]

    def _encode_error(self, error: BaseException) -> list[Any]:
        number = getattr(error, "_groupax_number", None)
        if type(number) is int:
            return ["yours", number]
        table = Table()  # of its own, as it holds no container of the request
        values = [self._plain(value, table) for value in error.args]
        fields = [[name, self._plain(each, table)] for name, each in vars(error).items() if not name.startswith("_")]
        return ["error", _error_names(type(error)), values, fields, str(error), self._number(error)]

    def _plain(self, value: Any, table: Table) -> Any:
        try:
            return self.wire.encode(value, table)
        except TypeError:  # of a type that may not cross
            return f"<{type(value).__name__}>"

    def _decode_error(self, rest: list[Any], _table: Table) -> BaseException:
        names, values, fields, text, number = rest
        if type(number) is not int or type(text) is not str:
            raise MalformedError
        kind, table = self.error_kind(names), Table()
        args = [self.wire.decode(value, table) for value in values]
        try:
            error = kind(*args)
        except TypeError:  # it takes others
            error = kind.__new__(kind)
            error.args = tuple(args)
        for name, node in fields:
            if type(name) is not str or name.startswith("_"):
                raise MalformedError
            error.__dict__[name] = self.named(name, self.wire.decode(node, table))
        error.__dict__.update(_groupax_number=number, _groupax_text=text)
        return error

    def _number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def _known(self, number: Any) -> int:
        if type(number) is not int or not 0 <= number < len(self.kept):
            raise MalformedError
        return number


class StandIn:
    """Stands for an object of the other process and does its operations there."""

    __slots__ = ("__weakref__", "_groupax_number", "_groupax_peer", "_groupax_rights")

    def __init__(self, peer: Peer, number: int, rights: str = "") -> None:
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
            return False  # not left to the other side: it would say yes to everything
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
        return False  # nothing that the tests raise is swallowed

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


def _error_names(kind: type[BaseException]) -> list[str]:
    """The names of an exception class and those that it extends, up to the first built-in one."""
    names = []
    for each in kind.__mro__:
        names.append(each.__name__)
        if BUILTIN_ERRORS.get(each.__name__) is each:
            break
    return names


def _text(error: BaseException) -> str:
    return error.__dict__.get("_groupax_text", BaseException.__str__(error))


def _kind(value: Any) -> str:
    kind = type(value)
    if kind.__name__ == "coroutine":
        return "coroutine"
    return "enum" if hasattr(kind, "__members__") else "object"
