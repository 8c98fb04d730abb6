"""The process of the tests: it starts that of the solution, runs the tests, and writes its token if they reach the end.

The tests receive from the solution only values of the standard library's types and stand-ins. A stand-in never reveals
to the solution what a result is compared with: operands are sent only to objects that the tests created themselves by
calling a class (see `docs/rewards.md`). A stand-in has one of these rights:

    ""              an object that the solution returned
    "class"         a class of the solution
    "own"           an instance that the tests created by calling a class
    "computed"      the result of an operator on such an instance and a value of the tests
    "plain method"  an attribute with the name of a method of plain values
"""

from __future__ import annotations

import _thread
import builtins
import os
import re
import sys
import time

from groupax.rewards.isolated.protocol import (
    COMPARISONS,
    MUTABLE,
    OPERANDS,
    OPERATORS,
    UNARY,
    MalformedError,
    Peer,
    StandIn,
)
from groupax.rewards.isolated.start import (
    PAUSE_S,
    apply_limits,
    has_too_many_files,
    serialize_order,
    spawn_untrusted,
    take_over_streams,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TESTS = "tests"  # `__name__` of the tests
CLASS_NAME = re.compile("[A-Z][A-Za-z0-9]*")
# Modules that tests use under another name without importing them, as the solution imports them.
ALIASES = {"np": "numpy", "pd": "pandas"}
MODULES = frozenset({*sys.stdlib_module_names, *ALIASES.values()})
SOLUTION_MODULE = object()
# Operators that turn an object into a number or a truth value.
NUMBERS = frozenset({"abs", "bool", "int", "float", "complex", "index", "round", "len"})
READABLE = frozenset(
    {"__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__dict__", "__wrapped__"}
)
# Methods of plain values, arrays and data frames. A test that calls one on a result expects such a value.
PLAIN_METHODS = frozenset(
    name
    for kind in (str, bytes, int, float, complex, tuple, frozenset, range, *MUTABLE.values())
    for name in dir(kind)
    if not name.startswith("_")
) | {"all", "any", "equals", "eq", "ne", "isin", "compare", "isclose", "is_close", "allclose"}


class TestPeer(Peer):
    """Sends requests to the solution, and lets it use objects of the tests as a function uses its arguments."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.is_wrong = False
        self.members: set[int] = set()  # numbers of members of enumerations, which tests compare with `is`

    # Requests to the solution.

    def name(self, name: str) -> Any:
        """Returns the value of a global name of the solution; raises KeyError if it does not define the name."""
        value = self.request("name", None, name)
        return self._as_class(value, name)

    def call(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an object of the solution. An instance that a class returns is then the tests' own."""
        rights = stand_in._groupax_rights
        if rights == "plain method" and (args or kwargs):
            raise TypeError(
                "a method of plain values is not called with arguments on an object that the solution returned"
            )
        if rights != "class":
            return self.request("call", stand_in, *args, **kwargs)
        value = self.request("new", stand_in, *args, **kwargs)
        return self._with_rights(value, "own") if isinstance(value, StandIn) else value

    def attribute(self, stand_in: StandIn, name: str) -> Any:
        """Returns an attribute of an object of the solution."""
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        value = self.request("getattr", stand_in, name)
        return self._as_class(value, name) if stand_in._groupax_rights in ("own", "class") else self.member(name, value)

    def member(self, name: str, value: Any) -> Any:
        """Returns an attribute of an object that the solution returned, which must not imitate a plain method."""
        if name not in PLAIN_METHODS:
            return self._as_class(value, name)
        if callable(value) and not isinstance(value, StandIn):
            raise TypeError(f"{name} of an object that the solution returned is not a function of the solution")
        return self._with_rights(value, "plain method") if isinstance(value, StandIn) else value

    def operate(self, stand_in: StandIn, name: str, args: tuple[Any, ...], is_reflected: bool) -> Any:
        """Returns the result of an operator, unless that would reveal to the solution what a result is compared with.

        An instance that the tests created may be an operand together with their plain values, if the result is not a
        plain value.
        """
        rights = stand_in._groupax_rights
        is_revealed = name in OPERANDS and not all(isinstance(arg, StandIn) for arg in args)
        if is_revealed and (name in COMPARISONS or rights not in ("own", "class", "computed")):
            raise TypeError("an object of the solution is not compared or computed with a value of the tests")
        if rights == "computed" and name in NUMBERS:
            raise TypeError(f"{name} of an object that was computed with a value of the tests")
        value = super().operate(stand_in, name, args, is_reflected)
        if not is_revealed and not (rights == "computed" and name in UNARY):
            return value
        if not isinstance(value, StandIn):
            raise TypeError(f"{name} of an object of the solution and a value of the tests gave no object")
        return self._with_rights(value, "computed")

    def contains(self, stand_in: StandIn, item: Any) -> bool:
        """Returns whether an object of the solution contains an item. Items of a returned object are compared here."""
        if isinstance(item, StandIn) or stand_in._groupax_rights in ("own", "class"):
            return super().contains(stand_in, item)
        return any(each is item or each == item for each in iter(stand_in))

    def stand_in(self, number: Any, kind: Any) -> Any:
        """Returns the stand-in for an object, or a coroutine that has the solution run its own."""
        value = super().stand_in(number, kind)
        if kind == "enum":
            self.members.add(number)
        return self._awaited(value) if kind == "coroutine" else value

    def module(self, _name: Any) -> Any:
        """Returns the same mark for every module, because the solution must not decide which module a name means."""
        return SOLUTION_MODULE

    def check_silent(self) -> None:
        """Checks that nothing unrequested was received."""
        if not self.is_silent():
            raise self.broken()

    def _as_class(self, value: Any, name: str) -> Any:
        return self._with_rights(value, "class") if isinstance(value, StandIn) and CLASS_NAME.fullmatch(name) else value

    def _with_rights(self, value: StandIn, rights: str) -> StandIn:
        if value._groupax_number in self.members:
            return value
        key = (value._groupax_number, rights)
        if key not in self.stand_ins:
            self.stand_ins[key] = StandIn(self, value._groupax_number, rights)
        return self.stand_ins[key]

    async def _awaited(self, value: StandIn) -> Any:
        return self.request("await", value)

    # Requests of the solution.

    def may_share(self, value: Any) -> bool:
        """Returns whether the solution may receive a stand-in of a value; other values are never shared."""
        return callable(value) or hasattr(type(value), "__next__") or _is_own(value)

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Executes an operation on an object that the tests have passed to the solution."""
        if target is None and operation == "input":
            return input(*args)
        if target is None and operation == "stdin":
            method, size = args
            return getattr(sys.stdin, {"readline": "readline", "read": "read"}[method])(size)
        number = self.numbers.get(id(target))
        if number is None or self.shared[number] is not target:
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
            self.is_wrong = True  # even if the solution catches it
            raise
        if operation == "getattr":
            raise AttributeError(args[0])
        raise TypeError(f"{operation} of a {type(target).__name__} of the tests")

    def show(self, text: str) -> None:
        """Prints the text of the solution where the tests print."""
        sys.stdout.write(text)


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
        value = self.peer.name(name)
        module = ALIASES.get(name, name)
        if value is SOLUTION_MODULE:  # imported here, by the name that the tests use
            import importlib

            self[name] = value = importlib.import_module(module)
        elif isinstance(value, StandIn) and name != self.entry_point and module in MODULES:
            return ModuleOrFunction(value, module)
        return value


class ModuleOrFunction:
    """A name of both a module and a function of the solution: attributes are the module's, calls the function's."""

    def __init__(self, function: StandIn, module: str) -> None:
        self.__dict__.update(_groupax=(function, module))

    def __getattr__(self, name: str) -> Any:
        import importlib

        return getattr(importlib.import_module(self._groupax[1]), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._groupax[0](*args, **kwargs)


def main(order: dict[str, Any]) -> None:
    """Runs the tests and writes the order's token if none of them failed."""
    reader, writer = _start_solution(order)
    silent, out = take_over_streams()
    os.close(silent)
    apply_limits(order)
    if order["is_watched"]:
        _thread.start_new_thread(_watch, ())
    peer = TestPeer(reader, writer)
    builtins.exit = builtins.quit = sys.exit
    namespace, token, pid = Namespace(peer, order["entry_point"], order["stub"]), order["token"], os.getpid()
    peer.request("load", None, order["solution"])
    namespace.run(order["tests"])
    peer.check_silent()
    if os.getpid() == pid and not peer.is_wrong and not peer.is_broken:
        os.write(out, token)
    os._exit(0)


def _start_solution(order: dict[str, Any]) -> tuple[int, int]:
    """Starts the solution's process and returns the descriptors to read replies from and to write requests to."""
    requests, to_solution = os.pipe()
    replies, from_solution = os.pipe()
    actions: list[Any] = [
        (os.POSIX_SPAWN_DUP2, requests, 0),
        (os.POSIX_SPAWN_DUP2, from_solution, 1),
    ]
    if not order["shows_errors"]:
        actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0))
    spawn_untrusted(order, actions)
    for descriptor in (requests, from_solution):
        os.close(descriptor)
    own = ("tests", "token", "solution", "stub", "command", "filter", "modules", "solution_modules", "entry_point")
    data = {name: value for name, value in order.items() if name not in own}
    data["modules"] = order["solution_modules"]
    view = memoryview(serialize_order(data))
    while view:
        view = view[os.write(to_solution, view) :]
    return replies, to_solution


def _watch() -> None:
    """Waits until there are too many files, then exits, which ends the sandbox."""
    while not has_too_many_files():
        time.sleep(PAUSE_S)
    os._exit(1)


def _is_own(value: Any) -> bool:
    """Returns whether a value is an instance of a class of the tests."""
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
    """Returns whether an attribute may be set, because it is not a method."""
    return not name.startswith("_") and not callable(getattr(target, name, None))
