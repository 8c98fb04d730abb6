"""Plays episodes that are runs of a program: whatever it asks the model is a turn of its episode.

ask ──► prompt: a stream and a bridge, or a new stream ──► turns are sampled ──► answer ──► ... ──► end ──► rollout

Programs run in threads of the process that owns their episode, each with a session of its own. Everything else happens
in the thread that iterates, in all processes of the run.
"""

import copy
import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import FinishReason, Rollout
from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import Sampler
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.branches import SampledTurn, rollout_of
from groupax.episodes.episode import Episode, EpisodeFailed, group_seed
from groupax.episodes.program import Answer, Endpoint, Event, ProgramClass, Session, TurnRequest
from groupax.episodes.program_server import server_at
from groupax.episodes.record import LEFT, Question
from groupax.episodes.rules import Rules
from groupax.episodes.scheduler import Calls, Scheduler, Task
from groupax.episodes.transcript import Templates, Transcript
from groupax.tools.results import checked_reward, message_of
from groupax.tools.runner import TIMED_OUT, Outcome


class ProgramRun:
    """One run of a program.

    Attributes:
        session: Its session, in the process that runs it; None in others, and while all is answered from the record.
        turns: Turns that were sampled.
        answers: Tasks that answer its requests and return the digests of the answers, by the number of the request.
        gone: Numbers of requests whose clients have gone.
        sampling: Sequences of turns that are being sampled.
        num_asked: Number of turns that were asked for.
        limit: Limit that it has exceeded.
        cut: Limit of the run that has cut off a turn.
        is_over: Whether nobody waits for its turns any more.
    """

    def __init__(self, episode: Episode, templates: Templates) -> None:
        self.episode = episode
        self.transcript = Transcript(templates)
        self._counts: Counter[bytes] = Counter()  # number of times that each prompt was sampled from
        self.session: Session | None = None
        self.turns: list[SampledTurn] = []
        self.answers: dict[int, Task] = {}
        self.gone: set[int] = set()
        self.sampling: list[Completion] = []
        self.num_asked, self.is_over = 0, False
        self.limit: FinishReason | None = None
        self.cut: FinishReason | None = None

    @property
    def program(self) -> ProgramClass:
        """The program."""
        assert isinstance(self.episode.setup.environment, ProgramClass), "checked when the rules were made"
        return self.episode.setup.environment

    @property
    def read_turns(self) -> list[SampledTurn]:
        """The turns that the program has received, in an order that parallel requests keep."""
        read = [turn for turn in self.turns if turn.number not in self.gone]
        return sorted(read, key=lambda turn: (len(turn.prompt_ids), turn.stream.tobytes()))

    def key(self, prompt: np.ndarray) -> np.ndarray:
        """Returns the randomness of the next turn after a prompt, which does not depend on what else was asked."""
        digest = prompt.tobytes()
        own = np.asarray(self.episode.first.key, np.uint32).tobytes()
        hashed = hashlib.blake2b(own + digest + str(self._counts[digest]).encode(), digest_size=8).digest()
        self._counts[digest] += 1
        return np.frombuffer(hashed, np.uint32)

    def rollout(self, policy_version: int) -> Rollout:
        """Returns the finished run without its text."""
        episode = self.episode
        assert episode.finish_reason is not None, "it has ended"
        end = episode.finish_reason, episode.reward
        return rollout_of(self.read_turns, episode.index, episode.example, episode.first.prompt, *end, policy_version)


