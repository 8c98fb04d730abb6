"""The process of the tests: it starts the solution's, runs the tests, and tells the word if they come to their end.

What the tests take from the solution are values of the standard library's types and stand-ins. A stand-in never shows
the solution what a result is compared with: operands are told only to objects that the tests made themselves, by
calling a class (see `docs/rewards.md`).
"""

from __future__ import annotations

import _thread
import builtins
import os
import re
import sys
import time

from groupax.rewards.isolated.peer import COMPARISONS, OPERANDS, OPERATORS, UNARY, Peer, StandIn
from groupax.rewards.isolated.start import BOOTSTRAP, confine, descriptors, packed
from groupax.rewards.isolated.wire import MUTABLE, MalformedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TESTS = "tests"  # the tests' `__name__`
MAX_FILES = 10_000  # in /tmp: empty ones cost memory that its size does not bound
CLASS_NAME = re.compile("[A-Z][A-Za-z0-9]*")
# Modules that tests use under another name without importing them, as the solution does.
ALIASES = {"np": "numpy", "pd": "pandas"}
MODULES = frozenset({*sys.stdlib_module_names, *ALIASES.values()})
SOLUTION_MODULE = object()
# What makes a number or a truth value of an object.
NUMBERS = frozenset({"abs", "bool", "int", "float", "complex", "index", "round", "len"})
READABLE = frozenset(
    {"__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__dict__", "__wrapped__"}
)
# Methods of plain values, arrays and tables: where a test calls one on a result, it expects such a value.
PLAIN_METHODS = frozenset(
    name
    for kind in (str, bytes, int, float, complex, tuple, frozenset, range, *MUTABLE.values())
    for name in dir(kind)
    if not name.startswith("_")
) | {"all", "any", "equals", "eq", "ne", "isin", "compare", "isclose", "is_close", "allclose"}


