"""Plays episodes that are runs of a program: whatever it asks the model is a turn of its episode.

ask ──► prompt: a stream and a bridge, or a new stream ──► turns are sampled ──► answer ──► ... ──► end ──► rollout

Everything here happens in the thread that iterates, in all processes of the run; the program runs in one of them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from groupax.data.examples import Examples
from groupax.data.tokenizer import decode
from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import BatchSession, ConversingSession, Sampler, SamplingSession
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.asked import Asked
from groupax.episodes.branches import SampledTurn
from groupax.episodes.calls import Calls
from groupax.episodes.environment import warn_of_failure
from groupax.episodes.opening import group_seed
from groupax.episodes.program import Answer, Event, ProgramClass
from groupax.episodes.program_episode import ProgramEpisode
from groupax.episodes.program_rollout import rollout_of
from groupax.episodes.program_runs import Runs
from groupax.episodes.record import LEFT, Question
from groupax.episodes.rules import Rules
from groupax.episodes.transcript import Templates
from groupax.errors import RunError
from groupax.settings.sampling import SamplingParams
from groupax.tools.runner import TIMED_OUT
from groupax.tools.threads import Outcome
from groupax.types import FinishReason, Rollout


class _Request:
    """A request whose turns are being sampled."""

    def __init__(self, episode: ProgramEpisode, number: int, asked: Asked, sequences: list[Completion]) -> None:
        self.episode, self.number, self.asked, self.sequences = episode, number, asked, sequences


class ProgramTable:
    """The runs of programs of a rollout.

    Args:
        sampler: Sampler with the weights to sample from.
        session: Its session.
        calls: Sends what happens in one process to all.
        tokenizer: Tokenizer of the model.
        rules: Programs and limits.
        params: Sampling parameters.
        step: Number that distinguishes rollouts with the same seed.
        policy_version: Version of the weights.
    """

    def __init__(
        self,
        sampler: Sampler,
        session: SamplingSession,
        calls: Calls,
        tokenizer: Any,
        rules: Rules,
        params: SamplingParams,
        step: int,
        policy_version: int,
    ) -> None:
        self._sampler, self._session, self._calls, self._tokenizer = sampler, session, calls, tokenizer
        self._rules, self._params, self._step, self._policy_version = rules, params, step, policy_version
        assert rules.templates is not None, "there are programs"
        self._templates: Templates = rules.templates
        self._runs = Runs(self._templates)
        self._requests: dict[int, _Request] = {}  # by the identity of a sequence
        self._to_submit: list[Completion] = []
        self._playing: set[ProgramEpisode] = set()
        self._finished: dict[int, list[ProgramEpisode]] = {}
        self._numbers = itertools.count()
        self._places: Iterator[Place] = iter(())  # for episodes that have not started
        self._prompt_ids: dict[int, np.ndarray] = {}  # of the dataset's prompts

    def play(self, given: Examples, prompt_ids: Sequence[np.ndarray], first_prompt: int) -> Iterator[list[Rollout]]:
        """Runs the programs of all groups, and yields each group when its last run has ended."""
        examples = [given[index] for index in range(len(prompt_ids))]
        params, self._prompt_ids = self._params, dict(enumerate(prompt_ids, first_prompt))
        if isinstance(self._session, ConversingSession):
            number = max(len(examples) * params.n, 1)
            self._places = iter(self._session.converse(number, self._max_tokens, params.max_tokens))
        # they have the randomness of their episodes, and are not sampled
        firsts = self._sampler.sequences([np.zeros(1, np.int32)] * len(examples), params, self._step, first_prompt)
        for first in firsts:
            self._begin(first, examples[first.prompt_index - first_prompt], self._rules.settings.environment_retries)
        num_unfinished = len(examples)
        try:
            while num_unfinished:
                self._advance()
                for index in [each for each, group in self._finished.items() if len(group) == params.n]:
                    num_unfinished -= 1
                    yield self._rollouts(self._finished.pop(index))
        finally:
            self._runs.close()

    @property
    def _max_tokens(self) -> int:
        """Most tokens of a prompt with its turn."""
        return (self._rules.max_prompt_tokens or max(map(len, self._prompt_ids.values()), default=0)) + (
            self._params.max_tokens
        )

    def _advance(self) -> None:
        """Passes on what programs have asked, and samples for a moment."""
        self._submit()
        is_any_finished = any(len(group) == self._params.n for group in self._finished.values())
        self._calls.deliver(waits=not self._session.busy and not is_any_finished)
        while isinstance(self._session, BatchSession) and not all(map(self._waits, self._playing)):
            self._calls.deliver(waits=True)
        self._submit()
        if self._session.busy:
            for sequence, _ in self._session.step():
                if sequence.finish_reason and id(sequence) in self._requests:
                    request = self._requests.pop(id(sequence))
                    if all(other is not request for other in self._requests.values()):  # the last of its sequences
                        self._answer_sampled(request)

    def _waits(self, episode: ProgramEpisode) -> bool:
        """Returns whether a program waits for an answer."""
        return any(request.episode is episode for request in self._requests.values())

    def _submit(self) -> None:
        if self._to_submit:
            sequences, self._to_submit = self._to_submit, []
            self._session.submit(sequences)

    # -- events ------------------------------------------------------------------------------------------------------

    def _begin(
        self, first: Completion, example: Mapping[str, Any], num_retries: int, place: Place | None = None
    ) -> None:
        program = self._rules.kind_of(example).environment
        assert isinstance(program, ProgramClass), "checked when the rules were made"
        episode = ProgramEpisode(first, example, program, self._templates, num_retries)
        episode.place = place or next(self._places, Place(0))
        self._playing.add(episode)
        self._listen(episode)

    def _listen(self, episode: ProgramEpisode) -> None:
        question = Question(episode.index, episode.num_heard, "events")
        report = self._calls.expect(question, partial(self._hear, episode))
        episode.num_heard += 1
        if report is None:
            return
        if episode.session is None:
            seed = group_seed(self._params.seed, self._step, episode.first.prompt_index)
            episode.session = self._runs.start(episode.program, episode.example, seed)
        episode.session.listen(report)

    def _hear(self, episode: ProgramEpisode, outcome: Outcome) -> None:
        if episode not in self._playing:
            return
        if outcome.kind:
            self._fail(episode, outcome)
            return
        episode.events += outcome.value
        if not any(event["kind"] == "end" for event in outcome.value):
            self._listen(episode)
        self._handle_events(episode)

    def _handle_events(self, episode: ProgramEpisode) -> None:
        """Handles events up to the first that came after an answer which is not there yet."""
        while episode in self._playing and episode.events:
            event = episode.events[0]
            if any(number not in episode.answered for number, _ in event["after"]):
                return
            if any(episode.answered[number] != digest for number, digest in event["after"]):
                self._fail(episode, Outcome(message="the episode left its record", kind=LEFT))
                return
            del episode.events[0]
            if event["kind"] == "ask":
                self._ask(episode, event["number"], Asked(**event["asked"]))
            elif event["kind"] == "gone":
                episode.gone.add(event["number"])
            elif event["kind"] == "back":
                episode.gone.discard(event["number"])
            else:
                self._end(episode, event)

    def _ask(self, episode: ProgramEpisode, number: int, asked: Asked) -> None:
        """Begins to sample the turns of a request, or refuses it."""
        settings = self._rules.settings
        if episode.num_asked + asked.n > settings.max_turns:
            message = f"the episode has its {settings.max_turns} turns (max_turns)"
            self._refuse(episode, number, "max_turns", message)
            return
        try:
            prompt = episode.transcript(asked.adapter).prompt(asked)
            if not len(prompt):
                raise ValueError("a prompt has no tokens; the model needs at least one to continue from")
        except ValueError as error:
            self._answer(episode, number, Answer(np.zeros(0, np.int32), refusal=(400, "invalid_prompt", str(error))))
            return
        room = self._room(episode, prompt)
        if room < 1:
            message = f"a prompt of {len(prompt)} tokens leaves no room for a turn; an episode may have " + (
                f"{self._params.max_tokens} tokens after its first prompt (max_completion_length)"
            )
            self._refuse(episode, number, "length", message)
            return
        most = min(room, asked.max_tokens or room, settings.max_turn_tokens or room)
        stop = tuple(dict.fromkeys((*self._stop, *asked.stop)))
        try:
            params = replace(self._params, n=1, max_tokens=most, stop=stop)
            if asked.regex is not None or asked.json_schema is not None:
                if self._rules.constraint_fault is not None:
                    raise ValueError(self._rules.constraint_fault)
                params = replace(params, regex=asked.regex, json_schema=asked.json_schema)
            sequences = [self._new_sequence(episode, prompt, params, asked.adapter) for _ in range(asked.n)]
        except ValueError as error:  # e.g. a token that is not in the vocabulary
            self._answer_invalid(episode, number, str(error))
            return
        episode.num_asked += asked.n
        # one at a time has the episode's keys and values; what others compute is dropped
        for sequence in sequences:
            sequence.place = Place(0)
        if not self._waits(episode):
            sequences[0].place = episode.place
        request = _Request(episode, number, asked, sequences)
        self._requests |= {id(sequence): request for sequence in sequences}
        self._to_submit += sequences

    def _new_sequence(
        self, episode: ProgramEpisode, prompt: np.ndarray, params: SamplingParams, adapter: str | None
    ) -> Completion:
        [sequence] = self._sampler.sequences([prompt], params, self._step, next(self._numbers))
        sequence.sample_index, sequence.key = episode.first.sample_index, episode.key(prompt, adapter)
        sequence.adapter = adapter
        return sequence

    @property
    def _stop(self) -> tuple[str, ...]:
        stop = self._params.stop
        return (stop,) if isinstance(stop, str) else tuple(stop or ())

    def _room(self, episode: ProgramEpisode, prompt: np.ndarray) -> int:
        """Returns the number of tokens that may follow a prompt in its stream."""
        streams = [turn for turn in episode.turns if _begins_with(prompt, turn)]
        start = min((len(turn.prompt_ids) for turn in streams), default=len(prompt))
        return min(self._params.max_tokens - (len(prompt) - start), self._max_tokens - len(prompt))

    def _refuse(self, episode: ProgramEpisode, number: int, limit: FinishReason, message: str) -> None:
        """Refuses a request beyond a limit, as servers do with prompts that are too long."""
        episode.limit = episode.limit or limit
        code = "context_length_exceeded" if limit == "length" else limit
        self._answer(episode, number, Answer(np.zeros(0, np.int32), refusal=(400, code, message)))

    def _answer_invalid(self, episode: ProgramEpisode, number: int, message: str) -> None:
        self._answer(episode, number, Answer(np.zeros(0, np.int32), refusal=(400, "invalid_request", message)))

    def _answer_sampled(self, request: _Request) -> None:
        episode, sequences = request.episode, request.sequences
        if episode not in self._playing:
            return
        if fault := next((sequence.fault for sequence in sequences if sequence.fault), ""):
            self._answer_invalid(episode, request.number, fault)
            return
        for sequence in sequences:
            adapter, logps = request.asked.adapter, (sequence.policy_logps, sequence.sampler_logps)
            text, messages = episode.transcript(adapter).add(request.asked, sequence.prompt, sequence.tokens)
            about = text, None, messages, request.number, adapter
            turn = SampledTurn(sequence.prompt, sequence.tokens, *logps, *about)
            episode.turns.append(turn)
            if sequence.finish_reason == "length" and len(sequence.tokens) != request.asked.max_tokens:
                is_turn_limit = len(sequence.tokens) == self._rules.settings.max_turn_tokens
                episode.cut = "turn_length" if is_turn_limit else "length"
        answer = Answer(
            sequences[0].prompt,
            tuple(sequence.tokens for sequence in sequences),
            tuple(sequence.policy_logps for sequence in sequences),
            tuple(sequence.sampler_logps for sequence in sequences),
            tuple(sequence.finish_reason == "stop" for sequence in sequences),
        )
        self._answer(episode, request.number, answer)

    def _answer(self, episode: ProgramEpisode, number: int, answer: Answer) -> None:
        episode.answered[number] = answer.digest
        if episode.session is not None:
            episode.session.answer(number, answer)
        self._handle_events(episode)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, episode: ProgramEpisode, event: Event) -> None:
        refusal = event["refusal"]
        reason = f"{event['message']}; its last refused request: {refusal}" if refusal else event["message"]
        outcome = Outcome(event["value"], reason, event["error"])
        if event["error"]:
            episode.limit = episode.limit or episode.cut  # some programs fail at a turn that was cut off
        if event["error"] and episode.limit is None and episode.program.error_reward is None:
            self._fail(episode, outcome)
            return
        if not self._turns(episode):
            advice = f"its last request was refused: {refusal}" if refusal else "give its client the base URL"
            message = f"it ended without a turn of the model; {advice}"
            self._fail(episode, Outcome(message=message, kind="ValueError"))
            return
        episode.reward = (episode.program.error_reward or 0.0) if event["error"] else event["value"]
        episode.finish_reason = episode.limit or "done"
        self._close(episode)

    def _turns(self, episode: ProgramEpisode) -> list[SampledTurn]:
        """Returns the turns of an episode that the program has received, in an order that parallel requests keep."""
        read = [turn for turn in episode.turns if turn.number not in episode.gone]
        return sorted(read, key=lambda turn: (len(turn.prompt_ids), turn.stream.tobytes()))

    def _fail(self, episode: ProgramEpisode, outcome: Outcome) -> None:
        """Runs a program again that failed, or whose episode has left its record; or drops the episode in the end."""
        has_left = outcome.kind == LEFT
        self._playing.discard(episode)
        self._cancel(episode)
        if not has_left and episode.num_retries == 0:
            episode.finish_reason = "timeout" if outcome.kind == TIMED_OUT else "env_error"
            episode.outcome, episode.reward = outcome, None
            warn_of_failure(self._rules.warned, episode.program.name, "failed; its episode is left out", outcome)
            self._close(episode)
            return
        if not has_left:
            warn_of_failure(self._rules.warned, episode.program.name, "failed; its episode begins again", outcome)
        self._calls.begin_again(episode.index)
        place = Place(episode.place.max_tokens)  # the same memory, empty
        self._begin(episode.first, episode.example, episode.num_retries - (not has_left), place)

    def _close(self, episode: ProgramEpisode) -> None:
        self._playing.discard(episode)
        self._cancel(episode)
        self._calls.end(episode.index)
        self._finished.setdefault(episode.first.prompt_index, []).append(episode)

    def _cancel(self, episode: ProgramEpisode) -> None:
        """Ends what is still sampled for an episode, which nobody waits for."""
        if episode.session is not None:
            self._runs.end(episode.session)
        for request in {id(each): each for each in self._requests.values() if each.episode is episode}.values():
            for sequence in request.sequences:
                sequence.cancel()
                self._requests.pop(id(sequence), None)

    def _rollouts(self, group: list[ProgramEpisode]) -> list[Rollout]:
        group = sorted(group, key=lambda episode: episode.first.sample_index)
        failures = [episode.outcome for episode in group if episode.outcome is not None]
        if len(failures) == len(group) and not any(episode.turns for episode in group):
            attempts = 1 + self._rules.settings.environment_retries
            raise RunError(
                f"the program {group[0].program.name!r} failed before its first turn for all {len(group)} episodes of "
                f"a prompt, {attempts} times each; the last error is {failures[-1].kind}: {failures[-1].message}"
            )
        default = self._prompt_ids[group[0].first.prompt_index]
        rollouts = [self._rollout(episode, default) for episode in group]
        texts = decode(self._tokenizer, [each.completion_ids.tolist() for each in rollouts])
        return [replace(each, text=text) for each, text in zip(rollouts, texts, strict=True)]

    def _rollout(self, episode: ProgramEpisode, default_prompt: np.ndarray) -> Rollout:
        assert episode.finish_reason is not None, "it has ended"
        return rollout_of(
            self._turns(episode),
            episode.index,
            episode.example,
            default_prompt,
            episode.finish_reason,
            episode.reward,
            self._policy_version,
            episode.program.has_branches,
        )


def _begins_with(prompt: np.ndarray, turn: SampledTurn) -> bool:
    stream = turn.stream
    return len(stream) <= len(prompt) and np.array_equal(stream, prompt[: len(stream)])
