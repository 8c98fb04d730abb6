"""Runs the coroutines of a rollout's episodes, which wait for turns and for calls of tools and environments.

    coroutine ──► sample ──► the session samples all turns together ───────────────────────► it continues
              └─► call ──► a thread of the process that owns the episode ──► queue ──► deliver ──► it continues
                                                              other processes ──┘

Every process plays all episodes, since all of them decode together, but only one makes the calls of an episode: it
alone has the environment. The others receive the results, all in the same order. Nothing is exchanged by one process.
"""

import contextlib
import itertools
import pickle
import queue
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import SamplingSession
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.record import Answer, Question, Record
from groupax.parallel import processes
from groupax.tools.calls import ToolCall
from groupax.tools.results import ToolResult, message_of
from groupax.tools.runner import CLOSED, Outcome, ToolRunner
from groupax.tools.tool import Tool

POLL_S = 0.01  # in which a process that waits for its own calls looks for those of others

Continue = Callable[[Any], None]
Method = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]  # looked up where the call is made
Matched = Callable[[], tuple[Tool | None, ToolCall]]


@dataclass(frozen=True)
class Until:
    """Awaited, it suspends a coroutine until the function that `begin` receives is called, and gives its argument."""

    begin: Callable[[Continue], None]

    def __await__(self) -> Generator[Callable[[Continue], None], Any, Any]:
        return (yield self.begin)


