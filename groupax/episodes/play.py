"""Plays episodes: turns that the model samples, and what tools, environments and programs answer to them.

reset ──► prompt ──► turn is sampled ──► calls run, or act ──► bridge ──► turn is sampled ──► ... ──► end ──► score
                            └──────────────── no call, nothing to act: the end ────────────────────────┘

Each episode is a coroutine, `Player.play`: some wait for tools while the turns of others are sampled. All of them run
in the thread that iterates; tools and environments run in those of the runner.
"""

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams
from groupax.core.terminal.printable import short_repr
from groupax.core.types import FinishReason, PromptImages, Rollout
from groupax.data.examples import Examples, with_values
from groupax.data.tokenizer import decode, encode_prompts
from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import ConversingSession, Sampler, SamplingSession
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.custom import RolloutRequest, custom_rollouts
from groupax.episodes.environment import (
    EnvironmentClass,
    NotNewError,
    OpenEnvironment,
    answer_of,
    do_nothing,
    plain_observation,
    warn_of_failure,
    with_observation,
)
from groupax.episodes.episode import Episode, EpisodeFailed, group_seed
from groupax.episodes.record import LEFT, Question, Record
from groupax.episodes.rules import Rules, Setup
from groupax.episodes.scheduler import Calls, Method, Scheduler, Task
from groupax.tools.calls import ToolCall
from groupax.tools.results import ToolResult, checked_reward, error_result
from groupax.tools.runner import TIMED_OUT, Outcome, ToolRunner

