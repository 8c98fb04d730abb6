"""An interpreter for untrusted code: it runs programs with the same variables and replies with what they have printed.

Nothing in it is secret or trusted: a program may do with this process what it likes, and its replies are only texts.
A frame is a length of 8 bytes, followed by JSON.
"""

from __future__ import annotations

import ast
import io
import sys

from groupax.rewards.isolated.start import apply_limits, receive_frame, send_frame, take_over_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "<python>"  # file of the programs in tracebacks


class Output(io.TextIOBase):
    """A stream that keeps the start and the end of what is written."""

    def __init__(self, size: int) -> None:
        self.half = size // 2
        self.head = self.tail = ""
        self.num_lost = 0

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, text: str, /) -> int:
        """Adds a text."""
        room = self.half - len(self.head)
        self.head += text[:room]
        tail = self.tail + text[room:] if len(text) > room else self.tail
        self.tail = tail[-self.half :]
        self.num_lost += len(tail) - len(self.tail)
        return len(text)

    def text(self) -> str:
        """Returns what was kept, with a note of what was not."""
        note = f"\n[... {self.num_lost:,} characters left out ...]\n" if self.num_lost else ""
        return self.head + note + self.tail


def main(order: dict[str, Any]) -> None:
    """Serves programs until the trainer ends the process."""
    import random

    reader, writer = take_over_streams()
    apply_limits(order)
    random.seed(order["seed"])
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    send_frame(writer, {"number": 0, "text": ""})  # it has started
    while True:
        request = receive_frame(reader)
        output = Output(order["output_chars"])
        sys.stdout = sys.stderr = output
        try:
            run(request["code"], module.__dict__)
        except BaseException as error:  # noqa: BLE001 - of the program
            output.write(description(error))
        send_frame(writer, {"number": request["number"], "text": output.text()})


def run(code: str, namespace: dict[str, Any]) -> None:
    """Runs a program and prints the value of its last statement if that is an expression."""
    tree = ast.parse(code, NAME)
    last = tree.body[-1] if tree.body else None
    last = last if isinstance(last, ast.Expr) else None
    if last is not None:
        tree.body.pop()
    exec(compile(tree, NAME, "exec", dont_inherit=True), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True), namespace)
        if value is not None:
            sys.stdout.write(repr(value) + "\n")


def description(error: BaseException) -> str:
    """Returns the traceback of an error from the program's first line on."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # noqa: BLE001 - the error is the program's
        return type(error).__name__ + "\n"