class Task:
    """A coroutine that has started. To await it is to wait for its end.

    It continues within the call that reports what it waits for, so its errors are raised there. Its own awaits must end
    in `Until`.

    Attributes:
        is_done: Whether it has ended.
        value: What it returned.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._waiting: list[Continue] = []
        self.is_done, self.value = False, None
        self._continue(None)

    def _continue(self, value: Any) -> None:
        try:
            begin = self._coroutine.send(value)
        except StopIteration as end:
            self.is_done, self.value = True, end.value
            for each in self._waiting:
                each(end.value)
        else:
            begin(self._continue)

    def __await__(self) -> Generator[Callable[[Continue], None], Any, Any]:
        return self.value if self.is_done else (yield self._waiting.append)


class Calls:
    """The calls of a rollout. `deliver` must be called at the same points in all processes."""

    def __init__(self, runner: ToolRunner, record: Record) -> None:
        self._runner, self.record = runner, record
        self._numbers = itertools.count()
        self._waiting: dict[int, Continue] = {}  # by the number of the call
        self._own: set[int] = set()  # numbers of the calls that this process makes
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    @property
    def are_under_way(self) -> bool:
        """True while a call has begun and `deliver` has not passed on its result."""
        return bool(self._waiting)

    async def call(self, question: Question, method: Method, finish: Callable[[Any], Any]) -> Outcome:
        """Calls a function in another thread of the process that owns the episode, if the answer is not recorded.

        Args:
            question: What is asked; the processes take turns with the groups of episodes.
            method: Returns the function and its arguments; used only where the call is made.
            finish: Converts what the function returns, where the call is made; its errors are those of the call.
        """

        def begin(report: Callable[[Outcome], None]) -> None:
            try:
                function, arguments = method()
            except Exception as error:  # noqa: BLE001 - the environment is the user's
                report(Outcome(message=str(error), kind=type(error).__name__))
                return
            self._runner.call(getattr(function, "__qualname__", "environment"), function, arguments, report, finish)

        return await self.expect(question, begin)

    async def expect(self, question: Question, begin: Callable[[Continue], None]) -> Any:
        """Returns the answer that another thread reports: the result of a tool, or an outcome.

        Args:
            question: What is asked.
            begin: Receives the function that reports the answer, in the process that owns the episode, unless the
                answer is recorded.
        """

        number = next(self._numbers)

        def report(answer: Answer) -> None:
            if (answer.error if isinstance(answer, ToolResult) else answer.message) != CLOSED:
                self.record.add(question, answer)
            self._done.put((number, answer))

        if _is_own(question.episode):
            self._own.add(number)
            recorded = self.record.answer(question)
            if recorded is None:
                begin(report)
            else:
                self._done.put((number, recorded))
        return await Until(partial(self._waiting.__setitem__, number))

    async def call_tool(self, question: Question, matched: Matched) -> ToolResult:
        """Returns the result of a tool call, which the process that owns the episode makes, unless it is recorded."""

        def begin(report: Callable[[ToolResult], None]) -> None:
            try:
                tool, call = matched()
            except Exception as error:  # noqa: BLE001 - a tool failed to open what it needs
                report(_failed(f"{type(error).__name__}: {message_of(error)}"))
            else:
                self._runner.call_tool(tool, call, report)

        answer = await self.expect(question, begin)
        return answer if isinstance(answer, ToolResult) else _failed(f"{answer.kind}: {answer.message}")

    def begin_again(self, episode: tuple[int, int]) -> None:
        """Drops the answers to an episode that depend on its state, and is played again from its start."""
        if _is_own(episode):
            self.record.begin_again(episode)

    def end(self, episode: tuple[int, int]) -> None:
        """Records that an episode has ended."""
        if _is_own(episode):
            self.record.end(episode)

    def deliver(self, waits: bool) -> None:
        """Continues the coroutines whose calls have ended, after waiting for the first one if it should wait."""
        arrived: list[tuple[int, Any]] | None = None
        while self._waiting and (arrived is None or (waits and not arrived)):
            arrived = self._arrived(waits)
            for number, value in arrived:
                self._own.discard(number)
                self._waiting.pop(number)(value)

    def _arrived(self, waits: bool) -> list[tuple[int, Any]]:
        """Returns the numbers and values of calls that have ended, the same in all processes."""
        is_alone = processes.num_processes() == 1
        ended: list[tuple[int, Any]] = []
        with contextlib.suppress(queue.Empty):
            if waits and self._own:
                ended.append(self._done.get(timeout=None if is_alone else POLL_S))
            while True:
                ended.append(self._done.get_nowait())
        if is_alone:
            return ended
        shares = processes.all_gather_object([(number, _sent(value)) for number, value in ended])
        arrived = [(number, pickle.loads(data)) for share in shares for number, data in share]
        return sorted(arrived, key=lambda each: each[0])


class Scheduler:
    """Samples the turns of all coroutines together, and continues the coroutines whose turns and calls have ended."""

    def __init__(self, session: SamplingSession, calls: Calls) -> None:
        self._session, self._calls = session, calls
        self._to_submit: list[Completion] = []
        self._sampled: dict[int, Continue] = {}  # by the identity of the sequence

    async def sample(self, sequence: Completion, place: Place | None) -> Completion:
        """Returns an unstarted sequence when it has ended; its keys and values are kept in the place."""
        sequence.place = place
        self._to_submit.append(sequence)
        return await Until(partial(self._sampled.__setitem__, id(sequence)))

    def finished(self, tasks: Sequence[Task]) -> Iterator[Any]:
        """Runs all coroutines, and yields what each of the tasks returns as soon as it has ended."""
        left = list(tasks)
        while left or self._calls.are_under_way:
            self._submit()
            self._calls.deliver(waits=not self._session.busy)
            self._submit()
            if self._session.busy:
                for sequence, _ in self._session.step():
                    if sequence.finish_reason and id(sequence) in self._sampled:
                        self._sampled.pop(id(sequence))(sequence)
            done = [task for task in left if task.is_done]
            left = [task for task in left if not task.is_done]
            for task in done:
                yield task.value

    def _submit(self) -> None:
        if self._to_submit:
            sequences, self._to_submit = self._to_submit, []
            self._session.submit(sequences)


def _is_own(episode: tuple[int, int]) -> bool:
    return episode[0] % processes.num_processes() == processes.process_index()


def _failed(reason: str) -> ToolResult:
    return ToolResult("", 0.0, reason, is_infrastructure=True)


def _sent(value: Any) -> bytes:
    """Returns a value as bytes for all processes; an error in its place if it cannot be sent."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - of a class of the user's
        message = f"what it returned cannot be sent to the other processes: {type(error).__name__}: {error}"
        return pickle.dumps(Outcome(message=message, kind="TypeError"))
    return data
