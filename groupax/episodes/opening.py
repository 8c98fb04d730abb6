"""The start of a group of episodes in an environment: one environment each, and one prompt for all of them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.data.examples import Example, with_values
from groupax.data.tokenizer import encode_prompts
from groupax.episodes.calls import Calls, Method
from groupax.episodes.closing import Closing
from groupax.episodes.environment import (
    NotNewError,
    Seat,
    Seats,
    plain_observation,
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
    seats: Seats
    closing: Closing

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
        ...

    def play_again(self, old: Episode, seat: Seat | None, num_retries: int) -> None:
        """Plays an episode from its start, with a new environment."""
        ...

    def drop(self, episode: Episode, outcome: Outcome) -> None:
        """Ends an episode whose environment failed."""
        ...


class Opening:
    """A group whose environments are being created and reset.

    Args:
        table: Where it is played afterwards.
        prompt_index: Index of its prompt.
        example: Dataset row with the prompt.
        kind: Kind of its episodes.
        place: Number of its first episode among those of this kind.
    """

    def __init__(self, table: Host, prompt_index: int, example: Mapping[str, Any], kind: Kind, place: int) -> None:
        assert kind.environment is not None, "of an environment"
        self._table, self._prompt_index, self._example = table, prompt_index, example
        self._kind, self._class, self._place = kind, kind.environment, place
        self._seed = group_seed(table.params.seed, table.step, prompt_index)
        self._started: dict[int, tuple[Seat, Any]] = {}  # with the observations
        self._failed: dict[int, Outcome] = {}
        self._old: dict[int, Episode] = {}  # episodes that are played again
        self._observations: list[Any] = []

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
        seat = Seat(self._table.seats)
        then = partial(self._reset, index, num_retries, seat)
        arguments = {"place": self._place + index} if self._class.takes_place else {}
        self._call(index, "create", lambda: (self._class.create, arguments), then, seat.take)

    def _reset(self, index: int, num_retries: int, seat: Seat, created: Outcome) -> None:
        if created.kind == NotNewError.__name__:
            raise RunError(f"environment {self._class.name!r}: {created.message}")
        if created.kind:
            self._fail(index, num_retries, created)
            return

        def reset() -> tuple[Callable[..., Any], dict[str, Any]]:
            method = self._class.method(seat.instance, "reset")
            # environments may change what they are given
            return method, self._class.arguments(method, copy.deepcopy(dict(self._example)), self._seed)

        self._call(index, "reset", reset, partial(self._began, index, num_retries, seat), plain_observation)

    def _began(self, index: int, num_retries: int, seat: Seat, outcome: Outcome) -> None:
        if outcome.kind:
            self._table.closing.close((self._prompt_index, index), self._class, seat)
            self._fail(index, num_retries, outcome)
        elif index not in self._old:
            self._started[index] = seat, outcome.value
            self._start_if_all_are_there()
        elif outcome.value == self._observations[index]:
            self._table.play_again(self._old.pop(index), seat, num_retries)
        else:
            self._table.closing.close((self._prompt_index, index), self._class, seat)
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
        n, [(_, first), *_] = self._table.params.n, self._started.values()
        # an episode whose environment failed has the prompt of another one, and ends after its first turn
        found = [self._started.get(index, (None, first)) for index in range(n)]
        seats, self._observations = [seat for seat, _ in found], [observation for _, observation in found]
        different = next((each for each in self._observations if each != first), first)
        self._started.clear()
        if different == first:
            example, ids = self._prompt_of(first)
            self._table.start(self._prompt_index, [example], self._kind, [ids], seats, self._failed)
            return
        if self._class.starts_alike:
            raise RunError(
                f"environment {self._class.name!r} started differently for the episodes of a group, whose rewards are "
                f"compared: {short_repr(first)} and {short_repr(different)}; let reset depend on its row and seed alone"
            )
        examples, prompts = zip(*map(self._prompt_of, self._observations), strict=True)
        self._table.start_apart(self._prompt_index, examples, self._kind, prompts, seats, self._failed)

    def _prompt_of(self, observation: Any) -> tuple[Example, np.ndarray]:
        """Returns the row with the prompt to which an observation was added, and that prompt's token ids.

        Raises:
            RunError: It cannot be encoded, or is too long.
        """
        name = self._class.name
        try:
            prompt = with_observation(self._example["prompt"], observation)
            [ids] = self._encode(prompt)
        except ValueError as error:
            raise RunError(f"environment {name!r}: {error}") from error
        limit = self._table.rules.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            raise RunError(
                f"environment {name!r}: the prompt has {len(ids)} tokens with what reset returned, and {limit} are "
                "allowed by max_prompt_length, or by what max_completion_length leaves of the model's positions"
            )
        return with_values(self._example, {"prompt": prompt}), ids

    def _encode(self, prompt: Prompt) -> list[np.ndarray]:
        kwargs = {**self._table.rules.template_kwargs, **(self._example.get("chat_template_kwargs") or {})}
        tools = [self._kind.schemas] if self._kind.tools else None
        return encode_prompts(self._table.tokenizer, [prompt], [kwargs], tools=tools, may_be_empty=True)
