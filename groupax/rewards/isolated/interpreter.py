"""An interpreter for untrusted code: it runs programs with the same variables and replies with what they have printed.

Nothing in it is secret or trusted: a program may do with this process what it likes, and its replies are only texts.
"""

from __future__ import annotations

import ast
import io
import os
import sys

from groupax.rewards.isolated.process import apply_limits, install_filter, receive_frame, send_frame, silence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "<python>"  # file of the programs in tracebacks
MAX_OUTPUT_CHARS = 16 << 20


class Output(io.StringIO):
    """A stream that drops what exceeds `MAX_OUTPUT_CHARS`, as an endless loop prints it."""

    def write(self, text: str, /) -> int:
        """Adds a text."""
        return super().write(text) if self.tell() < MAX_OUTPUT_CHARS else len(text)


def main() -> None:
    """Serves programs until the trainer ends the process."""
    import random

    order = receive_frame(0)
    reader, writer = os.dup(0), os.dup(1)
    silence(0, 1, 2)
    apply_limits(order)
    install_filter(order)
    random.seed(order["seed"])
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    send_frame(writer, "")  # it has started
    while True:
        code = receive_frame(reader)
        sys.stdout = sys.stderr = output = Output()
        try:
            run(code, module.__dict__)
        except BaseException as error:  # noqa: BLE001 - of the program
            output.write(description(error))
        text, half = output.getvalue(), order["output_chars"] // 2
        if len(text) > 2 * half:
            text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
        send_frame(writer, text)


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
