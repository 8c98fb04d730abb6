"""Requests between two processes on two pipes.

A frame is a length of 8 bytes, followed by JSON. A request names an operation and its arguments. While a process waits
for the reply, it serves requests of the other one, so that a function of the tests that the solution calls may call the
solution again. A reply names the number of its request. Printed text is sent with every frame.
"""

from __future__ import annotations

import _thread
import builtins
import json
import os
import select

from groupax.rewards.isolated.stand_in import StandIn
from groupax.rewards.isolated.wire import MalformedError, Table, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FRAME_BYTES = 32 << 20
MAX_OUTPUT_CHARS = 1 << 20
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
        self.wire = Wire(self.encode_object, self.decode_object, self.member)
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