class TestPeer(Peer):
    """Asks the solution, and lets it do with objects of the tests what a function does with its arguments."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.is_wrong = False
        self.members: set[int] = set()  # stand-ins of members of enumerations, which tests compare with `is`

    # What the solution may be asked.

    def name(self, name: str) -> Any:
        """Returns what the solution defines under a name; raises KeyError if it defines nothing."""
        value = self.request("name", None, name)
        return self._named(value, name)

    def call(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what the solution made; an instance that is made so is the tests' own."""
        rights = stand_in._groupax_rights
        if rights == "plain method" and (args or kwargs):
            raise TypeError("a method that plain values have is not called on an object that the solution returned")
        if rights != "class":
            return self.request("call", stand_in, *args, **kwargs)
        value = self.request("new", stand_in, *args, **kwargs)
        return self._with(value, "own") if isinstance(value, StandIn) else value

    def attribute(self, stand_in: StandIn, name: str) -> Any:
        """Returns an attribute of what the solution made."""
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        value = self.request("getattr", stand_in, name)
        return self._named(value, name) if stand_in._groupax_rights in ("own", "class") else self.named(name, value)

    def named(self, name: str, value: Any) -> Any:
        """Returns an attribute of what the solution returned; it may not stand for a method that plain values have."""
        if name not in PLAIN_METHODS:
            return self._named(value, name)
        if callable(value) and not isinstance(value, StandIn):
            raise TypeError(f"{name} of an object that the solution returned is a function of another kind")
        return self._with(value, "plain method") if isinstance(value, StandIn) else value

    def operate(self, stand_in: StandIn, name: str, args: tuple[Any, ...], is_reflected: bool) -> Any:
        """Returns what an operator gives, unless the solution would see what a plain value is compared with.

        An instance that the tests made may be computed with plain values; what comes of it is no plain value.
        """
        rights = stand_in._groupax_rights
        is_told = name in OPERANDS and not all(isinstance(arg, StandIn) for arg in args)
        if is_told and (name in COMPARISONS or rights not in ("own", "class", "computed")):
            raise TypeError("an object of the solution is not compared or computed with a value of the tests")
        if rights == "computed" and name in NUMBERS:
            raise TypeError(f"{name} of an object that was computed with a value of the tests")
        value = super().operate(stand_in, name, args, is_reflected)
        if not is_told and not (rights == "computed" and name in UNARY):
            return value
        if not isinstance(value, StandIn):
            raise TypeError(f"{name} of an object of the solution and a value of the tests gave no object")
        return self._with(value, "computed")

    def contains(self, stand_in: StandIn, item: Any) -> bool:
        """Whether what the solution made contains something; of a returned object its items are looked through."""
        if isinstance(item, StandIn) or stand_in._groupax_rights in ("own", "class"):
            return super().contains(stand_in, item)
        return any(each is item or each == item for each in iter(stand_in))

    def stand_in(self, number: Any, kind: Any) -> Any:
        """Returns the stand-in of an object, or a coroutine that has the solution run its own."""
        value = super().stand_in(number, kind)
        if kind == "enum":
            self.members.add(number)
        return self._awaited(value) if kind == "coroutine" else value

    def module(self, _name: Any) -> Any:
        """Returns a mark for any module: which one a name means is not left to the solution."""
        return SOLUTION_MODULE

    def quiet(self) -> None:
        """Checks that nothing has come that was not asked for."""
        if not self.is_silent():
            raise self.broken()

    def _named(self, value: Any, name: str) -> Any:
        return self._with(value, "class") if isinstance(value, StandIn) and CLASS_NAME.fullmatch(name) else value

    def _with(self, value: StandIn, rights: str) -> StandIn:
        if value._groupax_number in self.members:
            return value
        key = (value._groupax_number, rights)
        if key not in self.stand_ins:
            self.stand_ins[key] = StandIn(self, value._groupax_number, rights)
        return self.stand_ins[key]

    async def _awaited(self, value: StandIn) -> Any:
        return self.request("await", value)

    # What the solution may ask.

    def may_hold(self, value: Any) -> bool:
        """Whether the solution may have a stand-in: of functions, iterators, and instances of the tests' classes."""
        return callable(value) or hasattr(type(value), "__next__") or _is_own(value)

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Does what the solution asks for with an object that the tests passed to it."""
        if target is None and operation == "input":
            return input(*args)
        if target is None and operation == "stdin":
            method, size = args
            return getattr(sys.stdin, {"readline": "readline", "read": "read"}[method])(size)
        number = self.numbers.get(id(target))
        if number is None or self.kept[number] is not target:
            raise MalformedError
        try:
            if operation == "call" and callable(target):
                return target(*args, **kwargs)
            if operation in ("next", "iter") and hasattr(type(target), "__next__"):
                return OPERATORS[operation](target)
            if operation == "getattr" and _may_read(target, *args):
                return getattr(target, args[0])
            if operation == "setattr" and _is_own(target) and _is_data(target, args[0]):
                return setattr(target, *args)
            if operation in OPERATORS and _is_own(target):
                return OPERATORS[operation](target, *args)
        except AssertionError:
            self.is_wrong = True  # whether or not the solution lets it through
            raise
        if operation == "getattr":
            raise AttributeError(args[0])
        raise TypeError(f"{operation} of a {type(target).__name__} of the tests")

    def show(self, text: str) -> None:
        """Prints what the solution printed where the tests print."""
        sys.stdout.write(text)


class Names(dict):
    """The tests' global names. Those that they do not define are the solution's, but for built-in ones and modules.

    Args:
        peer: The solution's.
        entry_point: A name that is the solution's in any case.
        stub: Statements that bind other names, and these; they are run when one of their names is used.
    """

    def __init__(self, peer: TestPeer, entry_point: str, stub: list[tuple[str, list[str]]]) -> None:
        super().__init__(__name__=TESTS)
        self.peer, self.entry_point, self.stub = peer, entry_point, stub

    def run(self, source: str) -> None:
        """Runs statements in this namespace."""
        exec(compile(source, "tests.py", "exec", dont_inherit=True), self)

    def __missing__(self, name: str) -> Any:
        wanted = [each for each in self.stub if name in each[1] or "*" in each[1]]
        if wanted:
            self.stub = [each for each in self.stub if each not in wanted]
            for source, _ in wanted:
                self.run(source)
            return self[name]
        if name.startswith("__") or (hasattr(builtins, name) and name != self.entry_point):
            raise KeyError(name)
        value = self.peer.name(name)
        module = ALIASES.get(name, name)
        if value is SOLUTION_MODULE:  # imported here by the name that the tests use, not by what the solution says
            import importlib

            self[name] = value = importlib.import_module(module)
        elif isinstance(value, StandIn) and name != self.entry_point and module in MODULES:
            return Late(value, module)
        return value


class Late:
    """A name of a module and of a function of the solution: attributes are the module's, calls the function's."""

    def __init__(self, function: StandIn, module: str) -> None:
        self.__dict__.update(_groupax=(function, module))

    def __getattr__(self, name: str) -> Any:
        import importlib

        return getattr(importlib.import_module(self._groupax[1]), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._groupax[0](*args, **kwargs)


def main(order: dict[str, Any]) -> None:
    """Runs the tests and writes the order's word if none of them failed."""
    reader, writer = _start_solution(order)
    silent, out = descriptors()
    os.close(silent)
    confine(order)
    if order["is_watched"]:
        _thread.start_new_thread(_watch, ())
    peer = TestPeer(reader, writer)
    builtins.exit = builtins.quit = sys.exit
    names, word, pid = Names(peer, order["entry_point"], order["stub"]), order["word"], os.getpid()
    peer.request("load", None, order["solution"])
    names.run(order["tests"])
    peer.quiet()
    if os.getpid() == pid and not peer.is_wrong and not peer.is_broken:
        os.write(out, word)
    os._exit(0)


