"""What a person sees while a run trains: on terminals of several widths, without colours, and in a log."""

import os
import re
import subprocess
import sys

import pytest

from .terminals import Terminal, python

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1A\u202e[bold]GREEN[/bold]\r\x08\x7f\x00"
METRICS = {
    "reward": 0.5,
    "kl": 0.0125,
    "completions/mean_length": 43.2,
    "rollout/tokens_per_s": 1234.0,
    "train/tokens_per_s": 4321.0,
    "step_time": 2.0,
}
FULL_LINE = "step 3/20  eta 0:34  reward 0.5  2 s/step  kl 0.0125  length 43.2  rollout tok/s 1,234  train tok/s 4,321"
# A run of three steps that stands still whenever it waits for Enter.
RUN = f"""
import logging, sys, warnings
import numpy as np
from groupax.events import Message, PhaseAdvanced, PhaseStarted, RolloutScored, RunDescribed, StepEnded
from groupax.runs.progress.named import Rich
from groupax.core.types import Rollout

def rollout(index, text):
    none = np.zeros(0)
    reward = {{"right": float(index)}}
    return Rollout(0, index, {{"prompt": "what is 1+1?"}}, none, none, none, none, "stop", 0, text, reward, index - 1.0)

with Rich() as progress:
    progress(PhaseStarted("loading the model"))
    input()
    progress(RunDescribed(20, {{"model": "tiny, 12 parameters", "to watch it": "groupax view runs/tiny"}}))
    progress(PhaseStarted("sampling", 8))
    progress(PhaseAdvanced(5))
    progress.is_compiling = lambda: True
    input()
    progress.is_compiling = lambda: False
    progress(RolloutScored(0, [[rollout(index, "a word " * 60) for index in range(4)]], {{}}))
    for step in (1, 2, 3):
        progress(StepEnded(step, {METRICS!r}))
    progress(PhaseStarted("updating"))
    input()
    progress.sampled_s = float("-inf")
    progress(RolloutScored(0, [[rollout(index, {HOSTILE!r}) for index in range(4)]], {{}}))
    progress(Message("reward 'f' failed on " + {HOSTILE!r}, warning=True))
    # here other code prints
    input()
print("the end")
"""


def test_the_run_is_on_the_screen_at_every_width():
    with Terminal(python(RUN), 120) as terminal:
        terminal.wait_for_text("loading the model")
        terminal.press_enter()
        terminal.wait_for_text("compiling")
        assert "to watch it  groupax view runs/tiny" in terminal.lines
        assert terminal.lines[-1].endswith("sampling 5/8: compiling (first time; kept for the next run)")
        terminal.press_enter()
        terminal.wait_for_text("updating")
        assert FULL_LINE in terminal.lines
        for columns in (200, 100, 80, 40):
            terminal.resize(columns)
            shown = FULL_LINE if columns >= len(FULL_LINE) else FULL_LINE[:columns].rpartition("  ")[0]
            bar = ["━" * columns]
            terminal.wait_for(lambda shown=shown, bar=bar: shown in terminal.lines and drawn_bars(terminal)[-1:] == bar)
            assert any("updating" in line for line in terminal.lines)
            assert "what is 1+1?" in "".join(terminal.lines)
        terminal.press_enter()
        terminal.wait_for_text("GREEN")
        terminal.press_enter()
        assert terminal.wait_for_end() == 0
        assert terminal.lines[-1] == "the end"
        assert not terminal.screen.cursor.hidden


def drawn_bars(terminal):
    """The bars on the screen, the part that is done like the rest."""
    return [re.sub("[╸╺]", "━", line) for line in terminal.lines if set(line) <= set("━╸╺")]


def test_hostile_completions_and_messages_are_shown_and_not_obeyed():
    with Terminal(
        python(RUN.replace("# here other code prints", 'print("printed: [/b]", end="", flush=True)')), 120
    ) as terminal:
        for text in ("loading", "compiling", "updating"):
            terminal.wait_for_text(text)
            terminal.press_enter()
        terminal.wait_for(lambda: sum("GREEN" in line for line in terminal.lines) >= 4)
        assert any("␛]0;owned␇␛[2J␛[31mred\\x9b1A\\u202e[bold]GREEN[/bold]␍␈␡␀" in line for line in terminal.lines)
        assert not terminal.screen.title
        terminal.press_enter()
        terminal.wait_for_end()
        assert "printed: [/b]" in terminal.lines
        written = terminal.written.decode("utf-8")
    assert not {"\x9b", "\u202e", "\x07", "\x08", "\x00", "\x7f"} & set(written)
    assert set(re.findall("\x1b(.)", written)) == {"["}
    assert "\x1b[2J" not in written


def test_a_log_has_plain_lines_also_before_the_first_step():
    code = f"""
import time
from groupax.events import PhaseAdvanced, PhaseStarted, RunDescribed, StepEnded
from groupax.runs.progress import named
named.SLOW_PHASE_S = 0.05
with named.Rich() as shown:
    shown(PhaseStarted("loading the model"))
    time.sleep(0.3)
    shown(PhaseStarted("a quick one"))
    shown(PhaseStarted("evaluating", 500))
    shown(PhaseAdvanced(120))
    time.sleep(0.3)
    shown(RunDescribed(2, {{"model": "tiny"}}))
    shown(StepEnded(1, {METRICS!r}))
    shown(PhaseStarted("sampling", 8))
    time.sleep(0.3)
    shown(StepEnded(2, {METRICS!r}))
    shown(PhaseStarted("writing the model"))
    time.sleep(0.3)
"""
    variables = {**os.environ, "FORCE_COLOR": "1"}  # as many CI systems set it
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    fields = "reward 0.5  2 s/step  kl 0.0125  length 43.2  rollout tok/s 1,234  train tok/s 4,321"
    assert done.stdout.splitlines() == [
        "[0:00] loading the model",
        "[0:00] evaluating 120/500",
        "model  tiny",
        f"step 1/2  eta 0:02  {fields}",
        f"step 2/2  {fields}",
        "[0:01] writing the model",
    ]


@pytest.mark.heavy
def test_the_train_command_on_a_terminal(tmp_path):
    argv = [sys.executable, "-m", "groupax", "train", "--recipe", "arithmetic", "--max_steps", "4"]
    argv += ["--prompts_per_step", "32", "--num_generations", "8", "--output_dir", str(tmp_path / "run")]
    with Terminal(argv, 80, environment={"XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        for text in ("loading libraries", "to watch it", "evaluating before training: eval", "compiling", "sampling"):
            terminal.wait_for_text(text)
        terminal.wait_for_text("step 1/4  ")
        terminal.resize(120)
        for text in ("step 3/4  ", "train tok/s", "evaluating after training: eval"):
            terminal.wait_for_text(text)
        assert terminal.wait_for_end() == 0
        assert "  groupax report " in "\n".join(terminal.lines)
        assert not terminal.screen.cursor.hidden
