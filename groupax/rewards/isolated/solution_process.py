"""The process of the solution: it runs the solution and executes the requests of the test process.

Nothing in it is secret or trusted: a solution may do with this process what it likes, and what it sends is only data to
the other one.
"""

from __future__ import annotations

import builtins
import io
import os
import sys

from groupax.rewards.isolated.protocol import MAX_OUTPUT_CHARS, OPERATORS, BrokenError, Peer
from groupax.rewards.isolated.start import apply_limits, take_over_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SolutionPeer(Peer):
    """The end of the pipes that serves the tests' requests."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        sys.modules["solution"] = type(sys)("solution")  # dataclasses, for one, look up their class here
        self.namespace: dict[str, Any] = sys.modules["solution"].__dict__
        self.output = io.BytesIO()
        self.numbers: dict[int, int] = {}  # of `shared`, by id
        self.given: dict[int, int] = {}  # numbers of the tests' functions, by id of what stands for them here
        self.kept_ids: set[int] = set()  # of instances that the tests made
        self.kept: list[Any] = []  # keeps these ids
        self.classes: dict[str, type] = {}  # which the tests have too

    def perform(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Executes an operation that the tests request."""
        if operation == "load":
            return exec(compile(args[0], "solution.py", "exec", dont_inherit=True), self.namespace)
        if operation == "name":
            return self.namespace[args[0]]
        if operation == "call":
            made = args[0](*args[1:], **kwargs)
            if isinstance(args[0], type):
                self.kept_ids.add(id(made))
                self.kept.append(made)
            return made
        if operation == "await":
            import asyncio

            return asyncio.run(args[0])
        plain = {"getattr": getattr, "setattr": setattr, "isinstance": isinstance}
        return {**plain, **OPERATORS}[operation](*args)

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object that stays here, or to one of the tests."""
        if id(value) in self.given:
            return ["yours", self.given[id(value)]]
        if type(value) is type(sys):
            return ["module"]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.shared)
            self.shared.append(value)
        return ["mine", self.numbers[id(value)], type(value).__name__]

    def decode_object(self, node: list[Any]) -> Any:
        """Returns an object of the solution, or what stands for a function or an iterator of the tests."""
        kind, number = node[:2]
        if kind == "yours":
            return self.shared[number]
        if kind == "iterator":
            return self._items(number)

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.request("call", number, *args, **kwargs)

        function.__name__ = function.__qualname__ = node[2]
        self.given[id(function)] = number
        self.kept.append(function)
        return function

    def has_shared_class(self, value: Any) -> bool:
        """Returns whether the tests have sent instances of a class of this name."""
        return self.classes.get(type(value).__name__) is type(value)

    def class_named(self, name: Any) -> type:
        """Returns the solution's class of the same name, or a class without methods."""
        found = self.namespace.get(name)
        if name not in self.classes:
            self.classes[name] = found if isinstance(found, type) else type(name, (), {"__module__": "solution"})
        return self.classes[name]

    def printed(self) -> str:
        """Returns the text that was printed here since the last frame."""
        text = self.output.getvalue().decode(errors="replace")[:MAX_OUTPUT_CHARS]
        self.output.seek(0)
        self.output.truncate()
        return text

    def _items(self, number: int) -> Any:
        while True:
            try:
                item = self.request("next", number)
            except StopIteration:
                return
            yield item


class Input(io.TextIOBase):
    """The standard input of the tests."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readline(self, size: int = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the next line."""
        return self.peer.request("stdin", "readline", size)

    def read(self, size: int | None = -1, /) -> str:
        """Returns the remaining text."""
        return self.peer.request("stdin", "read", -1 if size is None else size)


def main(order: dict[str, Any]) -> None:
    """Serves requests until the tests end."""
    reader, writer = take_over_streams()
    apply_limits(order)
    peer = SolutionPeer(reader, writer)
    sys.stdout = io.TextIOWrapper(peer.output, "utf-8", write_through=True)
    sys.stdin = Input(peer)
    builtins.input = lambda prompt="", /: peer.request("input", str(prompt))
    builtins.exit = builtins.quit = sys.exit  # as `site` would define them
    try:
        while True:
            peer.serve(peer.receive())
    except BrokenError:
        os._exit(0)
