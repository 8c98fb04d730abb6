"""The start of a group of episodes in an environment: one environment each, and one prompt for all of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.data.tokenizer import encode_prompts
from groupax.episodes.calls import Calls, Method
from groupax.episodes.environment import (
    EnvironmentClass,
    Seat,
    plain_observation,
    reset_arguments,
    warn_of_failure,
    with_observation,
)
from groupax.episodes.episode import Episode
from groupax.episodes.record import Question
from groupax.episodes.rules import Kind, Rules
from groupax.errors import RunError
from groupax.settings.sampling import SamplingParams
from groupax.terminal.printable import short_repr
from groupax.tools.threads import Outcome
from groupax.types import Prompt

SEEDS = 1 << 31


def group_seed(seed: int, step: int, prompt_index: int) -> int:
    """Returns the seed that the episodes of a group share."""
    return int(np.random.SeedSequence([seed % (1 << 64), step, prompt_index]).generate_state(1)[0]) % SEEDS


@runtime_checkable
class Host(Protocol):
    """A `play.Table`, in which groups are played."""

    rules: Rules
    tokenizer: Any
    params: SamplingParams
    step: int
    calls: Calls | None
    taken: dict[int, Any]

    def start(
        self,
        first_prompt: int,
        examples: Sequence[Mapping[str, Any]],
        kind: Kind,
        prompts: Sequence[np.ndarray],
        seats: Sequence[Seat | None] = (),
        failures: Mapping[int, Outcome] | None = None,
    ) -> None:
        """Samples the first turns of groups of one kind, each with the environments of its episodes."""
        ...

    def play_again(self, old: Episode, seat: Seat | None, num_retries: int) -> None:
        """Plays an episode from its start, with a new environment."""
        ...

    def drop(self, episode: Episode, outcome: Outcome) -> None:
        """Ends an episode whose environment failed."""
        ...

    def dismiss(self, episode: tuple[int, int], of: EnvironmentClass, seat: Seat) -> None:
        """Closes an environment."""
        ...


class Opening:
    """A group whose environments are being created and reset.

    Args:
        table: Where it is played afterwards.
        prompt_index: Index of its prompt.
        example: Dataset row with the prompt.
        kind: Kind of its episodes.
    """

    def __init__(self, table: Host, prompt_index: int, example: Mapping[str, Any], kind: Kind) -> None:
        assert kind.environment is not None, "of an environment"
        self._table, self._prompt_index, self._example = table, prompt_index, example
        self._kind, self._class = kind, kind.environment
        self._seed = group_seed(table.params.seed, table.step, prompt_index)
        self._started: dict[int, tuple[Seat, Any]] = {}  # with the observations
        self._failed: dict[int, Outcome] = {}
        self._old: dict[int, Episode] = {}  # episodes that are played again
        self._observation: Any = None

    def begin(self) -> None:
        """Starts all environments of the group at the same time."""
        for index in range(self._table.params.n):
            self._begin(index, self._table.rules.settings.environment_retries)

    def begin_again(self, episode: Episode, num_retries: int) -> None:
        """Starts a new environment for an episode of the group, which is then played from its start."""
        index = episode.first.sample_index
        self._old[index] = episode
        self._begin(index, num_retries)

    def _begin(self, index: int, num_retries: int) -> None:
        seat = Seat(self._table.taken)
        then = partial(self._reset, index, num_retries, seat)
        self._call(index, "create", lambda: (self._class.create, {}), then, seat.take)

    def _reset(self, index: int, num_retries: int, seat: Seat, created: Outcome) -> None:
        if created.kind:
            self._fail(index, num_retries, created)
            return

        def reset() -> tuple[Callable[..., Any], dict[str, Any]]:
            row = {name: value for name, value in self._example.items() if name != "prompt"}
            return seat.instance.reset, reset_arguments(seat.instance.reset, row, self._seed)

        self._call(index, "reset", reset, partial(self._began, index, num_retries, seat), plain_observation)

    def _began(self, index: int, num_retries: int, seat: Seat, outcome: Outcome) -> None:
        if outcome.kind:
            self._table.dismiss((self._prompt_index, index), self._class, seat)
            self._fail(index, num_retries, outcome)
        elif index not in self._old:
            self._started[index] = seat, outcome.value
            self._start_if_all_are_there()
        elif outcome.value == self._observation:
            self._table.play_again(self._old.pop(index), seat, num_retries)
        else:
            self._table.dismiss((self._prompt_index, index), self._class, seat)
            self._give_up(index, Outcome(message="it started differently than before", kind="ValueError"))

    def _call(
        self,
        index: int,
        what: str,
        method: Method,
        then: Callable[[Outcome], None],
        finish: Callable[[Any], Any],
    ) -> None:
        assert self._table.calls is not None, "there are environments"
        self._table.calls.call(Question((self._prompt_index, index), 0, what), method, then, finish)

    def _fail(self, index: int, num_retries: int, outcome: Outcome) -> None:
        """Creates an environment again, or gives its episode up."""
        if num_retries == 0:
            self._give_up(index, outcome)
            return
        warned = self._table.rules.warned
        warn_of_failure(warned, self._class.name, "could not start and is created again", outcome)
        self._begin(index, num_retries - 1)

    def _give_up(self, index: int, outcome: Outcome) -> None:
        if index in self._old:
            self._table.drop(self._old.pop(index), outcome)
        else:
            self._failed[index] = outcome
            self._start_if_all_are_there()

    def _start_if_all_are_there(self) -> None:
        n = self._table.params.n
        if len(self._started) + len(self._failed) < n:
            return
        if not self._started:
            attempts, outcome = 1 + self._table.rules.settings.environment_retries, self._failed[0]
            raise RunError(
                f"environment {self._class.name!r} failed to start for all {n} episodes of a prompt, {attempts} times "
                f"each; the last error is {outcome.kind}: {outcome.message}"
            )
        self._start()

    def _start(self) -> None:
        observations = [self._started[index][1] for index in sorted(self._started)]
        first = self._observation = observations[0]
        different = next((each for each in observations if each != first), first)
        name = self._class.name
        if different != first:
            raise RunError(
                f"environment {name!r} started differently for the episodes of a group, whose rewards are compared: "
                f"{short_repr(first)} and {short_repr(different)}; let reset depend on its row and seed alone"
            )
        try:
            prompt = with_observation(self._example["prompt"], first)
            [ids] = self._encode(prompt)
        except ValueError as error:
            raise RunError(f"environment {name!r}: {error}") from error
        limit = self._table.rules.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            raise RunError(
                f"environment {name!r}: the prompt has {len(ids)} tokens with what reset returned, and {limit} are "
                "allowed by max_prompt_length, or by what max_completion_length leaves of the model's positions"
            )
        example = {**self._example, "prompt": prompt}
        seats = [self._started[index][0] if index in self._started else None for index in range(self._table.params.n)]
        self._started.clear()
        self._table.start(self._prompt_index, [example], self._kind, [ids], seats, self._failed)

    def _encode(self, prompt: Prompt) -> list[np.ndarray]:
        kwargs = {**self._table.rules.template_kwargs, **(self._example.get("chat_template_kwargs") or {})}
        tools = [self._kind.schemas] if self._kind.tools else None
        return encode_prompts(self._table.tokenizer, [prompt], [kwargs], tools=tools)