Open = Callable[[int], Coroutine[Any, Any, tuple[OpenEnvironment, int]]]
ENDED = "not called, since an earlier call of the turn has ended the episode"
LATER_TURNS = 1 << 30  # first index of the prompts of later turns, above those of any rollout


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts whose completions are sampled together."""

    rows: Examples  # row of the dataset of each prompt
    token_ids: Sequence[np.ndarray]  # token ids of each prompt, to which environments may add
    images: Sequence[PromptImages | None] = ()  # images of each prompt; empty if all prompts are text
    first: int = 0  # index of the first of these prompts in its rollout


def play_episodes(
    sampler: Sampler,
    tokenizer: Any,
    prompts: Prompts,
    params: SamplingParams,
    step: int,
    policy_version: int,
    rules: Rules,
    record: Record | None = None,
) -> Generator[list[Rollout], None, None]:
    """Yields the group of each prompt as soon as its last episode has ended (see `collector.sample_groups`).

    What is yielded depends on nothing but the arguments and what tools and environments return, in whatever order they
    do so.

    Raises:
        RunError: All environments of a group failed to start, or started differently for the episodes of a group; or
            what the rules' own function has sampled cannot be used.
    """
    rows = [prompts.rows[index] for index in range(len(prompts.token_ids))]
    images = prompts.images or [None] * len(rows)
    if rules.rollout_func is not None:
        request = RolloutRequest(sampler, tokenizer, rows, params, step, rules.template_kwargs)
        yield from custom_rollouts(rules.rollout_func, request, prompts.first, policy_version)
        return
    settings = rules.settings
    limits = settings.tool_workers, settings.tool_timeout_s, rules.max_result_bytes
    record = record or Record()
    # on an error the record is closed too: servers of environments would go on
    with closing(record), ToolRunner(*limits, rules.hung) as runner, closing(sampler.session()) as session:
        calls = Calls(runner, record)
        player = Player(sampler, session, calls, tokenizer, rules, params, step)
        try:
            yield from player.play_all(rows, prompts.token_ids, images, prompts.first, policy_version)
        finally:
            player.close()


def fault_of(sequence: Completion) -> Outcome:
    """Returns why the engine gave a sequence up."""
    return Outcome(message=sequence.fault, kind="ConstraintError")


class Player:
    """The coroutines of a rollout's episodes."""

    def __init__(
        self,
        sampler: Sampler,
        session: SamplingSession,
        calls: Calls,
        tokenizer: Any,
        rules: Rules,
        params: SamplingParams,
        step: int,
    ) -> None:
        self._sampler, self._session, self._calls = sampler, session, calls
        self._tokenizer, self._rules, self._params, self._step = tokenizer, rules, params, step
        self._scheduler = Scheduler(session, calls)
        self._prompt_numbers = itertools.count(LATER_TURNS)
        self._places: Iterator[Place] = iter(())  # for episodes that have not started
        self._in_use: dict[int, OpenEnvironment] = {}
        self._programs: Any = None
        if rules.templates is not None:
            from groupax.episodes.program_play import Programs  # needs packages of an extra

            self._programs = Programs(sampler, self._scheduler, calls, rules, params, step)

    def play_all(
        self,
        examples: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[np.ndarray],
        images: Sequence[PromptImages | None],
        first_prompt: int,
        policy_version: int,
    ) -> Iterator[list[Rollout]]:
        """Plays the episodes of all prompts, and yields the group of each as soon as its last episode has ended."""
        longest, max_tokens = max(map(len, prompt_ids), default=0), self._params.max_tokens
        if self._programs is not None:
            self._programs.longest_prompt = longest = self._rules.max_prompt_tokens or longest
        if isinstance(self._session, ConversingSession):
            number = max(len(examples) * self._params.n, 1)
            self._places = iter(self._session.converse(number, longest + max_tokens, max_tokens))
        numbers: Counter[str] = Counter()  # of episodes by the name of their environment
        groups = []
        for index, (example, ids) in enumerate(zip(examples, prompt_ids, strict=True)):
            setup, prompt = self._rules.setup_of(example), (first_prompt + index, example, ids)
            groups.append(Task(self.play_group(setup, prompt, images[index], numbers[setup.name])))
            numbers[setup.name] += self._params.n
        for episodes in self._scheduler.finished(groups):
            if self._programs is None:
                rollouts = [episode.rollout(policy_version) for episode in episodes]
            else:
                rollouts = self._programs.rollouts(episodes, policy_version)
            texts = decode(self._tokenizer, [rollout.completion_ids.tolist() for rollout in rollouts])
            yield [replace(rollout, text=text) for rollout, text in zip(rollouts, texts, strict=True)]

    def close(self) -> None:
        """Ends the programs that still run."""
        if self._programs is not None:
            self._programs.close()

    async def play_group(
        self,
        setup: Setup,
        prompt: tuple[int, Mapping[str, Any], np.ndarray],
        images: PromptImages | None,
        number: int,
    ) -> list[Episode]:
        """Plays the episodes of a prompt."""
        index, example, ids = prompt
        n, num_retries = self._params.n, self._rules.settings.environment_retries
        prompts, are_alike = [(example, ids)] * n, True
        environments: list[Any] = [None] * n
        open_each = [partial(self._open, setup, (index, sample), example, number + sample) for sample in range(n)]
        if self._programs is None and setup.environment is not None:
            opening = [Task(each(num_retries)) for each in open_each]
            environments = [(await each)[0] for each in opening]
            prompts, are_alike = self._prompts(setup, example, environments)
        # programs write prompts of their own: theirs only has the randomness of the episode
        first_ids = prompts[0][1] if self._programs is None else np.zeros(1, np.int32)
        params = replace(self._params, max_tokens=self._turn_tokens(self._params.max_tokens))
        tasks = []
        for first in self._sampler.sequences([first_ids], params, self._step, index):
            sample = first.sample_index
            row, first.prompt = prompts[sample]
            first.images = images
            place = next(self._places, None)
            episode = Episode(first, row, setup, environments[sample], self._params.max_tokens, num_retries, place)
            tasks.append(Task(self.play(episode, first if are_alike else None, open_each[sample])))
        return [await each for each in tasks]

    # -- starts ----------------------------------------------------------------------------------------------------

    async def _open(
        self, setup: Setup, episode: tuple[int, int], example: Mapping[str, Any], number: int, num_retries: int
    ) -> tuple[OpenEnvironment, int]:
        """Creates and resets an environment, again if it fails; returns it with the number of retries that are left."""
        cls = setup.environment
        assert cls is not None, "it has one"
        while True:
            environment = OpenEnvironment(cls, self._in_use)
            create = partial(_create_method, cls, number)
            outcome = await self._calls.call(Question(episode, 0, "create"), create, environment.keep)
            if outcome.kind == NotNewError.__name__:
                raise RunError(f"environment {cls.name!r}: {outcome.message}")
            if not outcome.kind:
                reset = partial(self._reset_method, environment, example, episode[0])
                outcome = await self._calls.call(Question(episode, 0, "reset"), reset, plain_observation)
                if not outcome.kind:
                    environment.observation = outcome.value
                    return environment, num_retries
                self._close(episode, environment)
            if num_retries == 0:
                return OpenEnvironment(cls, self._in_use, outcome), 0
            self._warn(setup, "could not start and is created again", outcome)
            num_retries -= 1

    def _reset_method(
        self, environment: OpenEnvironment, example: Mapping[str, Any], prompt_index: int
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        method, seed = environment.method("reset"), group_seed(self._params.seed, self._step, prompt_index)
        # environments may change what they are given
        return method, environment.cls.arguments(method, copy.deepcopy(dict(example)), seed)

    def _prompts(
        self, setup: Setup, example: Mapping[str, Any], starts: Sequence[OpenEnvironment]
    ) -> tuple[list[tuple[Mapping[str, Any], np.ndarray]], bool]:
        """Returns the rows and prompts of a group's episodes with their observations, and whether all are the same.

        An episode whose environment failed has the prompt of another one, and ends after its first turn.
        """
        name, begun = setup.name, [start.observation for start in starts if start.failure is None]
        if not begun:
            attempts, outcome = 1 + self._rules.settings.environment_retries, starts[0].failure or Outcome()
            raise RunError(
                f"environment {name!r} failed to start for all {len(starts)} episodes of a prompt, {attempts} times "
                f"each; the last error is {outcome.kind}: {outcome.message}"
            )
        different = next((each for each in begun if each != begun[0]), begun[0])
        if different == begun[0]:
            return [self._prompt(setup, example, begun[0])] * len(starts), True
        if setup.environment is not None and setup.environment.starts_alike:
            raise RunError(
                f"environment {name!r} started differently for the episodes of a group, whose rewards are compared: "
                f"{short_repr(begun[0])} and {short_repr(different)}; let reset depend on its row and seed alone"
            )
        observations = [begun[0] if start.failure is not None else start.observation for start in starts]
        return [self._prompt(setup, example, each) for each in observations], False

    def _prompt(
        self, setup: Setup, example: Mapping[str, Any], observation: Any
    ) -> tuple[Mapping[str, Any], np.ndarray]:
        """Returns the row with the prompt to which an observation was added, and that prompt's token ids."""
        kwargs = {**self._rules.template_kwargs, **(example.get("chat_template_kwargs") or {})}
        tools, limit = [setup.schemas] if setup.tools else None, self._rules.max_prompt_tokens
        try:
            prompt = with_observation(example["prompt"], observation)
            [ids] = encode_prompts(self._tokenizer, [prompt], [kwargs], tools=tools, may_be_empty=True)
        except ValueError as error:
            raise RunError(f"environment {setup.name!r}: {error}") from error
        if limit is not None and len(ids) > limit:
            raise RunError(
                f"environment {setup.name!r}: the prompt has {len(ids)} tokens with what reset returned, and {limit} "
                "are allowed by max_prompt_length, or by what max_completion_length leaves of the model's positions"
            )
        return with_values(example, {"prompt": prompt}), ids

    # -- turns -----------------------------------------------------------------------------------------------------

    async def play(self, episode: Episode, first_turn: Completion | None, open_again: Open) -> Episode:
        """Plays an episode to its end, again from its start if its environment fails.

        Args:
            episode: The episode.
            first_turn: Sequence of its first turn, which shares its prompt with others; None if it shares none.
            open_again: Opens a new environment, from the number of retries.
        """
        while True:
            try:
                if self._programs is None:
                    episode.finish_reason = await self._converse(episode, first_turn)
                    await self._score(episode)
                else:
                    episode.finish_reason = await self._programs.run(episode)
                break
            except EpisodeFailed as failure:
                first_turn = None
                try:
                    episode = await self._begin_again(episode, failure.outcome, open_again)
                except EpisodeFailed as last:  # it has no reward, and nothing is trained on it
                    episode.failure, episode.reward = last.outcome, None
                    episode.finish_reason = "timeout" if last.outcome.kind == TIMED_OUT else "env_error"
                    self._warn(episode.setup, "failed; its episode is left out", last.outcome)
                    break
        episode.place = episode.first.place = None
        self._calls.end(episode.index)
        self._close_all(episode)
        return episode

    async def _converse(self, episode: Episode, first_turn: Completion | None) -> FinishReason:
        """Samples and answers the turns of an episode, and returns why there are no more."""
        setup, settings, environment = episode.setup, self._rules.settings, episode.setup.environment
        bridge, sequence = setup.bridge_of(episode.example["prompt"]), first_turn
        while True:
            sampled = await self._scheduler.sample(sequence or self._next_turn(episode), episode.place)
            sequence = None
            parsed = setup.parse(self._tokenizer.decode(sampled.tokens, skip_special_tokens=setup.calls is None))
            exceeds = episode.exceeds_calls(settings, len(parsed.calls))
            episode.add_turn(sampled, parsed)
            if sampled.fault:
                episode.failure = fault_of(sampled)
            if episode.failure is not None:
                raise EpisodeFailed(episode.failure)
            if sampled.finish_reason != "stop":
                assert sampled.finish_reason is not None, "it has ended"
                is_turn_limit = sampled.finish_reason == "length" and episode.num_left > 0
                return "turn_length" if is_turn_limit else sampled.finish_reason
            if exceeds:
                return "max_tool_calls"
            if settings.malformed_calls == "end" and any(call.fault for call in parsed.calls):
                return "parse_error"
            if parsed.calls:
                messages, is_done = await self._run_calls(episode, parsed.calls)
            elif environment is not None and "act" in environment.methods:
                messages, is_done = await self._act(episode)
            else:
                return "stop"
            if is_done or len(episode.turns) >= settings.max_turns:
                return "done" if is_done else "max_turns"
            try:
                ids = bridge.ids(episode.stream, episode.messages[-1], messages)
                if len(ids) >= episode.num_left and settings.overlong_results == "error":
                    error = f"the result has more tokens than are left ({episode.num_left})"
                    messages = [{**message, "content": str({"error": error})} for message in messages]
                    ids = bridge.ids(episode.stream, episode.messages[-1], messages)
            except ValueError as error:  # of a message that the environment has made up
                raise EpisodeFailed(Outcome(message=str(error), kind="ValueError")) from error
            if len(ids) >= episode.num_left:
                return "tool_result_too_long"
            episode.add_bridge(ids, messages)

    def _next_turn(self, episode: Episode) -> Completion:
        """Returns the sequence of the next turn of an episode, whose prompt is its own."""
        params = replace(self._params, n=1, max_tokens=self._turn_tokens(episode.num_left))
        # a number of its own: sequences with the same one share the computation of a prompt
        [sequence] = self._sampler.sequences([episode.stream], params, self._step, next(self._prompt_numbers))
        # its tokens have other positions than those of earlier turns, and therefore other random numbers
        sequence.sample_index, sequence.key = episode.first.sample_index, episode.first.key
        sequence.images = episode.first.images
        return sequence

    def _turn_tokens(self, num_left: int) -> int:
        return min(num_left, self._rules.settings.max_turn_tokens or num_left)

    async def _run_calls(self, episode: Episode, calls: Sequence[ToolCall]) -> tuple[list[dict[str, Any]], bool]:
        """Returns the results of a turn's calls as messages, and whether they end the episode.

        The calls run in their order, or at the same time if all of their tools are `parallel`. In order, none is made
        after one that has ended the episode.
        """
        seed, tools = group_seed(self._params.seed, self._step, episode.index[0]), episode.setup.tools
        pairs = [*zip(episode.questions(calls), calls, strict=True)]
        running = [
            partial(self._calls.call_tool, question, partial(episode.matched, call, seed)) for question, call in pairs
        ]
        results: list[ToolResult] = []
        if all(call.name not in tools or tools[call.name].parallel for call in calls):
            results = [await task for task in [Task(run()) for run in running]]
        else:
            for run in running:
                is_over = any(result.done or result.is_infrastructure for result in results)
                results.append(error_result(ENDED, 0.0, self._rules.max_result_bytes) if is_over else await run())
        messages = episode.add_results(calls, results)
        for call, result in zip(calls, results, strict=True):
            if result.is_infrastructure:
                kind, _, message = result.error.partition(": ")
                if kind == RunError.__name__:
                    raise RunError(message)
                raise EpisodeFailed(Outcome(message=result.error, kind=LEFT if kind == LEFT else f"tool {call.name}"))
        return messages, any(result.done for result in results)

    async def _act(self, episode: Episode) -> tuple[list[dict[str, Any]], bool]:
        """Returns the answer of the environment to a turn as messages, and whether it ends the episode."""
        message = dict(episode.messages[-1])
        episode.is_answered = True
        finish = partial(answer_of, max_bytes=self._rules.max_result_bytes)
        outcome = await self._calls.call(
            episode.question("act"), lambda: (episode.environment.method("act"), {"message": message}), finish
        )
        if outcome.kind:
            raise EpisodeFailed(outcome)
        messages, reward, is_done = outcome.value
        episode.close_turn((), reward)
        return messages, is_done

    async def _score(self, episode: Episode) -> None:
        """Adds the score of the environment."""
        if episode.setup.environment is None or "score" not in episode.setup.environment.methods:
            return
        outcome = await self._calls.call(episode.question("score"), partial(_score_method, episode), _checked_score)
        if outcome.kind:
            raise EpisodeFailed(outcome)
        if outcome.value is None:
            episode.reward = None
        else:
            episode.close_turn((), outcome.value)

    # -- failures and ends -----------------------------------------------------------------------------------------

    async def _begin_again(self, old: Episode, outcome: Outcome, open_again: Open) -> Episode:
        """Returns an episode from its start, with a new environment, after one failed or has left its record."""
        has_left, setup, environment = outcome.kind == LEFT, old.setup, None
        if old.failure is not None or (not has_left and old.num_retries == 0):
            raise EpisodeFailed(outcome)
        if not has_left:
            self._warn(setup, "failed; its episode begins again", outcome)
        self._close_all(old)
        self._calls.begin_again(old.index)
        num_retries = old.num_retries - (not has_left)
        if self._programs is None and setup.environment is not None:
            environment, num_retries = await open_again(num_retries)
            if environment.failure is None and environment.observation != old.environment.observation:
                self._close(old.index, environment)
                raise EpisodeFailed(Outcome(message="it started differently than before", kind="ValueError"))
            if environment.failure is not None:
                raise EpisodeFailed(environment.failure)
        place = None if old.place is None else Place(old.place.max_tokens)  # the same memory, empty
        return Episode(old.first, old.example, setup, environment, old.max_tokens, num_retries, place)

    def _close_all(self, episode: Episode) -> None:
        """Closes what an episode has opened."""
        if episode.run is not None:
            self._programs.end(episode.run)
        for state in episode.tool_states.values():
            Task(self._closed(episode.index, "tools", partial(_close_of_state, state)))
        episode.tool_states.clear()
        if self._programs is None and episode.setup.environment is not None and episode.environment.failure is None:
            self._close(episode.index, episode.environment)

    def _close(self, episode: tuple[int, int], environment: OpenEnvironment) -> None:
        if "close" in environment.cls.methods:
            Task(self._closed(episode, environment.cls.name, environment.close_method))
        else:
            environment.leave()

    async def _closed(self, episode: tuple[int, int], name: str, method: Method) -> None:
        outcome = await self._calls.call(Question(episode, 0, "close"), method, lambda _: None)
        if outcome.kind:
            warn_of_failure(self._rules.warned, f"environment {name!r}", "could not be closed", outcome)

    def _warn(self, setup: Setup, what: str, outcome: Outcome) -> None:
        warn_of_failure(self._rules.warned, f"environment {setup.name!r}", what, outcome)


def _create_method(cls: EnvironmentClass, number: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    return cls.create, {"place": number} if cls.takes_place else {}


def _score_method(episode: Episode) -> tuple[Callable[..., Any], dict[str, Any]]:
    score = episode.environment.method("score")
    message = None if episode.is_answered else dict(episode.messages[-1])
    return score, {"message": message} if "message" in inspect.signature(score).parameters else {}


def _checked_score(returned: Any) -> float | None:
    return None if returned is None else checked_reward(returned)


def _close_of_state(state: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    return do_nothing if state is None else state.close, {}
