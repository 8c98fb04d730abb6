"""A run of tests with a solution, in two processes that exchange plain data.

    trainer ──order──► process of the tests ──calls────► process of the solution
            ◄─token──                       ◄─results──

The solution's process is forked before the tests and the token are read. Nothing in it is secret or trusted: a solution
may do with it what it likes, and what it sends is only data to the tests. A frame is one of

    [number, operation, arguments, names of the last of them, standard input]
    [number, whether it succeeded, result or exception, changed arguments, printed text, rest of the standard input]

What is not data stays in the solution's process, and the tests receive a `Handle`. It never reveals to the solution
what a result is compared with: its operators take handles alone. Only an object that the tests created themselves, by
calling a class, is asked whether it contains a value, or has methods with the names of those of plain values (see
`docs/rewards.md`).
"""

from __future__ import annotations

import _thread
import builtins
import collections
import contextlib
import importlib
import io
import operator
import os
import re
import sys

from groupax.rewards.isolated.data import MUTABLE, TYPES, Peer
from groupax.rewards.isolated.process import apply_limits, install_filter, receive_frame, send_frame, silence

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would slow down the start of each process
    from collections.abc import Callable
    from typing import Any

MAX_OUTPUT_CHARS = 1 << 20
ITERATION_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)

# Operators that the tests apply to an object of the solution, and the functions that do so there.
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lt", "le", "gt", "ge")
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*BINARY, "neg", "getitem", "setitem", "delitem", "eq")},
    **{kind.__name__: kind for kind in (len, iter, next, str, repr, format, hash, bool, int, float, abs)},
    "contains": operator.contains,
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
}


class BrokenError(BaseException):
    """The solution's process has exited or violated the protocol. Nothing that it sends counts any more."""


# -- the process of the solution


class SolutionPeer(Peer):
    """The end of the pipes that runs the solution and executes the operations of the tests."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        sys.modules["solution"] = type(sys)("solution")  # dataclasses, for one, look up their class here
        self.namespace: dict[str, Any] = sys.modules["solution"].__dict__
        self.objects: list[Any] = []  # that the tests have handles of, by number
        self.numbers: dict[int, int] = {}  # of `objects`, by id

    def serve(self) -> None:
        """Executes an operation and sends its result."""
        number, operation, nodes, names, text = receive_frame(self.reader)
        args, output = [self.decode(node) for node in nodes], io.BytesIO()
        sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode(errors="replace")), "utf-8", newline="\n")
        sys.stdout = io.TextIOWrapper(output, "utf-8", write_through=True)
        num = len(args) - len(names)
        try:
            succeeded, result = True, self.perform(operation, args[:num], dict(zip(names, args[num:], strict=True)))
        except BaseException as error:  # noqa: BLE001 - it is raised on the other side
            succeeded, result = False, error
        try:
            after = [(index, self.encode(value)) for index, value in enumerate(args) if isinstance(value, MUTABLE)]
            changes = [[index, node] for index, node in after if node != nodes[index]]
            printed = output.getvalue().decode(errors="replace")[:MAX_OUTPUT_CHARS]
            send_frame(self.writer, [number, succeeded, self.encode(result), changes, printed, sys.stdin.read()])
        except Exception as error:  # noqa: BLE001 - the solution's objects may raise anything
            fault = TypeError(f"the value cannot be sent between the processes: {type(error).__name__}")
            send_frame(self.writer, [number, False, self.encode(fault), [], "", ""])

    def perform(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Executes an operation that the tests request."""
        if operation == "load":
            return exec(compile(args[0], "solution.py", "exec", dont_inherit=True), self.namespace)
        if operation == "name":
            return self.namespace[args[0]]
        if operation == "call":
            made = args[0](*args[1:], **kwargs)
            if isinstance(args[0], type) and isinstance(made, MUTABLE):
                self._number(made)  # an instance that the tests made is no data, even if it extends a container
            return made
        return {"getattr": getattr, "setattr": setattr, "isinstance": isinstance, **OPERATORS}[operation](*args)

    def is_kept(self, value: Any) -> bool:
        """Returns whether this is an instance that the tests made."""
        return id(value) in self.numbers

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object that stays here."""
        if type(value) is type(sys):
            return ["module"]
        return ["object", self._number(value)]

    def decode_object(self, kind: str, parts: list[Any]) -> Any:
        """Returns an object that the tests have a handle of."""
        assert kind == "object", kind
        return self.objects[parts[0]]

    def class_named(self, name: str) -> type:
        """Returns the solution's class of the same name, or a class without methods."""
        found = self.namespace.get(name)
        if name not in self.classes:
            self.classes[name] = found if isinstance(found, type) else type(name, (), {"__module__": "solution"})
        return self.classes[name]

    def _number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]


