"""The record of a rollout's calls, from which a run that was killed continues without making them again.

    question ──► in the record? ──► yes: its answer
                                └─► no: the call is made ──► a line is appended ──► the episode continues

A resumed run samples an unfinished rollout again, and its turns are the same. A call of a tool without state is
answered from the record if it is the same call after the same tokens. An environment, or what a tool opens for each
episode, lost its state with the process: if the episode had ended, all of it is answered from the record, and nothing
is created; otherwise it begins with a new state, and those calls are made again.

Each answer is one line that is written at once, so that it survives the process. Lines that were cut off are skipped.
"""

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupax.core.terminal.printable import error_line
from groupax.tools.results import ToolResult, error_result
from groupax.tools.runner import Outcome

FOLDER = "calls"  # of a run folder
NOT_WRITTEN = ("create", "close")  # whose answers nobody needs again
NOT_RECORDED = "this call is not in the record of the run"
LEFT = "LeftRecord"  # kind of an outcome: the episode is not the recorded one, and must begin again

Answer = Outcome | ToolResult


@dataclass(frozen=True)
class Question:
    """A call of a tool, or of a method of an environment, by an episode.

    Attributes:
        episode: Indices of its prompt and of its sample.
        turn: Number of turns so far.
        what: "call" for a tool's, else the method of the environment.
        has_state: Whether the answer depends on a state that lives as long as the episode.
        stream: Digest of the tokens so far.
        index: Index of a call in its turn.
        name: Name of the tool.
        arguments: Its arguments by name.
    """

    episode: tuple[int, int]
    turn: int
    what: str
    has_state: bool = True
    stream: str = ""
    index: int = 0
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Position of the call in the rollout."""
        return (*self.episode, self.turn, self.what, self.index)

    @property
    def content(self) -> list[str]:
        """Everything else that must agree for an answer to be used again."""
        return [self.stream, self.name, json.dumps(dict(self.arguments), default=repr)]


class Record:
    """The answers of a rollout. Threads may share it.

    Args:
        folder: Folder of the files; None keeps the answers in memory only, for episodes that begin again.
        name: Name of the rollout in them.
        process: Index of this process, which has a file of its own.
        keeps_environments: Whether rewards need the environments themselves, which are therefore created again.
        is_closed: Whether calls of tools that are not in the record are not made, but fail.
    """

    def __init__(
        self,
        folder: Path | None = None,
        name: str = "",
        process: int = 0,
        keeps_environments: bool = False,
        is_closed: bool = False,
    ) -> None:
        self._is_closed = is_closed
        self._lock = threading.Lock()
        self._entries: dict[tuple[Any, ...], tuple[Question, Answer]] = {}
        self._ended: set[tuple[int, int]] = set()  # episodes that ended in an earlier process
        self._incomplete: set[tuple[int, int]] = set()  # with an answer that cannot be written
        self._path = None if folder is None else folder / f"{name}.{process}.jsonl"
        self._file = -1
        if folder is not None:
            for line in sorted(_lines(folder, name), key=lambda line: line["at"]):
                self._read(line)
        if keeps_environments:
            self._ended.clear()

    def answer(self, question: Question) -> Answer | None:
        """Returns the recorded answer; None if the call must be made."""
        with self._lock:
            is_ended, entry = question.episode in self._ended, self._entries.get(question.key)
            if question.has_state and not is_ended:
                return None
            if question.what in NOT_WRITTEN:
                return Outcome()
            if entry is not None and entry[0].content == question.content:
                return entry[1]
            if question.has_state:
                return Outcome(message="the episode left its record", kind=LEFT)
            is_refused = self._is_closed and question.what == "call"
            return error_result(NOT_RECORDED, 0.0, len(NOT_RECORDED) + 100) if is_refused else None

    def add(self, question: Question, answer: Answer) -> None:
        """Adds the answer to a question that was asked just now."""
        if question.what in NOT_WRITTEN:
            return
        with self._lock:
            self._entries[question.key] = question, answer
            self._write(question.episode, {**vars(question), "answer": vars(answer)})

    def end(self, episode: tuple[int, int]) -> None:
        """Adds that an episode has ended."""
        with self._lock:
            if episode not in self._incomplete:
                self._write(episode, {"episode": episode, "what": "end"})

    def begin_again(self, episode: tuple[int, int]) -> None:
        """Drops what depends on the state of an episode, which is played again from its start."""
        with self._lock:
            self._drop_state(episode)
            self._write(episode, {"episode": episode, "what": "again"})

    def close(self) -> None:
        """Closes the file; what is added later is not written."""
        with self._lock:
            self._path = None
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _drop_state(self, episode: tuple[int, int]) -> None:
        self._ended.discard(episode)
        self._incomplete.discard(episode)
        for key, (question, answer) in list(self._entries.items()):
            if question.episode == episode and (question.has_state or answer.is_infrastructure):
                del self._entries[key]

    def _read(self, line: Mapping[str, Any]) -> None:
        episode = (line["episode"][0], line["episode"][1])
        if line["what"] == "end":
            self._ended.add(episode)
        elif line["what"] == "again":
            self._drop_state(episode)
        else:
            names = Question.__dataclass_fields__.keys() - {"episode"}
            question = Question(episode=episode, **{name: line[name] for name in names})
            answer = (ToolResult if question.what == "call" else Outcome)(**line["answer"])
            self._entries[question.key] = question, answer

    def _write(self, episode: tuple[int, int], line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        try:
            text = json.dumps({"at": time.time(), **line}, default=_plain) + "\n"
        except (TypeError, ValueError, RecursionError):  # the episode will be played again
            self._incomplete.add(episode)
            return
        try:
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                text = "\n" + text  # behind a line that was cut off
            data = text.encode()
            if os.write(self._file, data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            warnings.warn(
                f"calls of tools cannot be recorded in {self._path}: {error_line(error)}. A run that is resumed would "
                "make those of this rollout again",
                stacklevel=2,
            )
            self._path = None


def remove_records(folder: Path, before: int, max_bytes: int = 0, kept: Collection[int] = ()) -> None:
    """Deletes the records of rollouts that a checkpoint has made useless, except the newest ones, for replays."""
    useless: list[tuple[int, Path]] = []
    for path in folder.glob("rollout_*.jsonl"):
        number = path.name.removeprefix("rollout_").partition(".")[0]
        if number.isdigit() and int(number) < before:
            useless.append((int(number), path))
    num_bytes = 0
    for number, path in sorted(useless, reverse=True):
        num_bytes += path.stat().st_size
        if num_bytes > max_bytes and number not in kept:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there are others
        folder.rmdir()


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of all processes' files that are whole."""
    for path in sorted(folder.glob(f"{name}.*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    content = json.loads(line)
                    if isinstance(content, dict) and {"at", "episode", "what"} <= content.keys():
                        yield content


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
