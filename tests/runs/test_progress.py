"""How a run is shown: what is estimated, left out and made visible. The screen is in tests/runs/test_terminal.py."""

import io

import pytest
from rich.console import Console

from groupax.core.terminal.activities import Activities
from groupax.core.terminal.printable import one_line, printable
from groupax.events import Message, PhaseAdvanced, PhaseStarted, RunDescribed, StepEnded, counted
from groupax.runs.progress.display import TimeLeft
from groupax.runs.progress.named import PROGRESS_BARS, JsonLines, Silent, progress_named

METRICS = {"reward": 0.5, "step_time": 2.0}


def test_the_time_left_leaves_out_steps_that_compiled_and_single_slow_ones():
    left = TimeLeft()
    for step_s, compile_s in ((580.0, 500.0), (90.0, 60.0), (30.0, 5.0)):
        left.add({"step_time": step_s, "time/compile_s": compile_s})
        assert left.seconds(60) is None
    for step_s in (2.0, 2.1, 40.0, 1.9, 2.0):  # an evaluation belongs to one of them
        left.add({"step_time": step_s, "time/compile_s": 0.01})
    assert left.seconds(60) == pytest.approx(120)
    assert left.seconds(0) == 0


def test_what_is_under_way_is_a_phase_of_a_run_and_a_line_of_a_command():
    shown = []
    assert list(counted("ab", shown.append, "sampling", 2, "scoring")) == ["a", "b"]
    assert shown == [PhaseStarted("sampling", 2), PhaseAdvanced(1), PhaseAdvanced(2), PhaseStarted("scoring")]
    lines = io.StringIO()
    activities = Activities(Console(file=lines, width=40))
    with activities.doing("compiling [bold]a[/]"), activities.doing("compiling b\x1b[31m"):
        activities.note("a: 3 s")
    assert lines.getvalue().splitlines() == ["compiling [bold]a[/] ...", "compiling b␛[31m ...", "a: 3 s"]


@pytest.mark.parametrize("name", PROGRESS_BARS)
def test_contexts_nest_and_every_way_takes_a_whole_run(name, capsys):
    progress = PROGRESS_BARS[name]()
    progress(PhaseStarted("loading the model"))
    with progress:
        with progress:
            progress(RunDescribed(2, {"model": "tiny"}))
            progress(PhaseStarted("sampling", 8))
            progress(PhaseAdvanced(3))
        for step in (1, 2):
            progress(StepEnded(step, METRICS))
        progress(PhaseStarted("writing the model"))
        progress(Message("it went well"))
    progress.close()
    progress(Message("after the end", warning=True))
    out = "".join(capsys.readouterr())
    assert ("2/2" in out or '"step": 2' in out) == (name != "none")
    assert ("it went well" in out) == (name != "none")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode 文字 ✓\n\ttab", "plain, ünïcode 文字 ✓\n\ttab"),
        ("\x1b[2J\x00\r\x08\x7f\x9b1A", "␛[2J␀␍␈␡\\x9b1A"),
        ("a\u202eb\u2066c\u200dd\ufeff\ud800", "a\\u202eb\\u2066c\\u200dd\\ufeff\\ud800"),
        ("no\u00a0break\u3000wide", "no break wide"),
    ],
)
def test_what_a_terminal_would_obey_is_made_visible(text, shown):
    assert printable(text) == shown


@pytest.mark.heavy
def test_no_character_stays_that_is_not_printable():
    every = "".join(map(chr, range(0x110000)))
    left = set(printable(every)) - {"\n", "\t"}
    assert all(c.isprintable() for c in left)
    assert one_line(every, 10_000).isprintable()
    assert one_line("a\nb\tc") == "a⏎b c"
    assert one_line("x" * 100_000, 10) == "x" * 9 + "…"


@pytest.mark.parametrize("variable", ["GROUPAX_PROCESS_ID", "SLURM_PROCID"])
def test_of_several_processes_only_the_first_shows_the_run(variable, monkeypatch):
    monkeypatch.setenv(variable, "0")
    assert isinstance(progress_named("json"), JsonLines)
    monkeypatch.setenv(variable, "1")
    assert isinstance(progress_named("json"), Silent)