def _start_solution(order: dict[str, Any]) -> tuple[int, int]:
    """Starts the solution's process; returns the descriptors to read its replies from and write requests to."""
    requests, to_solution = os.pipe()
    replies, from_solution = os.pipe()
    actions: list[Any] = [
        (os.POSIX_SPAWN_DUP2, requests, 0),
        (os.POSIX_SPAWN_DUP2, from_solution, 1),
    ]
    if not order["shows_errors"]:
        actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0))
    closed = [requests, from_solution]
    if order["filter"]:
        program, filled = os.pipe()
        os.write(filled, order["filter"])
        os.close(filled)
        actions.append((os.POSIX_SPAWN_DUP2, program, order["filter_descriptor"]))
        closed.append(program)
    command = [*order["command"], "-c", BOOTSTRAP]
    os.posix_spawn(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=actions)
    for descriptor in closed:
        os.close(descriptor)
    own = ("tests", "word", "solution", "stub", "command", "filter", "modules", "solution_modules", "entry_point")
    data = {name: value for name, value in order.items() if name not in own}
    data["modules"] = order["solution_modules"]
    view = memoryview(packed(data))
    while view:
        view = view[os.write(to_solution, view) :]
    return replies, to_solution


def _watch() -> None:
    """Ends everything once there are too many files."""
    while True:
        disk = os.statvfs("/tmp")
        if disk.f_files - disk.f_ffree > MAX_FILES:
            os._exit(1)
        time.sleep(0.05)


def _is_own(value: Any) -> bool:
    """Whether a value is an instance of a class of the tests."""
    return type(value).__module__ == TESTS


def _may_read(target: Any, name: str) -> bool:
    if name in ("__name__", "__qualname__", "__doc__", "__module__"):
        return True
    if name.startswith("_"):
        return False
    kind = type(target)
    if _is_own(target) or kind.__module__ == "_io":
        return True
    if kind.__module__ == "unittest.mock":
        return not hasattr(kind, name)
    return name in getattr(target, "__dict__", ()) and kind.__name__ == "function"


def _is_data(target: Any, name: str) -> bool:
    """Whether an attribute may be set: it is no method."""
    return not name.startswith("_") and not callable(getattr(target, name, None))
