"""One call of a reward function, in whatever thread or process this is, and what it logs. Imports no jax."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupax.rewards.contract import one_by_one


@dataclass
class Logged:
    """Collects what a call logs beside its return value."""

    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a value per completion in the rollout log."""
        self.extra.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number of the step."""
        self.metrics[name] = float(value)


def call_sync(function: Callable[..., Any], arguments: Mapping[str, Any], num_singly: int | None) -> tuple[Any, Logged]:
    """Call a sync function, in whatever thread or process this is.

    Args:
        function: a reward.
        arguments: by name, with a value per completion where there is a list.
        num_singly: how many completions, if it takes them one by one; None if one call takes all.
    """
    logged = Logged()
    arguments = _with_loggers(arguments, logged)
    if num_singly is None:
        return _plain(function(**arguments)), logged
    return [function(**each) for each in one_by_one(arguments, num_singly)], logged


def call_in_worker(*call: Any) -> tuple[Any, Logged]:
    """`call_sync`, raising nothing that ends the loop of whoever waits for it."""
    try:
        return call_sync(*call)
    except BaseException as error:
        raise as_exception(error) from error


async def call_async(
    function: Callable[..., Any], arguments: Mapping[str, Any], num_singly: int | None
) -> tuple[Any, Logged]:
    """Call an async function, as `call_sync` does; completions one by one at the same time."""
    logged = Logged()
    arguments = _with_loggers(arguments, logged)
    try:
        if num_singly is None:
            return _plain(await function(**arguments)), logged
        return list(await asyncio.gather(*(function(**each) for each in one_by_one(arguments, num_singly)))), logged
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_exception(error) from error  # or it would end the loop for all


def _with_loggers(arguments: Mapping[str, Any], logged: Logged) -> dict[str, Any]:
    loggers = {"log_extra": logged.log_extra, "log_metric": logged.log_metric}
    return {**arguments, **{name: logger for name, logger in loggers.items() if name in arguments}}


def as_exception(error: BaseException) -> Exception:
    """What a function raised, as something that a future accepts and that ends no loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(": ".join(filter(None, (f"raised {type(error).__name__}", str(error)))))


def _plain(returned: Any) -> Any:
    """What passes between processes and needs no library there: arrays of other libraries, and generators, as lists."""
    if hasattr(returned, "tolist"):
        return returned.tolist()
    return list(returned) if hasattr(returned, "__next__") else returned
