"""The end of what episodes have opened: their environments, and the states of tools."""

from collections.abc import Callable
from functools import partial
from typing import Any

from groupax.episodes.calls import Calls
from groupax.episodes.environment import EnvironmentClass, Seat, warn_of_failure
from groupax.episodes.episode import Episode, do_nothing
from groupax.episodes.record import Question
from groupax.tools.threads import Outcome


class Closing:
    """Closes environments and states of tools, each in another thread.

    Args:
        calls: Calls of the rollout; None where every episode has one turn.
        warned: Kinds of failures that were warned of; updated.

    Attributes:
        num_begun: Number of those that are not closed yet.
    """

    def __init__(self, calls: Calls | None, warned: set[tuple[str, ...]]) -> None:
        self._calls, self._warned, self.num_begun = calls, warned, 0

    def close_all(self, episode: Episode) -> None:
        """Closes what an episode has opened."""
        for open_state in episode.tool_states:
            self._close(episode.index, "tools", partial(episode.close_of_state, open_state))
        if episode.kind.environment is not None and episode.seat is not None:
            self.close(episode.index, episode.kind.environment, episode.seat)

    def close(self, episode: tuple[int, int], of: EnvironmentClass, seat: Seat) -> None:
        """Closes an environment.

        Args:
            episode: Indices of the prompt and of the sample of its episode.
            of: Its class.
            seat: Its place.
        """
        if "close" in of.methods:
            self._close(episode, of.name, partial(_close_of_seat, of, seat))
        else:
            seat.leave()

    def _close(
        self, episode: tuple[int, int], name: str, method: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
    ) -> None:
        self.num_begun += 1
        assert self._calls is not None, "there is something to close"
        self._calls.call(Question(episode, 0, "close"), method, partial(self._closed, name), _nothing)

    def _closed(self, name: str, outcome: Outcome) -> None:
        self.num_begun -= 1
        if outcome.kind:
            warn_of_failure(self._warned, name, "could not be closed", outcome)


def _close_of_seat(of: EnvironmentClass, seat: Seat) -> tuple[Callable[..., Any], dict[str, Any]]:
    instance = seat.leave()
    return do_nothing if instance is None else of.method(instance, "close"), {}


def _nothing(returned: Any) -> None:
    """Drops what a method returns, since nobody asks for it."""
