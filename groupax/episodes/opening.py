"""The start of a group of episodes in an environment: one environment each, and one prompt for all of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.data.tokenizer import encode_prompts
from groupax.episodes.calls import Calls, Method
from groupax.episodes.environment import warn_of_failure, with_observation
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

    def start(
        self,
        first_prompt: int,
        examples: Sequence[Mapping[str, Any]],
        kind: Kind,
        prompts: Sequence[np.ndarray],
        instances: Sequence[Any] = (),
    ) -> None:
        """Samples the first turns of groups of one kind, each with the environments of its episodes."""
        ...

    def start_apart(
        self,
        prompt_index: int,
        examples: Sequence[Mapping[str, Any]],
        kind: Kind,
        prompts: Sequence[np.ndarray],
        instances: Sequence[Any],
    ) -> None:
        """Samples the first turns of one group, whose episodes have different prompts."""
        ...


class Seat:
    """The place of an environment, which only the process has that makes its calls."""

    instance: Any = None

    def take(self, instance: Any) -> None:
        """Keeps a new environment."""
        self.instance = instance


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
        self._started: dict[int, tuple[Any, Any]] = {}  # environments and their observations

    def begin(self) -> None:
        """Starts all environments of the group at the same time."""
        for index in range(self._table.params.n):
            self._begin(index, self._table.rules.settings.environment_retries)

    def _begin(self, index: int, num_retries: int) -> None:
        seat = Seat()
        arguments = {"place": self._place + index} if self._class.takes_place else {}
        self._call(lambda: (self._class.create, arguments), partial(self._reset, index, num_retries, seat), seat.take)

    def _reset(self, index: int, num_retries: int, seat: "Seat", created: Outcome) -> None:
        if created.kind:
            self._begin_again(index, num_retries, created)
            return

        def reset() -> tuple[Callable[..., Any], dict[str, Any]]:
            method = self._class.method(seat.instance, "reset")
            return method, self._class.arguments(method, self._example, self._seed)

        self._call(reset, partial(self._began, index, num_retries, seat))

    def _began(self, index: int, num_retries: int, seat: "Seat", outcome: Outcome) -> None:
        if outcome.kind:
            self._begin_again(index, num_retries, outcome)
            return
        self._started[index] = seat.instance, outcome.value
        if len(self._started) == self._table.params.n:
            self._start()

    def _call(
        self, method: Method, then: Callable[[Outcome], None], finish: Callable[[Any], Any] | None = None
    ) -> None:
        assert self._table.calls is not None, "there are environments"
        self._table.calls.call(self._prompt_index, method, then, finish)

    def _begin_again(self, index: int, num_retries: int, outcome: Outcome) -> None:
        if num_retries == 0:
            attempts = 1 + self._table.rules.settings.environment_retries
            raise RunError(
                f"environment {self._class.name!r} failed to start, {attempts} times; the last error is "
                f"{outcome.kind}: {outcome.message}"
            )
        warn_of_failure(self._class.name, "could not start and is created again", outcome)
        self._begin(index, num_retries - 1)

    def _start(self) -> None:
        instances, observations = zip(*(self._started[index] for index in sorted(self._started)), strict=True)
        first = observations[0]
        different = next((each for each in observations if each != first), first)
        if different == first:
            example, ids = self._prompt_of(first)
            self._table.start(self._prompt_index, [example], self._kind, [ids], instances)
            return
        if self._class.starts_alike:
            raise RunError(
                f"environment {self._class.name!r} started differently for the episodes of a group, whose rewards are "
                f"compared: {short_repr(first)} and {short_repr(different)}; let reset depend on its row and seed alone"
            )
        examples, prompts = zip(*map(self._prompt_of, observations), strict=True)
        self._table.start_apart(self._prompt_index, examples, self._kind, prompts, instances)

    def _prompt_of(self, observation: Any) -> tuple[dict[str, Any], np.ndarray]:
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
        return {**self._example, "prompt": prompt}, ids

    def _encode(self, prompt: Prompt) -> list[np.ndarray]:
        kwargs = {**self._table.rules.template_kwargs, **(self._example.get("chat_template_kwargs") or {})}
        tools = [self._kind.schemas] if self._kind.tools else None
        return encode_prompts(self._table.tokenizer, [prompt], [kwargs], tools=tools, may_be_empty=True)