# -- the process of the tests

TESTS = "tests"  # `__name__` of the tests
CLASS_NAME = re.compile("[A-Z][A-Za-z0-9]*")
# Modules that tests use under another name without importing them, as the solution imports them.
ALIASES = {"np": "numpy", "pd": "pandas"}
MODULES = frozenset({*sys.stdlib_module_names, *ALIASES.values()})
SOLUTION_MODULE = object()
READABLE = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__dict__"})
# Methods of plain values, arrays and data frames. A test that calls one on a result expects such a value.
PLAIN_METHODS = frozenset(
    name for kind in TYPES.values() for name in dir(kind) if not name.startswith("_")
) | {"all", "any", "equals", "eq", "ne", "isin", "compare", "isclose", "is_close", "allclose"}  # fmt: skip


class Handle:
    """An object of the solution, which executes all operations there.

    Args:
        peer: The connection to the solution.
        number: Number of the object there.
        rights: "class" for a class of the solution, "own" for an instance that the tests created by calling one.
    """

    __slots__ = ("__weakref__", "_groupax_number", "_groupax_peer", "_groupax_rights")

    def __init__(self, peer: TestPeer, number: int, rights: str = "") -> None:
        object.__setattr__(self, "_groupax_peer", peer)
        object.__setattr__(self, "_groupax_number", number)
        object.__setattr__(self, "_groupax_rights", rights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        value = self._groupax_peer.request("call", self, *args, **kwargs)
        return with_rights(value, "own") if self._groupax_rights == "class" else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        value = self._groupax_peer.request("getattr", self, name)
        if name in PLAIN_METHODS and callable(value) and not self._groupax_rights:
            raise AttributeError(f"{name}, of an object that the solution returned, is not one of a plain value")
        return with_rights(value, "class") if self._groupax_rights and CLASS_NAME.fullmatch(name) else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._groupax_peer.request("setattr", self, name, value)

    def __mro_entries__(self, _bases: Any) -> Any:
        raise TypeError("the tests cannot extend a class of the solution")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return False  # not left to the solution, which would answer yes to everything
        is_same = other._groupax_number == self._groupax_number
        return is_same or self._groupax_peer.request("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._groupax_peer.request("hash", self)

    def __contains__(self, item: Any) -> bool:
        if self._groupax_rights or isinstance(item, Handle):
            return self._groupax_peer.request("contains", self, item) is True
        return any(each is item or each == item for each in self._groupax_peer.request("iter", self))

    def __exit__(self, *_: object) -> bool:
        self._groupax_peer.request("exit", self)
        return False  # no exception of the tests is suppressed

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and self._groupax_peer.request("isinstance", value, self) is True


def _operation(name: str) -> Callable[..., Any]:
    def method(self: Handle, *args: Any) -> Any:
        if name in BINARY and not all(isinstance(each, Handle) for each in args):
            raise TypeError("an object of the solution is not compared or computed with a value of the tests")
        return self._groupax_peer.request(name, self, *args)

    return method


for _name in OPERATORS.keys() - {"eq", "hash", "contains", "exit"}:
    setattr(Handle, f"__{_name}__", _operation(_name))


def with_rights(value: Any, rights: str) -> Any:
    """Returns a handle with other rights; other values as they are."""
    return Handle(value._groupax_peer, value._groupax_number, rights) if isinstance(value, Handle) else value


class TestPeer(Peer):
    """The end of the pipes that requests operations of the solution."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.lock = _thread.RLock()
        self.is_broken = False

    def request(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an operation on the other side, or raises what it raises there.

        The solution's output appears where the tests print, and its input is the standard input of the tests.
        """
        with self.lock:
            if self.is_broken:
                raise BrokenError
            number, values = os.urandom(8).hex(), [*args, *kwargs.values()]
            nodes, text = [self.encode(value) for value in values], sys.stdin.read()
            try:
                send_frame(self.writer, [number, operation, nodes, list(kwargs), text])
                echo, succeeded, node, changes, printed, rest = receive_frame(self.reader)
                if echo != number or type(succeeded) is not bool:
                    raise ValueError("a reply to another request")
                value = self.decode(node)
                for index, changed in changes:
                    _replace_contents(dict(enumerate(values))[index], self.decode(changed))
                if not (succeeded or isinstance(value, BaseException)) or not text.endswith(rest):
                    raise ValueError("an error that is none, or another input")
                sys.stdout.write(printed)
                sys.stdin = io.StringIO(rest)
            except Exception as error:
                self.is_broken = True
                raise BrokenError from error
        if succeeded:
            return value
        if isinstance(value, ITERATION_ENDS) and operation != "next":  # it would end a loop on this side
            raise RuntimeError(f"{operation} raised {type(value).__name__}") from value
        raise value

    def name(self, name: str) -> Any:
        """Returns the value of a global name of the solution; raises KeyError if it does not define the name."""
        value = self.request("name", name)
        return with_rights(value, "class") if CLASS_NAME.fullmatch(name) else value

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object of the solution, the items of an iterator, or an instance's attributes."""
        if isinstance(value, Handle):
            return ["object", value._groupax_number]
        kind = type(value)
        if hasattr(kind, "__next__"):
            return self.encode(list(value))
        is_of_tests = kind.__module__ == TESTS and hasattr(value, "__dict__") and not callable(value)
        if is_of_tests and self.classes.setdefault(kind.__name__, kind) is kind:
            return self.encode(value)
        raise TypeError(f"a {kind.__name__} of the tests cannot be passed to the solution")

    def decode(self, node: Any) -> Any:
        """Returns the value of a node, whose attributes must not replace a method, or imitate one of plain values."""
        value = super().decode(node)
        if isinstance(node, list) and (node[0] == "instance" or hasattr(type(value), "_asdict")):
            kind, own = (type(value), vars(value)) if node[0] == "instance" else (object, value._asdict())
            for name, each in own.items():
                if name.startswith("__") or callable(getattr(kind, name, None)):
                    raise ValueError(f"{name} would replace a method")
                if name in PLAIN_METHODS and callable(each):
                    raise ValueError(f"{name} would imitate a method")
        return value

    def decode_object(self, kind: str, parts: list[Any]) -> Any:
        """Returns the handle of an object of the solution.

        All modules have the same mark, because the solution must not decide which module a name means.
        """
        match kind, parts:
            case "object", [int() as number]:
                return Handle(self, number)
            case "module", []:
                return SOLUTION_MODULE
        raise ValueError("a node of no known kind")

    def class_named(self, name: str) -> type:
        """Returns the tests' class of an instance that the solution returns."""
        return self.classes[name]


def _replace_contents(value: Any, contents: Any) -> None:
    """Makes a mutable argument what it was on the other side after the call."""
    if not isinstance(value, MUTABLE):
        raise ValueError("a change of what cannot change")
    if isinstance(value, (list, bytearray)):
        value[:] = contents
    else:
        value.clear()
        value.extend(contents) if isinstance(value, collections.deque) else value.update(contents)


class Namespace(dict):
    """The global names of the tests. Undefined names are the solution's, except for built-in ones and modules.

    Args:
        peer: The connection to the solution.
        entry_point: A name that is always the solution's.
    """

    def __init__(self, peer: TestPeer, entry_point: str) -> None:
        super().__init__(__name__=TESTS)
        self.peer, self.entry_point = peer, entry_point

    def run(self, source: str) -> None:
        """Runs statements in this namespace."""
        exec(compile(source, "tests.py", "exec", dont_inherit=True), self)

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and name != self.entry_point):
            raise KeyError(name)
        value, module = self.peer.name(name), ALIASES.get(name, name)
        if value is SOLUTION_MODULE:  # imported here, by the name that the tests use
            self[name] = value = importlib.import_module(module)
        elif module in MODULES and name != self.entry_point:
            called: Any = value
            return lambda *args, **kwargs: called(*args, **kwargs)  # without the attributes of a false module
        return value


def main() -> None:
    """Runs a solution with its tests, and writes the token if none of them failed."""
    order = receive_frame(0)
    (requests, writer), (reader, replies) = os.pipe(), os.pipe()
    builtins.exit = builtins.quit = sys.exit  # as `site` would define them
    if os.fork() == 0:
        os.close(writer)
        os.close(reader)
        silence(0, 1, 2)
        apply_limits(order)
        install_filter(order)
        solution = SolutionPeer(requests, replies)
        while True:
            solution.serve()
    os.close(requests)
    os.close(replies)
    apply_limits(order)
    secret = receive_frame(0)
    out = os.dup(1)
    silence(0, 1)
    peer, pid = TestPeer(reader, writer), os.getpid()
    peer.request("load", order["solution"])
    namespace = Namespace(peer, secret["entry_point"])
    for source in secret["stub"]:
        with contextlib.suppress(Exception):  # of an import that the sandbox lacks, for one
            namespace.run(source)
    namespace.run(secret["tests"])
    if os.getpid() == pid and not peer.is_broken:
        os.write(out, secret["token"].encode())
    os._exit(0)
