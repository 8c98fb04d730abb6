"""Run folders, read while the runs are training."""

import json
import math
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.storage.folders import RECORDS, open_file, read_file, run_folder_in
from groupax.runs.diagnostics import severity_of
from groupax.runs.ending import MAX_JSON_BYTES, ending_of, last_sign
from groupax.runs.note import read_note
from groupax.runs.outcome import evaluation_files

MAX_LINE_BYTES = 16 * 2**20


class Tail:
    """A reader that yields every object of a growing JSON Lines file once.

    A last line without a newline is still being written and is left for a later call. A file that was replaced or
    truncated is read again from the start.

    Args:
        path: Path of the file, which need not exist.

    Attributes:
        generation: Number of times that the file was replaced or truncated.
        num_bad_lines: Number of lines that were not JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = self.num_bad_lines = 0
        self._offset = self._inode = 0

    def new_objects(self) -> Iterator[dict[str, Any]]:
        """Yields the objects written since the last call. `generation` is up to date at the first object.

        Raises:
            OSError: The file exists and cannot be read.
        """
        if not self._has_more():
            return
        with open_file(self.path) as file:
            file.seek(self._offset)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) < MAX_LINE_BYTES or not _skip_line(file):
                        return
                    line = b""
                self._offset = file.tell()
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    content = None
                if isinstance(content, dict):
                    yield content
                else:
                    self.num_bad_lines += 1

    def _has_more(self) -> bool:
        """Returns whether there is something to read, and starts again with a file that was replaced."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._restart(0)
            return False
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._restart(stat.st_ino)
        return stat.st_size > self._offset

    def _restart(self, inode: int) -> None:
        if self._offset:
            self.generation += 1
        self._offset = self.num_bad_lines = 0
        self._inode = inode


def _skip_line(file: Any) -> bool:
    """Reads to the end of the line; returns False if the file ends first."""
    while chunk := file.readline(MAX_LINE_BYTES):
        if chunk.endswith(b"\n"):
            return True
    return False


MAX_METRICS = 5000  # metric names; further ones are ignored
LINES_AT_ONCE = 100  # of metrics that are read before the time limit counts
MAX_SHOWN_DIAGNOSTICS = 100  # names in the state of a run
LIVE_S = 60.0  # a run that wrote within the last minute is live
SETTLED_NS = 10**9  # a folder may change again within the resolution of its modification time
STEP_FILE = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,14})\.parquet")


class NotFoundError(ValueError):
    """An error for a requested item that does not exist, or no longer exists."""


class _Column:
    """The steps and values of a metric in the order of logging."""

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")


