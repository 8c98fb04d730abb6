"""A panel at the bottom of a terminal that is drawn again and again, while what is printed goes above it."""

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

MOST_CHARACTERS = 10_000  # of a line that has no newline yet, like a progress bar
COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


class LivePanel:
    """Draws a panel until it is stopped, when it vanishes. Meanwhile standard output and error are printed above it.

    Args:
        console: of a terminal.
        panel: makes what is to be drawn; called by the thread that draws it.
        refreshes_per_s: how often it is drawn.
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
        """Draw it from now on."""
        self._replaced = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        for name, stream in self._replaced.items():
            setattr(sys, name, _Above(self.console, stream))
        self._live.start(refresh=True)

    def stop(self) -> None:
        """Let it vanish."""
        for name, stream in self._replaced.items():
            own = getattr(sys, name)
            if isinstance(own, _Above):
                own.end()
                setattr(sys, name, stream)
        self._live.stop()

    def refresh(self) -> None:
        """Draw it now."""
        self._live.refresh()


class _Above(io.TextIOBase):
    """A standard stream whose lines are printed above a panel, in their colours but without other control sequences.

    Attributes:
        rich_proxied_file: the stream itself, by the name that rich looks for when it prints.
    """

    def __init__(self, console: Console, stream: TextIO) -> None:
        self.console, self.rich_proxied_file = console, stream
        self._decoder, self._begun, self._lock = AnsiDecoder(), "", threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, begun = (self._begun + text).split("\n")
            self._begun = begun[-MOST_CHARACTERS:]
            for line in lines:
                self.console.print(self._shown(line), soft_wrap=True)
        return len(text)

    def end(self) -> None:
        """Print what has no newline yet."""
        if self._begun:
            self.write("\n")

    def fileno(self) -> int:
        return self.rich_proxied_file.fileno()

    def isatty(self) -> bool:
        return self.rich_proxied_file.isatty()

    @property
    def encoding(self) -> str:
        """The encoding of the stream itself."""
        return self.rich_proxied_file.encoding

    def _shown(self, line: str) -> Text:
        last = line.rstrip("\r").rpartition("\r")[2]  # what went before would have been overwritten
        parts = (part if COLOURS.fullmatch(part) else printable(part) for part in COLOURS.split(last))
        return self._decoder.decode_line("".join(parts))


class _Reflowed(LiveRender):
    """Measures what was drawn last by the terminal's present width: a narrower terminal has wrapped its lines."""

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
