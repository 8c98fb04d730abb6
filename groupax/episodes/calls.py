"""The calls of tools and environments in a rollout, whose outcomes all processes of the run learn in the same order.

    make ──► a thread or event loop of the process that the episode belongs to ──► queue ──► deliver ──► then
                                                                          other processes ──┘

Every process plays all episodes, since all of them decode together, but only one makes the calls of an episode: it
alone has the environment. What a call returns is sent to the others. With a single process nothing is exchanged.
"""

import contextlib
import itertools
import pickle
import queue
from collections.abc import Callable, Sequence
from typing import Any

from groupax.episodes.record import LEFT, Question, Record
from groupax.parallel import processes
from groupax.tools.calls import ToolCall
from groupax.tools.results import ToolResult, message_of
from groupax.tools.runner import CLOSED, ToolRunner
from groupax.tools.threads import Outcome
from groupax.tools.tool import Tool

POLL_S = 0.01  # in which a process that waits for its own calls looks for those of others

Method = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]  # looked up where the call is made
Matched = Callable[[], Sequence[tuple[Tool | None, ToolCall]]]


class Calls:
    """The calls of a rollout that have begun. `deliver` must be called at the same points in all processes.

    Args:
        runner: Runs the calls of this process.
        record: Has the answers of calls that are not made again.
    """

    def __init__(self, runner: ToolRunner, record: Record) -> None:
        self._runner, self.record = runner, record
        self._numbers = itertools.count()
        self._then: dict[int, Callable[[Any], None]] = {}  # of all calls that have begun, by number
        self._own: set[int] = set()  # numbers of the calls that this process makes
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    @property
    def are_under_way(self) -> bool:
        """True while a call has begun and `deliver` has not passed on what it returned."""
        return bool(self._then)

    def call(
        self,
        question: Question,
        method: Method,
        then: Callable[[Outcome], None],
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """Calls a function in another thread of the process that owns the episode, if the answer is not recorded.

        Args:
            question: What is asked; the processes take turns with the groups of episodes.
            method: Returns the function and its arguments; used only where the call is made.
            then: Called by `deliver`, in all processes, with the value or the error.
            finish: Converts what the function returns, where the call is made; an error of it is one of the call.
        """
        number = self._begin(question, then)
        if number not in self._own:
            return

        def end(outcome: Outcome) -> None:
            if outcome.message != CLOSED:
                self.record.add(question, outcome)
            self._done.put((number, outcome))

        known = self.record.answer(question)
        if known is not None:
            self._done.put((number, known))
            return
        try:
            function, arguments = method()
        except Exception as error:  # noqa: BLE001 - the environment is the user's
            end(Outcome(message=str(error), kind=type(error).__name__))
            return
        self._runner.call(getattr(function, "__qualname__", "environment"), function, arguments, end, finish)

    def expect(self, question: Question, then: Callable[[Outcome], None]) -> Callable[[Outcome], None] | None:
        """Expects an outcome that no call of this object has, such as what a program does next.

        Args:
            question: What is asked.
            then: Called by `deliver`, in all processes, with the outcome.

        Returns:
            The function that reports the outcome, from any thread; None in the processes that do not own the episode,
            and if the outcome is recorded.
        """
        number = self._begin(question, then)
        if number not in self._own:
            return None
        known = self.record.answer(question)
        if isinstance(known, Outcome):
            self._done.put((number, known))
            return None

        def report(outcome: Outcome) -> None:
            self.record.add(question, outcome)
            self._done.put((number, outcome))

        return report

    def run(self, questions: Sequence[Question], matched: Matched, then: Callable[[list[ToolResult]], None]) -> None:
        """Runs the tool calls of a turn in the process that owns the episode, but those whose results are recorded.

        Args:
            questions: The calls, at least one.
            matched: Returns the calls with their tools; used only where they are run.
            then: Called by `deliver`, in all processes, with the results.
        """
        number = self._begin(questions[0], then)
        if number not in self._own:
            return
        answers = [self.record.answer(question) for question in questions]
        known = [answer if isinstance(answer, ToolResult) else None for answer in answers]
        added: set[int] = set()

        def add(index: int, result: ToolResult) -> None:
            if known[index] is None and index not in added and result.error != CLOSED:
                added.add(index)
                self.record.add(questions[index], result)

        def end(results: list[ToolResult]) -> None:
            for index, result in enumerate(results):  # those of calls that were not made too
                add(index, result)
            self._done.put((number, results))

        if any(isinstance(answer, Outcome) for answer in answers):
            self._done.put((number, [_failed(LEFT)] * len(questions)))
        elif all(answer is not None for answer in answers):
            self._done.put((number, known))
        else:
            try:
                calls = matched()
            except Exception as error:  # noqa: BLE001 - a tool failed to open what it needs
                end([_failed(f"{type(error).__name__}: {message_of(error)}")] * len(questions))
                return
            self._runner.start(calls, end, known, add)

    def begin_again(self, episode: tuple[int, int]) -> None:
        """Drops the answers to an episode that depend on its state, and is played again from its start."""
        if self._is_own(episode):
            self.record.begin_again(episode)

    def end(self, episode: tuple[int, int]) -> None:
        """Records that an episode has ended."""
        if self._is_own(episode):
            self.record.end(episode)

    def deliver(self, waits: bool) -> None:
        """Continues the episodes whose calls have ended.

        Args:
            waits: Whether to wait for the first such call.
        """
        arrived: list[tuple[int, Any]] | None = None
        while self._then and (arrived is None or (waits and not arrived)):
            arrived = self._arrived(waits)
            for number, value in arrived:
                self._own.discard(number)
                self._then.pop(number)(value)

    def _begin(self, question: Question, then: Callable[[Any], None]) -> int:
        number = next(self._numbers)
        self._then[number] = then
        if self._is_own(question.episode):
            self._own.add(number)
        return number

    def _is_own(self, episode: tuple[int, int]) -> bool:
        return episode[0] % processes.num_processes() == processes.process_index()

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
