"""A program on a pseudo-terminal of a given size, and what a person sees on its screen."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

PATIENCE_S = 60.0
NOTHING: Mapping[str, str] = {}


class Terminal:
    """A program with a terminal, which it ends as a context; `written` has every byte that reached the terminal."""

    def __init__(
        self, argv: Sequence[str], columns: int, rows: int = 40, environment: Mapping[str, str] = NOTHING
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.parent, child = pty.openpty()
        self._set_size(columns, rows)
        modes = termios.tcgetattr(child)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(child, termios.TCSANOW, modes)
        variables = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            variables.pop(name, None)
        variables |= environment
        self.program = subprocess.Popen(argv, stdin=child, stdout=child, stderr=child, env=variables, close_fds=True)
        os.close(child)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self.parent)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without what is empty."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Reads what the program writes until the condition holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not what():
            is_running = self._read(0.05)
            assert is_running or what(), "the program has ended:\n" + "\n".join(self.lines)
            assert time.monotonic() < deadline_s, "\n".join(self.lines)

    def wait_for_text(self, text: str) -> None:
        """Reads until the text is on the screen."""
        self.wait_for(lambda: any(text in line for line in self.lines))

    def wait_for_end(self) -> int:
        """Reads until the program ends; returns its exit status."""
        while self._read(PATIENCE_S):
            pass
        return self.program.wait(PATIENCE_S)

    def resize(self, columns: int) -> None:
        """Makes the terminal wider or narrower; what is on its screen is cut off and not wrapped."""
        self._set_size(columns, self.screen.lines)
        self.screen.resize(self.screen.lines, columns)

    def press_enter(self) -> None:
        """Has the program go on that waits for a line."""
        os.write(self.parent, b"\n")

    def _read(self, patience_s: float) -> bool:
        """Reads a piece if there is one; False if there will be no more."""
        if not select.select([self.parent], [], [], patience_s)[0]:
            return True
        try:
            piece = os.read(self.parent, 65536)
        except OSError:  # no program has the terminal any more
            return False
        self.written += piece
        self.stream.feed(piece)
        return bool(piece)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def python(code: str) -> list[str]:
    """Arguments that run the code."""
    return [sys.executable, "-c", code]
