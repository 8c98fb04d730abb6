"""A panel at the bottom of a terminal that is drawn again and again, also after the terminal was resized."""

from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import ControlType, Segment


def live_panel(console: Console, panel: Callable[[], Any], refreshes_per_s: float) -> Live:
    """Returns a display of the panel that vanishes when it is stopped.

    Args:
        console: of a terminal.
        panel: makes what is to be drawn; called by the thread that draws it.
        refreshes_per_s: how often it is drawn.
    """
    live = Live(console=console, get_renderable=panel, refresh_per_second=refreshes_per_s, transient=True)
    live._live_render = _Reflowed(console, "")
    return live


class _Reflowed(LiveRender):
    """What was drawn last, with its height as it is on the terminal now: a narrower one has wrapped its lines."""

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
