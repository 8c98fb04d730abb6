"""A live panel at the bottom of a terminal; printed lines scroll by above it."""

import io
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rich.ansi import AnsiDecoder
from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import ControlType, Segment
from rich.text import Text

from groupax.terminal.printable import printable

MAX_LINE_CHARACTERS = 10_000  # kept of a line without a newline, such as a progress bar's
COLORS = re.compile(r"(\x1b\[[0-9;]*m)")


class LivePanel:
    """A panel that is redrawn until it is stopped, and then erased.

    While it is shown, standard output and standard error are printed above it.

    Args:
        console: Console of the terminal.
        panel: Returns the renderable to draw. Called in the drawing thread.
        refreshes_per_s: Number of redraws per second.
    """

    def __init__(self, console: Console, panel: Callable[[], Any], refreshes_per_s: float) -> None:
        self.console = console
        self._live = Live(
            console=console,
            get_renderable=panel,
            refresh_per_second=refreshes_per_s,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live._live_render = _Reflowed(console, "")
        self._replaced: dict[str, Any] = {}

    def start(self) -> None:
        """Starts drawing the panel."""
        self._replaced = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        for name, stream in self._replaced.items():
            setattr(sys, name, _Above(self.console, stream))
        self._live.start(refresh=True)

    def stop(self) -> None:
        """Stops drawing and erases the panel."""
        for name, stream in self._replaced.items():
            own = getattr(sys, name)
            if isinstance(own, _Above):
                own.end()
                setattr(sys, name, stream)
        self._live.stop()

    def refresh(self) -> None:
        """Redraws the panel now."""
        self._live.refresh()


class _Above(io.TextIOBase):
    """A standard stream whose lines are printed above a panel, with their colors but no other control sequences.

    Attributes:
        rich_proxied_file: The wrapped stream, under the name that rich looks up when it prints.
    """

    def __init__(self, console: Console, stream: TextIO) -> None:
        self.console, self.rich_proxied_file = console, stream
        self._decoder, self._pending, self._lock = AnsiDecoder(), "", threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, pending = (self._pending + text).split("\n")
            self._pending = pending[-MAX_LINE_CHARACTERS:]
            for line in lines:
                self.console.print(self._shown(line), soft_wrap=True)
        return len(text)

    def end(self) -> None:
        """Prints the last line if it has no newline yet."""
        if self._pending:
            self.write("\n")

    def fileno(self) -> int:
        return self.rich_proxied_file.fileno()

    def isatty(self) -> bool:
        return self.rich_proxied_file.isatty()

    @property
    def encoding(self) -> str:
        """Encoding of the wrapped stream."""
        return self.rich_proxied_file.encoding

    def _shown(self, line: str) -> Text:
        last = line.rstrip("\r").rpartition("\r")[2]  # a carriage return overwrites the text before it
        parts = (part if COLORS.fullmatch(part) else printable(part) for part in COLORS.split(last))
        return self._decoder.decode_line("".join(parts))


class _Reflowed(LiveRender):
    """A render whose height is measured at the current width: a narrowed terminal has wrapped the last drawing."""

    def __init__(self, console: Console, renderable: Any) -> None:
        super().__init__(renderable)
        self.console = console
        self.widths: list[int] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Any:
        drawn = [part for part in super().__rich_console__(console, options) if isinstance(part, Segment)]
        self.widths = [Segment.get_line_length(line) for line in Segment.split_lines(drawn)]
        yield from drawn

    def position_cursor(self) -> Control:
        return self._cleared(self._height() - 1) if self.widths else Control()

    def restore_cursor(self) -> Control:
        return self._cleared(self._height()) if self.widths else Control()

    def _height(self) -> int:
        columns = self.console.width
        return min(sum(max(1, -(-width // columns)) for width in self.widths), self.console.height)

    def _cleared(self, num_up: int) -> Control:
        up: Any = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up * num_up)
