"""The process of the tests: it starts that of the solution, runs the tests, and writes its token if they reach the end.

The tests receive from the solution only values of the standard library's types and handles of its objects. A handle
never reveals to the solution what a result is compared with: its operators take handles alone. Only an object that the
tests created themselves, by calling a class, is asked whether it contains a value, or has methods with the names of
those of plain values (see `docs/rewards.md`).
"""

from __future__ import annotations

import _thread
import builtins
import importlib
import os
import re
import sys
import time

from groupax.rewards.isolated.protocol import BINARY, MUTABLE, OPERATORS, MalformedError, Peer
from groupax.rewards.isolated.start import (
    PAUSE_S,
    apply_limits,
    has_too_many_files,
    inner_order,
    send,
    spawn_untrusted,
    take_over_streams,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TESTS = "tests"  # `__name__` of the tests
CLASS_NAME = re.compile("[A-Z][A-Za-z0-9]*")
# Modules that tests use under another name without importing them, as the solution imports them.
ALIASES = {"np": "numpy", "pd": "pandas"}
MODULES = frozenset({*sys.stdlib_module_names, *ALIASES.values()})
SOLUTION_MODULE = object()
READABLE = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__dict__"})
# Methods of plain values, arrays and data frames. A test that calls one on a result expects such a value.
PLAIN_METHODS = frozenset(
    name
    for kind in (str, bytes, int, float, complex, tuple, frozenset, range, *MUTABLE.values())
    for name in dir(kind)
    if not name.startswith("_")
) | {"all", "any", "equals", "eq", "ne", "isin", "compare", "isclose", "is_close", "allclose"}


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
    """Sends requests to the solution, which may call functions and iterators of the tests, and read their input."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.is_wrong = False
        self.classes: dict[str, type] = {}  # of the tests, whose instances the solution has received

    def name(self, name: str) -> Any:
        """Returns the value of a global name of the solution; raises KeyError if it does not define the name."""
        value = self.request("name", name)
        return with_rights(value, "class") if CLASS_NAME.fullmatch(name) else value

    def perform(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function of the tests, or returns the next item of an iterator, that was passed to the solution."""
        try:
            match operation, args:
                case "input", [prompt]:
                    return input(prompt)
                case "stdin", ["readline" | "read" as method, size]:
                    return getattr(sys.stdin, method)(size)
                case "call", [int() as number, *rest] if number >= 0:
                    return self.shared[number](*rest, **kwargs)
                case "next", [int() as number] if number >= 0:
                    return next(self.shared[number])
        except AssertionError:
            self.is_wrong = True  # even if the solution catches it
            raise
        raise MalformedError

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object of the solution, or to a function or iterator of the tests."""
        if isinstance(value, Handle):
            return ["yours", value._groupax_number]
        is_iterator = hasattr(type(value), "__next__")
        if not is_iterator and not callable(value):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the solution")
        self.shared.append(value)
        return ["iterator" if is_iterator else "function", len(self.shared) - 1, getattr(value, "__name__", "")]

    def decode_object(self, node: list[Any]) -> Any:
        """Returns the handle of an object of the solution, or what it has received from the tests.

        All modules have the same mark, because the solution must not decide which module a name means.
        """
        match node:
            case ["mine", int() as number, kind]:
                handle = Handle(self, number)
                return self._awaited(handle) if kind == "coroutine" else handle
            case ["yours", int() as number] if number >= 0:
                return self.shared[number]
            case ["module"]:
                return SOLUTION_MODULE
        raise MalformedError

    def has_shared_class(self, value: Any) -> bool:
        """Returns whether this is an instance of a class of the tests, which is sent by its attributes."""
        kind = type(value)
        if kind.__module__ != TESTS or not hasattr(value, "__dict__") or isinstance(value, BaseException):
            return False
        if callable(value) or hasattr(kind, "__next__"):
            return False
        return self.classes.setdefault(kind.__name__, kind) is kind

    def class_named(self, name: Any) -> type:
        """Returns the tests' class of an instance that the solution returns."""
        return self.classes[name]

    def check_member(self, owner: type, name: Any, value: Any) -> None:
        """Refuses attributes from the solution that would replace a method, or imitate one of plain values."""
        if type(name) is not str or name.startswith("__") or callable(getattr(owner, name, None)):
            raise MalformedError
        if name in PLAIN_METHODS and callable(value):
            raise MalformedError

    def show(self, text: str) -> None:
        """Prints the text of the solution where the tests print."""
        sys.stdout.write(text)

    async def _awaited(self, value: Handle) -> Any:
        return self.request("await", value)


class Namespace(dict):
    """The global names of the tests. Undefined names are the solution's, except for built-in ones and modules.

    Args:
        peer: The connection to the solution.
        entry_point: A name that is always the solution's.
        stub: Statements with the names that they bind, which are run when one of these names is used.
    """

    def __init__(self, peer: TestPeer, entry_point: str, stub: list[tuple[str, list[str]]]) -> None:
        super().__init__(__name__=TESTS)
        self.peer, self.entry_point, self.stub = peer, entry_point, stub

    def run(self, source: str) -> None:
        """Runs statements in this namespace."""
        exec(compile(source, "tests.py", "exec", dont_inherit=True), self)

    def __missing__(self, name: str) -> Any:
        needed = [each for each in self.stub if name in each[1] or "*" in each[1]]
        if needed:
            self.stub = [each for each in self.stub if each not in needed]
            for source, _ in needed:
                self.run(source)
            return self[name]
        if name.startswith("__") or (hasattr(builtins, name) and name != self.entry_point):
            raise KeyError(name)
        value, module = self.peer.name(name), ALIASES.get(name, name)
        if value is SOLUTION_MODULE:  # imported here, by the name that the tests use
            self[name] = value = importlib.import_module(module)
        elif isinstance(value, (Handle, tuple, BaseException)) and name != self.entry_point and module in MODULES:
            called: Any = value  # what is not a function raises as it would there
            return lambda *args, **kwargs: called(*args, **kwargs)  # without the attributes of a false module
        return value


def main(order: dict[str, Any]) -> None:
    """Runs the tests and writes the order's token if none of them failed."""
    (requests, writer), (reader, replies) = os.pipe(), os.pipe()
    spawn_untrusted(order, requests, replies, 2 if order["shows_errors"] else os.open(os.devnull, os.O_RDWR))
    for descriptor in (requests, replies):
        os.close(descriptor)
    send(writer, inner_order(order))
    silent, out = take_over_streams()
    os.close(silent)
    apply_limits(order)
    if order["is_watched"]:
        _thread.start_new_thread(_watch, ())
    peer = TestPeer(reader, writer)
    builtins.exit = builtins.quit = sys.exit
    namespace, token, pid = Namespace(peer, order["entry_point"], order["stub"]), order["token"], os.getpid()
    peer.request("load", order["solution"])
    namespace.run(order["tests"])
    if os.getpid() == pid and not peer.is_wrong and not peer.is_broken:
        os.write(out, token)
    os._exit(0)


def _watch() -> None:
    """Waits until there are too many files, then exits, which ends the sandbox."""
    while not has_too_many_files():
        time.sleep(PAUSE_S)
    os._exit(1)