class Programs:
    """The programs of a rollout.

    Attributes:
        longest_prompt: Most tokens of a prompt.
    """

    def __init__(
        self, sampler: Sampler, scheduler: Scheduler, calls: Calls, rules: Rules, params: SamplingParams, step: int
    ) -> None:
        self._sampler, self._scheduler, self._calls = sampler, scheduler, calls
        self._rules, self._params, self._step = rules, params, step
        self._numbers, self.longest_prompt = itertools.count(), 0
        self._playing: set[ProgramRun] = set()
        self._slots: dict[ProgramClass, threading.Semaphore] = {}

    async def run(self, episode: Episode) -> FinishReason:
        """Runs a program to its end, whose reason it returns."""
        run = episode.run = ProgramRun(episode, self._rules.templates)
        self._playing.add(run)
        for number in itertools.count():
            question = Question(episode.index, number, "events")
            outcome = await self._calls.expect(question, partial(self._listen, run))
            if outcome.kind:
                raise EpisodeFailed(outcome)
            for event in outcome.value:
                for answered, digest in event["after"]:
                    if await run.answers[answered] != digest:
                        raise EpisodeFailed(Outcome(message="the episode left its record", kind=LEFT))
                if event["kind"] == "ask":
                    task = Task(self._answer(run, event["number"], TurnRequest(**event["asked"])))
                    run.answers[event["number"]] = task
                elif event["kind"] == "gone":
                    run.gone.add(event["number"])
                else:
                    return self._ended(run, event)
        raise AssertionError("events are counted without end")

    def _ended(self, run: ProgramRun, event: Event) -> FinishReason:
        """Returns the reason of the end that an event reports, and sets the reward."""
        refusal, error, program = event["refusal"], event["error"], run.program
        if error:
            run.limit = run.limit or run.cut  # some programs fail at a turn that was cut off
        if error and run.limit is None and program.error_reward is None:
            reason = f"{event['message']}; its last refused request: {refusal}" if refusal else event["message"]
            raise EpisodeFailed(Outcome(event["value"], reason, error))
        if not run.read_turns:
            advice = f"its last request was refused: {refusal}" if refusal else "give its client the base URL"
            message = f"it ended without a turn of the model; {advice}"
            raise EpisodeFailed(Outcome(message=message, kind="ValueError"))
        run.episode.reward = (program.error_reward or 0.0) if error else event["value"]
        return run.limit or "done"

    async def _answer(self, run: ProgramRun, number: int, request: TurnRequest) -> str:
        """Answers a request, and returns the digest of the answer."""
        answer = await self._sampled(run, number, request)
        if run.session is not None and not run.is_over:
            run.session.answer(number, answer)
        return answer.digest

    async def _sampled(self, run: ProgramRun, number: int, request: TurnRequest) -> Answer:
        """Returns the turns of a request, or why it is refused, as servers refuse prompts that are too long."""
        settings, params, transcript = self._rules.settings, self._params, run.transcript
        if run.num_asked + request.n > settings.max_turns:
            run.limit = run.limit or "max_turns"
            return Answer(refusal=(400, "max_turns", f"the episode has its {settings.max_turns} turns (max_turns)"))
        try:
            prompt = transcript.prompt(request)
            if not len(prompt):
                raise ValueError("a prompt has no tokens; the model needs at least one to continue from")
        except ValueError as error:
            return Answer(refusal=(400, "invalid_prompt", str(error)))
        room = self._room(run, prompt)
        if room < 1:
            run.limit = run.limit or "length"
            message = f"a prompt of {len(prompt)} tokens leaves no room for a turn; an episode may have " + (
                f"{params.max_tokens} tokens after its first prompt (max_completion_length)"
            )
            return Answer(refusal=(400, "context_length_exceeded", message))
        try:
            sequences = [self._sequence(run, prompt, request, room) for _ in range(request.n)]
        except ValueError as error:  # e.g. a token that is not in the vocabulary
            return Answer(refusal=(400, "invalid_request", str(error)))
        run.num_asked += request.n
        # one turn at a time has the episode's keys and values; what others compute is dropped
        places = [Place(0) for _ in sequences]
        if not run.sampling and run.episode.place is not None:
            places[0] = run.episode.place
        run.sampling += sequences
        for task in [Task(self._scheduler.sample(*each)) for each in zip(sequences, places, strict=True)]:
            await task
        if run.is_over:
            return Answer()
        run.sampling = [each for each in run.sampling if each not in sequences]
        if fault := next((sequence.fault for sequence in sequences if sequence.fault), ""):
            return Answer(refusal=(400, "invalid_request", fault))
        for sequence in sequences:
            text, messages = transcript.add(request, sequence.prompt, sequence.tokens)
            logps = sequence.policy_logps, sequence.sampler_logps
            turn = SampledTurn(sequence.prompt, sequence.tokens, *logps, text, None, messages, number)
            run.turns.append(turn)
            if sequence.finish_reason == "length" and len(sequence.tokens) != request.max_tokens:
                run.cut = "turn_length" if len(sequence.tokens) == settings.max_turn_tokens else "length"
        return Answer(sequences)

    def _sequence(self, run: ProgramRun, prompt: np.ndarray, request: TurnRequest, room: int) -> Completion:
        """Returns the sequence of a turn that may have `room` tokens."""
        most = min(room, request.max_tokens or room, self._rules.settings.max_turn_tokens or room)
        own = self._params.stop
        stop = tuple(dict.fromkeys((*((own,) if isinstance(own, str) else own or ()), *request.stop)))
        params = replace(self._params, n=1, max_tokens=most, stop=stop)
        if request.regex is not None or request.json_schema is not None:
            if self._rules.constraint_fault is not None:
                raise ValueError(self._rules.constraint_fault)
            params = replace(params, regex=request.regex, json_schema=request.json_schema)
        [sequence] = self._sampler.sequences([prompt], params, self._step, next(self._numbers))
        sequence.sample_index, sequence.key = run.episode.first.sample_index, run.key(prompt)
        return sequence

    def _room(self, run: ProgramRun, prompt: np.ndarray) -> int:
        """Returns the number of tokens that may follow a prompt in its stream."""

        def begins_with(turn: SampledTurn) -> bool:
            return np.array_equal(turn.stream, prompt[: len(turn.stream)])

        starts = [len(turn.prompt_ids) for turn in run.turns if begins_with(turn)]
        start, most = min(starts, default=len(prompt)), self._params.max_tokens
        return min(most - (len(prompt) - start), self.longest_prompt + most - len(prompt))

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(self, run: ProgramRun) -> None:
        """Ends what is still sampled for a run, which nobody waits for; what its program still asks is refused."""
        run.is_over = True
        self._playing.discard(run)
        for sequence in run.sampling:
            sequence.cancel()
        if run.session is not None:
            run.session.close()
            server_at(run.program.listening).remove(run.session)

    def close(self) -> None:
        """Ends all runs."""
        for run in [*self._playing]:
            self.end(run)

    def rollouts(self, episodes: Sequence[Episode], policy_version: int) -> list[Rollout]:
        """Returns the rollouts of a group without their texts."""
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        if len(failures) == len(episodes) and not any(episode.run.turns for episode in episodes):
            attempts = 1 + self._rules.settings.environment_retries
            raise RunError(
                f"the program {episodes[0].setup.name!r} failed before its first turn for all {len(episodes)} episodes "
                f"of a prompt, {attempts} times each; the last error is {failures[-1].kind}: {failures[-1].message}"
            )
        return [episode.run.rollout(policy_version) for episode in episodes]

    # -- threads -----------------------------------------------------------------------------------------------------

    def _listen(self, run: ProgramRun, report: Callable[[Outcome], None]) -> None:
        """Reports the next events of a run, whose program is started if need be."""
        if run.session is None:
            program, index = run.program, run.episode.index[0]
            server, seed = server_at(program.listening), group_seed(self._params.seed, self._step, index)
            run.session = Session()
            endpoint = server.add(run.session, self._rules.templates)
            slots = self._slots.setdefault(program, threading.Semaphore(program.max_concurrent or 1 << 30))
            given = program, endpoint, copy.deepcopy(dict(run.episode.example)), seed, run.session, slots
            threading.Thread(target=_run, args=given, name="program", daemon=True).start()
        run.session.listen(report)


def _run(
    program: ProgramClass,
    endpoint: Endpoint,
    example: Mapping[str, Any],
    seed: int,
    session: Session,
    slots: threading.Semaphore,
) -> None:
    """Runs a program to its end, as soon as no more than allowed are running, and notes its score in the session."""
    with slots:
        if session.has_ended:
            return
        seconds = program.timeout_s
        timer = threading.Timer(seconds, session.end, (None, TIMED_OUT, f"the program took longer than {seconds:g} s"))
        timer.daemon = True
        timer.start()
        try:
            value = program.run(endpoint, example, seed)
            score = None if value is None else checked_reward(value)
        except BaseException as error:  # noqa: BLE001 - the program is the user's
            session.end(kind=type(error).__name__, message=message_of(error))
        else:
            session.end(score)
        finally:
            timer.cancel()
