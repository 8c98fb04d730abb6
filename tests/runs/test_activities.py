"""Progress of slow commands, on terminals and elsewhere."""

import io

from rich.console import Console

from groupax.terminal.activities import Activities


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_each_activity_is_a_line():
    shown = io.StringIO()
    activities = Activities(Console(file=shown, width=40))
    with activities.doing("compiling [bold]a[/]"), activities.doing("compiling b\x1b[31m"):
        activities.note("a: 3 s")
    assert shown.getvalue().splitlines() == ["compiling [bold]a[/] ...", "compiling b␛[31m ...", "a: 3 s"]


def test_a_terminal_shows_what_is_under_way_until_it_ends(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    activities = Activities(Console(file=shown, width=40))
    with activities.doing("compiling [a]"):
        with activities.doing("compiling b"):
            activities.note("found")
        activities._shown.refresh()
        assert "compiling [a]" in shown.getvalue()
        assert "found" in shown.getvalue()
    assert activities._shown is None
    with activities.doing("again"):
        assert activities._shown is not None
