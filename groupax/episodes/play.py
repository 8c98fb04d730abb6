"""Plays episodes: turns that the model samples, and what tools and environments answer to them.

reset ──► prompt ──► turn is sampled ──► calls run, or act ──► bridge ──► turn is sampled ──► ... ──► end ──► score
                            └──────────────── no call, nothing to act: the end ────────────────────────┘

Each episode advances by itself: some wait for tools while the turns of others are sampled. All of it happens in the
thread that iterates; tools and environments run in those of the runner, which put the next steps into a queue.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from groupax.data.examples import Examples
from groupax.data.tokenizer import decode, special_token_ids
from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import BatchSession, ConversingSession, Sampler, SamplingSession
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.calls import Calls, Method
from groupax.episodes.closing import Closing
from groupax.episodes.custom import RolloutRequest, custom_rollouts
from groupax.episodes.environment import EnvironmentClass, Seat, Seats, answer_of, score_of, warn_of_failure
from groupax.episodes.episode import Episode
from groupax.episodes.opening import Opening, group_seed
from groupax.episodes.record import LEFT, Record
from groupax.episodes.rules import SINGLE_TURN, SINGLE_TURNS, Kind, Rules
from groupax.errors import RunError
from groupax.settings.sampling import SamplingParams
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.runner import TIMED_OUT, ToolResult, ToolRunner
from groupax.tools.threads import Outcome
from groupax.types import FinishReason, PromptImages, Rollout

LATER_TURNS = 1 << 30  # first index of the prompts of later turns, above those of any rollout


def play_episodes(
    sampler: Sampler,
    tokenizer: Any,
    examples: Examples,
    prompt_ids: Sequence[np.ndarray],
    params: SamplingParams,
    step: int,
    policy_version: int = 0,
    first_prompt: int = 0,
    rules: Rules = SINGLE_TURNS,
    record: Record | None = None,
    images: Sequence[PromptImages | None] = (),
) -> Generator[list[Rollout], None, None]:
    """Yields the group of each prompt as soon as its last episode has ended.

    What is yielded depends on nothing but the arguments and what tools and environments return, in whatever order they
    do so. A stop string that is a special token is treated as a stop token, since servers may omit it from their texts.

    Args:
        sampler: Sampler with the weights to sample from.
        tokenizer: Tokenizer that decodes the completions.
        examples: Dataset rows by index.
        prompt_ids: Token ids of the rows' prompts, to which environments may add.
        params: Sampling parameters; `n` is the size of a group, `max_tokens` counts all tokens after the prompt.
        step: Number that distinguishes rollouts with the same seed.
        policy_version: Version of the weights, which is recorded in each rollout.
        first_prompt: Index of the first of these prompts in its rollout.
        rules: Tools and environments.
        record: Answers of tools and environments from before the run was resumed, to which new ones are added.
        images: Images of each prompt; empty if all prompts are text.

    Raises:
        RunError: All environments of a group failed to start, or started differently for the episodes of a group; or
            what the rules' own function has sampled cannot be used.
    """
    if params.stop:
        assert not isinstance(params.stop_token_ids, int), "made a tuple of one when it was set"
        special = special_token_ids(tokenizer, params.stop)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
    if rules.rollout_func is not None:
        rows = [examples[index] for index in range(len(prompt_ids))]
        request = RolloutRequest(sampler, tokenizer, rows, params, step, rules.template_kwargs)
        yield from custom_rollouts(rules.rollout_func, request, first_prompt, policy_version)
        return
    with _runner_of(rules) as runner, closing(sampler.session()) as session:
        calls = None if runner is None else Calls(runner, record or Record())
        if rules.templates is not None:
            from groupax.episodes.program_play import ProgramTable  # needs packages of an extra

            assert calls is not None, "programs have turns"
            programs = ProgramTable(sampler, session, calls, tokenizer, rules, params, step, policy_version)
            yield from programs.play(examples, prompt_ids, first_prompt)
            return
        table = Table(sampler, session, calls, tokenizer, rules, params, step, policy_version)
        table.open(examples, prompt_ids, first_prompt, images)
        yield from table.finished_groups()


def _runner_of(rules: Rules) -> AbstractContextManager[ToolRunner | None]:
    """Returns what runs tools and environments; nothing where every episode has one turn."""
    settings = rules.settings
    if not rules.has_turns:
        return nullcontext()
    return ToolRunner(settings.tool_workers, settings.tool_timeout_s, rules.max_result_bytes, rules.hung)


class Table:
    """The episodes of a rollout that are being played."""

    def __init__(
        self,
        sampler: Sampler,
        session: SamplingSession,
        calls: Calls | None,
        tokenizer: Any,
        rules: Rules,
        params: SamplingParams,
        step: int,
        policy_version: int,
    ) -> None:
        self._sampler, self._session = sampler, session
        self.calls = calls
        self.tokenizer, self.rules = tokenizer, rules
        self.params, self.step, self._policy_version = params, step, policy_version
        self._sampled: dict[int, Episode] = {}  # by the identity of the sequence that is sampled
        self._to_submit: list[Completion] = []
        self._finished: dict[int, list[Episode]] = {}
        self._num_unfinished = 0
        self._prompt_numbers = itertools.count(LATER_TURNS)
        self._places: Iterator[Place] = iter(())  # for episodes that have not started
        self._openings: dict[int, Opening] = {}  # by the indices of their prompts
        self._images: dict[int, PromptImages] = {}  # likewise
        self.closing = Closing(calls, rules.warned)
        self.seats = Seats()

    def open(
        self,
        given: Examples,
        prompt_ids: Sequence[np.ndarray],
        first_prompt: int,
        images: Sequence[PromptImages | None] = (),
    ) -> None:
        """Starts the groups of prompts."""
        self._images = {index: each for index, each in enumerate(images, first_prompt) if each is not None}
        examples = [given[index] for index in range(len(prompt_ids))]
        kinds = [self.rules.kind_of(example) for example in examples]
        self._num_unfinished += len(examples)
        if self.rules.has_turns and isinstance(self._session, ConversingSession):
            longest, number = (
                max(map(len, prompt_ids), default=0) + self.params.max_tokens,
                len(examples) * self.params.n,
            )
            self._places = iter(self._session.converse(number, longest, self.params.max_tokens))
        if all(kind.environment is None for kind in kinds):
            self.start(first_prompt, examples, kinds[0] if kinds else SINGLE_TURN, prompt_ids)
            return
        places: Counter[str] = Counter()  # by the name of the environment
        for index, (example, kind) in enumerate(zip(examples, kinds, strict=True), first_prompt):
            name = kind.environment.name if kind.environment is not None else ""
            self._openings[index] = Opening(self, index, example, kind, places[name])
            places[name] += self.params.n
        for opening in list(self._openings.values()):
            opening.begin()

    def finished_groups(self) -> Iterator[list[Rollout]]:
        """Plays until all groups are finished, and yields each when it is."""
        while self._num_unfinished or self.closing.num_begun:
            self._submit()
            if self.calls is not None:
                self.calls.deliver(waits=not self._session.busy and not self._finished_any)
                while isinstance(self._session, BatchSession) and self.calls.are_under_way:
                    self.calls.deliver(waits=True)
            self._submit()
            if self._session.busy:
                for sequence, _ in self._session.step():
                    if sequence.finish_reason:
                        self._end_turn(self._sampled.pop(id(sequence)), sequence)
            for index in [index for index, group in self._finished.items() if len(group) == self.params.n]:
                self._num_unfinished -= 1
                self._openings.pop(index, None)
                yield self._rollouts(self._finished.pop(index))

    def _submit(self) -> None:
        if self._to_submit:
            sequences, self._to_submit = self._to_submit, []
            self._session.submit(sequences)

    @property
    def _finished_any(self) -> bool:
        return any(len(group) == self.params.n for group in self._finished.values())

    def _rollouts(self, group: list[Episode]) -> list[Rollout]:
        group = sorted(group, key=lambda episode: episode.first.sample_index)
        texts = decode(self.tokenizer, [episode.ids.tolist() for episode in group])
        return [episode.rollout(text, self._policy_version) for episode, text in zip(group, texts, strict=True)]

    # -- turns -----------------------------------------------------------------------------------------------------

    def start(
        self,
        first_prompt: int,
        examples: Sequence[Mapping[str, Any]],
        kind: Kind,
        prompts: Sequence[np.ndarray],
        seats: Sequence[Seat | None] = (),
        failures: Mapping[int, Outcome] | None = None,
    ) -> None:
        """Samples the first turns of groups of one kind, each with the environments of its episodes, if it has any."""
        params = self._first_params(kind)
        for number, first in enumerate(self._sampler.sequences(list(prompts), params, self.step, first_prompt)):
            seat = seats[number] if seats else None
            example = examples[first.prompt_index - first_prompt]
            first.adapter, first.images = self.rules.adapter_of(example), self._images.get(first.prompt_index)
            self._sample(self._new_episode(first, example, kind, seat, failures or {}), first)

    def start_apart(
        self,
        prompt_index: int,
        examples: Sequence[Mapping[str, Any]],
        kind: Kind,
        prompts: Sequence[np.ndarray],
        seats: Sequence[Seat | None],
        failures: Mapping[int, Outcome],
    ) -> None:
        """Samples the first turns of one group, whose episodes have different prompts."""
        params = self._first_params(kind)
        group = self._sampler.sequences([prompts[0]], params, self.step, prompt_index)
        for first, example, prompt, seat in zip(group, examples, prompts, seats, strict=True):
            first.prompt, first.adapter = prompt, self.rules.adapter_of(example)
            self._sample_alone(self._new_episode(first, example, kind, seat, failures), params.max_tokens)

    def _new_episode(
        self,
        first: Completion,
        example: Mapping[str, Any],
        kind: Kind,
        seat: Seat | None,
        failures: Mapping[int, Outcome],
    ) -> Episode:
        episode = Episode(first, example, kind, self.params.max_tokens, seat, self.rules.settings.environment_retries)
        episode.failure = failures.get(first.sample_index)
        return episode

    def play_again(self, old: Episode, seat: Seat | None, num_retries: int) -> None:
        """Plays an episode from its start, with a new environment."""
        new = Episode(old.first, old.example, old.kind, old.max_tokens, seat, num_retries)
        new.place = None if old.place is None else Place(old.place.max_tokens)  # the same memory, empty
        self._sample_alone(new, self._first_params(old.kind).max_tokens)

    def _first_params(self, kind: Kind) -> SamplingParams:
        """Returns the sampling parameters of the first turns of a group."""
        limit = self.rules.settings.max_turn_tokens
        if not kind.has_turns or limit is None:
            return self.params
        return replace(self.params, max_tokens=min(self.params.max_tokens, limit))

    def _sample_alone(self, episode: Episode, max_tokens: int) -> None:
        """Samples the next turn of an episode whose prompt is its own."""
        params = replace(self.params, n=1, max_tokens=max_tokens)
        # a number of its own: sequences with the same one share the computation of a prompt
        [sequence] = self._sampler.sequences([episode.stream], params, self.step, next(self._prompt_numbers))
        # its tokens have other positions than those of earlier turns, and therefore other random numbers
        sequence.sample_index, sequence.key = episode.first.sample_index, episode.first.key
        sequence.adapter, sequence.images = episode.first.adapter, episode.first.images
        self._sample(episode, sequence)

    def _sample(self, episode: Episode, sequence: Completion) -> None:
        sequence.place = episode.place = episode.place or next(self._places, None)
        self._sampled[id(sequence)] = episode
        self._to_submit.append(sequence)

    def _end_turn(self, episode: Episode, sequence: Completion) -> None:
        kind, settings, of = episode.kind, self.rules.settings, episode.kind.environment
        assert sequence.finish_reason is not None, "finished"
        if sequence.fault:
            raise RunError(f"a completion of prompt {sequence.prompt_index} has no end: {sequence.fault}")
        if not kind.has_turns:
            episode.add_turn(sequence, ParsedTurn("", "", ()))
            self._finish(episode, sequence.finish_reason)
            return
        text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=kind.calls is None)
        parsed = ParsedTurn(text, "", ()) if kind.calls is None else kind.calls.parse(text)
        exceeds = episode.exceeds_calls(settings, len(parsed.calls))
        episode.add_turn(sequence, parsed)
        if episode.failure is not None:
            self.drop(episode, episode.failure)
        elif sequence.finish_reason != "stop":
            cut_short = sequence.finish_reason == "length" and episode.num_left > 0
            self._finish(episode, "turn_length" if cut_short else sequence.finish_reason)
        elif exceeds:
            self._finish(episode, "max_tool_calls")
        elif settings.malformed_calls == "end" and any(call.fault for call in parsed.calls):
            self._finish(episode, "parse_error")
        elif parsed.calls and not (of is not None and of.answers(parsed.calls)):
            self._run_calls(episode, parsed.calls)
        elif of is not None and "act" in of.methods:
            self._act(episode)
        else:
            self._finish(episode, "stop")

    def _run_calls(self, episode: Episode, calls: tuple[ToolCall, ...]) -> None:
        assert self.calls is not None, "there are tools"
        seed = group_seed(self.params.seed, self.step, episode.first.prompt_index)
        method = partial(episode.matched, calls, seed)
        self.calls.run(episode.questions(calls), method, partial(self._answer_calls, episode, calls))

    def _answer_calls(self, episode: Episode, calls: tuple[ToolCall, ...], results: list[ToolResult]) -> None:
        messages = episode.add_results(calls, results)
        failed = next((each for each in results if each.is_infrastructure), None)
        if failed is not None:
            if failed.error.startswith(f"{RunError.__name__}: "):
                raise RunError(failed.error.partition(": ")[2])
            kind = LEFT if failed.error == LEFT else f"tool {calls[results.index(failed)].name}"
            self._fail(episode, Outcome(message=failed.error, kind=kind))
            return
        self._continue(episode, messages, any(result.done for result in results))

    def _act(self, episode: Episode) -> None:
        message = dict(episode.messages[-1])
        episode.num_acted = len(episode.turns)
        method = partial(episode.method, "act", {"message": message})
        self._call(
            episode, "act", method, partial(self._answer_act, episode), partial(answer_of, self.rules.max_result_bytes)
        )

    def _answer_act(self, episode: Episode, outcome: Outcome) -> None:
        if outcome.kind:
            self._fail(episode, outcome)
            return
        messages, reward, is_done = outcome.value
        episode.add_answers(messages)
        if reward is not None:
            episode.add_reward(reward)
        self._continue(episode, messages, is_done)

    def _continue(self, episode: Episode, messages: list[dict[str, Any]], is_done: bool) -> None:
        """Starts the next turn, if there is one."""
        settings, bridge = self.rules.settings, episode.kind.bridge_of(episode.example["prompt"])
        if is_done or len(episode.turns) >= settings.max_turns:
            self._finish(episode, "done" if is_done else "max_turns")
            return
        try:
            ids = bridge.ids(episode.stream, episode.messages[-1], messages)
            if len(ids) >= episode.num_left and settings.overlong_results == "error":
                error = f"the result has more tokens than are left ({episode.num_left})"
                messages = [{**message, "content": str({"error": error})} for message in messages]
                ids = bridge.ids(episode.stream, episode.messages[-1], messages)
        except ValueError as error:  # of a message that the environment has made up
            self._fail(episode, Outcome(message=str(error), kind="ValueError"))
            return
        if len(ids) >= episode.num_left:
            self._finish(episode, "tool_result_too_long")
            return
        episode.add_bridge(ids, messages)
        self._sample_alone(episode, min(episode.num_left, settings.max_turn_tokens or episode.num_left))

    # -- ends ------------------------------------------------------------------------------------------------------

    def _finish(self, episode: Episode, reason: FinishReason) -> None:
        episode.finish_reason = reason
        of = episode.kind.environment
        if of is not None and "score" in of.methods:
            self._call(episode, "score", episode.score_method, partial(self._add_score, episode), score_of)
        else:
            self._close(episode)

    def _add_score(self, episode: Episode, outcome: Outcome) -> None:
        if outcome.kind:
            self._fail(episode, outcome)
            return
        if outcome.value is None:
            episode.reward = None
        else:
            episode.add_reward(outcome.value)
        self._close(episode)

    def _fail(self, episode: Episode, outcome: Outcome) -> None:
        """Plays an episode again whose environment failed, or which has left its record; or drops it in the end."""
        of, has_left = episode.kind.environment, outcome.kind == LEFT
        if not has_left and episode.num_retries == 0:
            self.drop(episode, outcome)
            return
        if not has_left:
            warn_of_failure(self.rules.warned, _name_of(of), "failed; its episode begins again", outcome)
        self.closing.close_all(episode)
        assert self.calls is not None, "it failed"
        self.calls.begin_again(episode.index)
        num_retries = episode.num_retries - (not has_left)
        if of is not None:
            self._openings[episode.first.prompt_index].begin_again(episode, num_retries)
        else:
            self.play_again(episode, None, num_retries)

    def drop(self, episode: Episode, outcome: Outcome) -> None:
        """Ends an episode whose environment failed: it has no reward, and nothing is trained on it."""
        episode.finish_reason = "timeout" if outcome.kind == TIMED_OUT else "env_error"
        episode.reward = None
        what = "failed; its episode is left out"
        warn_of_failure(self.rules.warned, _name_of(episode.kind.environment), what, outcome)
        self._close(episode)

    def _close(self, episode: Episode) -> None:
        episode.place = episode.first.place = None
        self._finished.setdefault(episode.first.prompt_index, []).append(episode)
        if self.calls is not None:
            self.calls.end(episode.index)
        self.closing.close_all(episode)

    def _call(
        self, episode: Episode, what: str, method: Method, then: Callable[[Outcome], None], finish: Callable[[Any], Any]
    ) -> None:
        assert self.calls is not None, "there are environments"
        self.calls.call(episode.question(what), method, then, finish)


def _name_of(of: EnvironmentClass | None) -> str:
    return "tools" if of is None else of.name