class Run:
    """The contents of the run folder at `path`. All methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._metrics, self._diagnostics_tail = Tail(path / "metrics.jsonl"), Tail(path / "diagnostics.jsonl")
        self._columns: dict[str, _Column] = {}
        self._diagnostics: list[dict[str, Any]] = []
        self._metrics_read = self._diagnostics_read = 0  # generation of what was read
        self._last_step = math.nan
        self._num_lines = 0
        self._fault = ""
        self._steps: tuple[int, tuple[int, ...]] = (-1, ())

    def refresh(self, seconds: float = math.inf) -> bool:
        """Reads what was written since the last call, for a limited time, and returns whether that was everything."""
        with self._lock:
            try:
                self._fault = ""
                self._read_diagnostics()
                return self._read_metrics(time.monotonic() + seconds)
            except OSError as error:
                self._fault = str(error)
                return True

    @property
    def num_lines(self) -> int:
        """Number of lines of metrics that were read."""
        return self._num_lines

    @property
    def generation(self) -> int:
        """A counter that grows when the run restarts or returns to an earlier step."""
        return self._metrics.generation

    def state(self) -> dict[str, Any]:
        """Returns what changes during training: the last step, the latest values, the status, and counts."""
        steps = self.rollout_steps()
        with self._lock:
            names = ("reward", "kl") if "reward" in self._columns else ("loss",)
            latest = {name: self._columns[name].values[-1] for name in names if name in self._columns}
            step_time = self._columns.get("step_time")
            patience_s = max(LIVE_S, 5 * step_time.values[-1]) if step_time else LIVE_S
            severities = {each["name"]: each["severity"] for each in self._diagnostics}
            age_s = self._age_s()
            status, ending = self._status(age_s, patience_s)
            return {
                "path": str(self.path),
                "version": [self._metrics.generation, self._num_lines, len(self._diagnostics), len(steps)],
                "last_step": self._last_step,
                "latest": latest,
                "num_metrics": len(self._columns),
                "diagnostics": dict(list(severities.items())[:MAX_SHOWN_DIAGNOSTICS]),
                "num_rollout_steps": len(steps),
                "age_s": age_s,
                "status": status,
                "ending": ending,
                "note": asdict(read_note(self.path)),
                "num_bad_lines": self._metrics.num_bad_lines + self._diagnostics_tail.num_bad_lines,
                "fault": self._fault,
            }

    def metric_names(self) -> list[str]:
        """Returns the names of all metrics logged so far."""
        with self._lock:
            return sorted(self._columns)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps [S] and values [S] of a metric in the order of logging; empty if it does not exist.

        Values that are not finite are NaN.
        """
        with self._lock:
            column = self._columns.get(name, _Column())
            return np.array(column.steps, np.float64), np.array(column.values, np.float64)

    def diagnostics(self) -> list[dict[str, Any]]:
        """Returns the diagnostics in the order of logging: `step`, `name`, `text`, `severity`."""
        with self._lock:
            return list(self._diagnostics)

    def config(self) -> dict[str, Any]:
        """Returns the settings of the run; empty if they are not written yet. Raises a ValueError if damaged."""
        return self._json_file("config.json")

    def command(self) -> dict[str, Any]:
        """Returns the arguments of `groupax train`; empty if the run was started from Python."""
        return self._json_file("command.json")

    def record(self, name: str) -> dict[str, Any]:
        """Returns the content of `run.json` or `result.json`; empty if there is none, or if it cannot be read."""
        try:
            return self._json_file(name)
        except ValueError:
            return {}

    def reward_weights(self) -> list[float] | None:
        """Returns the weights of the reward functions; None if the settings do not have them."""
        try:
            weights = self.config().get("reward_weights")
        except ValueError:
            return None
        if not isinstance(weights, list) or not all(isinstance(each, int | float) for each in weights):
            return None
        return [number_of(each) or 0.0 for each in weights]

    def rollout_steps(self) -> tuple[int, ...]:
        """Returns the steps that have a rollout log, in order."""
        folder = self.path / "rollouts"
        try:
            version = folder.stat().st_mtime_ns
            with self._lock:
                if self._steps[0] == version and time.time_ns() - version > SETTLED_NS:
                    return self._steps[1]
            matches = (STEP_FILE.fullmatch(file.name) for file in folder.iterdir())
            steps = tuple(sorted(int(match[1]) for match in matches if match))
        except (FileNotFoundError, NotADirectoryError):
            version, steps = -1, ()
        with self._lock:
            self._steps = (version, steps)
        return steps

    def rollout_file(self, step: int) -> Path:
        """Returns the path of a step's rollout log, or raises a `NotFoundError`."""
        path = self.path / "rollouts" / f"step_{step:06d}.parquet"
        if not path.is_file():
            why = "it was not logged (log_completions_steps), or its file was removed to save space (rollout_log_gb)"
            raise NotFoundError(f"step {step} has no rollout log: {why}")
        return path

    def evaluation_files(self) -> dict[str, Path]:
        """Returns the files with the items of evaluations, by the evaluation's name."""
        return evaluation_files(self.path)

    def _read_metrics(self, until_s: float) -> bool:
        while self._read_lines():
            if time.monotonic() > until_s:
                return False
        self._forget_replaced()
        return True

    def _read_lines(self) -> bool:
        """Reads the next lines, and returns whether there may be more."""
        for count, line in enumerate(self._metrics.new_objects(), 1):
            self._forget_replaced()
            step = number_of(line.pop("step", None))
            if step is None or math.isnan(step):
                self._metrics.num_bad_lines += 1
                continue
            self._num_lines += 1
            self._last_step = np.fmax(self._last_step, step)
            for name, value in line.items():
                number = value if type(value) is float and math.isfinite(value) else number_of(value)
                if number is not None and (column := self._column(name)) is not None:
                    column.steps.append(step)
                    column.values.append(number)
            if count == LINES_AT_ONCE:
                return True
        return False

    def _column(self, name: str) -> _Column | None:
        """Returns the column of a metric; None for a new one beyond the limit."""
        if name not in self._columns and len(self._columns) == MAX_METRICS:
            return None
        return self._columns.setdefault(name, _Column())

    def _forget_replaced(self) -> None:
        if self._metrics.generation != self._metrics_read:
            self._metrics_read = self._metrics.generation
            self._columns, self._last_step, self._num_lines = {}, math.nan, 0

    def _read_diagnostics(self) -> None:
        new = list(self._diagnostics_tail.new_objects())
        if self._diagnostics_tail.generation != self._diagnostics_read:
            self._diagnostics_read, self._diagnostics = self._diagnostics_tail.generation, []
        for line in new:
            name, text = (each if isinstance(each := line.get(key), str) else "" for key in ("name", "text"))
            known = {"step": number_of(line.get("step")), "name": name, "text": text}
            self._diagnostics.append({**known, "severity": severity_of(name)})

    def _age_s(self) -> float | None:
        """Returns the seconds since the run last wrote metrics."""
        try:
            return max(0.0, time.time() - (self.path / "metrics.jsonl").stat().st_mtime)
        except OSError:
            return None

    def _status(self, age_s: float | None, patience_s: float) -> tuple[str, str]:
        """Returns the status of the run, and how it ended, or since when it has been silent."""
        kind, text = ending_of(self.path)
        if kind:
            return kind, text
        if age_s is None or not self._num_lines:
            return "waiting", ""
        return ("live", "") if age_s < patience_s else ("quiet", last_sign(self.path))

    def _json_file(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = plain(json.loads(read_file(path, MAX_JSON_BYTES).decode(errors="replace")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} must be a JSON object, it is a {type(content).__name__}")
        return content


class Runs:
    """The runs that the page shows, including new ones.

    Args:
        folders: Run folders, or folders that contain run folders.

    Raises:
        ValueError: A folder does not exist.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} is not a folder; pass the output_dir of a run, or a folder of runs"
                    + (" (copy a run in a bucket to the disk first)" if "://" in str(folder) else "")
                )
        self._folders = [folder.resolve() for folder in folders]
        self._lock = threading.Lock()
        self._runs: dict[Path, Run] = {}

    def refresh(self, seconds: float = math.inf) -> bool:
        """Finds new runs and reads what was written since the last call, for a limited time.

        Returns:
            Whether everything was read. Runs are read in turn, first those of which least was read.
        """
        with self._lock:
            paths = dict.fromkeys(path for folder in self._folders for path in _runs_in(folder))
            self._runs = {path: self._runs.get(path) or Run(path) for path in paths}
            runs = list(self._runs.values())
        until_s = time.monotonic() + seconds
        unread = deque(sorted(runs, key=lambda run: run.num_lines))
        while unread:
            run = unread.popleft()
            if not run.refresh(0.0):
                unread.append(run)
            if unread and time.monotonic() > until_s:
                return False
        return True

    def named(self) -> dict[str, Run]:
        """Returns the runs by name: the shortest suffix of the path that no other run has."""
        with self._lock:
            runs = list(self._runs.values())
        paths = [run.path for run in runs]
        return {_short_name(run.path, paths): run for run in runs}

    def __getitem__(self, name: str) -> Run:
        named = self.named()
        if name not in named:
            raise NotFoundError(f"there is no run {name!r}; there are {', '.join(named) or 'none'}")
        return named[name]


def _runs_in(folder: Path) -> list[Path]:
    if run := _run_in(folder):
        return [run]
    try:
        inside = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    except OSError:
        inside = []
    return [run for path in inside if (run := _run_in(path))] or [folder]


def _run_in(folder: Path) -> Path | None:
    try:
        folder = run_folder_in(folder)
        return folder if any((folder / name).is_file() for name in ("metrics.jsonl", "config.json")) else None
    except OSError:  # of somebody who does not let others read it
        return None


def _short_name(path: Path, paths: Sequence[Path]) -> str:
    for length in range(2 if path.name == RECORDS else 1, len(path.parts) + 1):
        name = "/".join(path.parts[-length:]).encode(errors="replace").decode()
        if sum(other.parts[-length:] == path.parts[-length:] for other in paths) == 1:
            return name
    return str(path)


def plain(value: Any) -> Any:
    """Returns the value as plain JSON types; numbers that are not finite become None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int | str):  # most values are, and the test for a mapping is slow
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def number_of(value: Any) -> float | None:
    """Returns a number, NaN for None and for numbers that are not finite, and None for anything else."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan
