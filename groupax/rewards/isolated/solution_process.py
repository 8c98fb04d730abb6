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


class Instance:
    """A mark of instances that the tests created, which are never sent as data, even if their class extends a list."""

    def __init__(self, value: Any) -> None:
        self.value = value


class SolutionPeer(Peer):
    """The end of the pipes that serves the tests' requests."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        sys.modules["solution"] = type(sys)("solution")  # dataclasses, for one, look up their class here
        self.namespace: dict[str, Any] = sys.modules["solution"].__dict__
        self.output = io.BytesIO()

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Executes an operation that the tests request."""
        if operation == "load":
            return exec(compile(args[0], "solution.py", "exec", dont_inherit=True), self.namespace)
        if operation == "name":
            return self.namespace[args[0]]
        if operation == "call":
            return target(*args, **kwargs)
        if operation == "new":
            return _marked(target(*args, **kwargs))
        if operation == "reflected":
            return OPERATORS[args[0]](args[1], target)
        if operation in ("copy", "deepcopy"):
            import copy

            return _marked(getattr(copy, operation)(target))
        if operation == "await":
            import asyncio

            return asyncio.run(target)
        plain = {"getattr": getattr, "setattr": setattr, "isinstance": isinstance, "issubclass": issubclass}
        return {**plain, **OPERATORS}[operation](target, *args)

    def encode_object(self, value: Any) -> list[Any]:
        """Returns the reference to an object that cannot be sent as data."""
        if isinstance(value, Instance):
            return ["mine", self._number(value.value), "object"]
        return super().encode_object(value)

    def module(self, _name: Any) -> Any:
        """Returns the module that the tests have passed."""
        import importlib

        return importlib.import_module(_name)

    def printed(self) -> str:
        """Returns the text that was printed here since the last frame."""
        text = self.output.getvalue().decode(errors="replace")[:MAX_OUTPUT_CHARS]
        self.output.seek(0)
        self.output.truncate()
        return text


class Input(io.TextIOBase):
    """The standard input of the tests."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readline(self, size: int = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the next line."""
        return self.peer.request("stdin", None, "readline", size)

    def read(self, size: int | None = -1, /) -> str:
        """Returns the remaining text."""
        return self.peer.request("stdin", None, "read", -1 if size is None else size)


def main(order: dict[str, Any]) -> None:
    """Serves requests until the tests end."""
    reader, writer = take_over_streams()
    apply_limits(order)
    peer = SolutionPeer(reader, writer)
    sys.stdout = io.TextIOWrapper(peer.output, "utf-8", write_through=True)
    sys.stdin = Input(peer)
    builtins.input = lambda prompt="", /: peer.request("input", None, str(prompt))
    builtins.exit = builtins.quit = sys.exit  # as `site` would define them
    try:
        while True:
            peer.serve(peer.receive())
    except BrokenError:
        os._exit(0)


def _marked(value: Any) -> Any:
    """Marks an instance of a class of the solution, unless that is a named tuple, an enumeration or an exception."""
    kind = type(value)
    is_own = kind.__module__ == "solution" and not isinstance(value, BaseException)
    return Instance(value) if is_own and not hasattr(kind, "_fields") and not hasattr(kind, "__members__") else value
