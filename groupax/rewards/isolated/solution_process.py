"""The solution's process: it runs the solution and does what the process of the tests asks of it.

Nothing in it is secret or relied upon: a solution may do with this process what it likes, and what it says is only data
to the other one.
"""

from __future__ import annotations

import builtins
import io
import os
import sys

from groupax.rewards.isolated.peer import MAX_OUTPUT_CHARS, OPERATORS, BrokenError, Peer
from groupax.rewards.isolated.start import confine, descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Whole:
    """Marks an instance that the tests made: it is held, whatever it extends."""

    def __init__(self, value: Any) -> None:
        self.value = value


class SolutionPeer(Peer):
    """Answers what the tests ask."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        sys.modules["solution"] = type(sys)("solution")  # where dataclasses, for one, look for their class
        self.namespace: dict[str, Any] = sys.modules["solution"].__dict__
        self.output = io.BytesIO()

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Does what the tests ask for."""
        if operation == "load":
            return exec(compile(args[0], "solution.py", "exec", dont_inherit=True), self.namespace)
        if operation == "name":
            return self.namespace[args[0]]
        if operation == "call":
            return target(*args, **kwargs)
        if operation == "new":
            return _whole(target(*args, **kwargs))
        if operation == "reflected":
            return OPERATORS[args[0]](args[1], target)
        if operation in ("copy", "deepcopy"):
            import copy

            return _whole(getattr(copy, operation)(target))
        if operation == "await":
            import asyncio

            return asyncio.run(target)
        plain = {"getattr": getattr, "setattr": setattr, "isinstance": isinstance, "issubclass": issubclass}
        return {**plain, **OPERATORS}[operation](target, *args)

    def hold(self, value: Any) -> list[Any]:
        """Returns what stands for an object that does not cross."""
        if isinstance(value, Whole):
            return ["mine", self._number(value.value), "object"]
        return super().hold(value)

    def module(self, _name: Any) -> Any:
        """Returns the module that the tests passed."""
        import importlib

        return importlib.import_module(_name)

    def printed(self) -> str:
        """Returns what was printed here since the last frame."""
        text = self.output.getvalue().decode(errors="replace")[:MAX_OUTPUT_CHARS]
        self.output.seek(0)
        self.output.truncate()
        return text


class Input(io.TextIOBase):
    """Standard input: that of the tests."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def readable(self) -> bool:
        """Says that it can be read."""
        return True

    def readline(self, size: int = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the next line."""
        return self.peer.request("stdin", None, "readline", size)

    def read(self, size: int | None = -1, /) -> str:
        """Returns the rest."""
        return self.peer.request("stdin", None, "read", -1 if size is None else size)


def main(order: dict[str, Any]) -> None:
    """Serves requests until there are no more."""
    reader, writer = descriptors()
    confine(order)
    peer = SolutionPeer(reader, writer)
    sys.stdout = io.TextIOWrapper(peer.output, "utf-8", write_through=True)
    sys.stdin = Input(peer)
    builtins.input = lambda prompt="", /: peer.request("input", None, str(prompt))
    builtins.exit = builtins.quit = sys.exit  # which `site` would make
    try:
        while True:
            peer.serve(peer.receive())
    except BrokenError:
        os._exit(0)


def _whole(value: Any) -> Any:
    """An instance of the solution's own class as such, unless it is one of a named tuple or an enumeration."""
    kind = type(value)
    is_own = kind.__module__ == "solution" and not isinstance(value, BaseException)
    return Whole(value) if is_own and not hasattr(kind, "_fields") and not hasattr(kind, "__members__") else value
