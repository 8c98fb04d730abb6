"""The way of new tokens from the engine's thread to a response."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from groupax.serve.errors import ApiError
from groupax.serve.exchange import Completion
from groupax.serve.jobs import Delta


def to_queue(deltas: "asyncio.Queue[Delta]") -> Callable[[Delta], None]:
    """Returns a listener that passes deltas from the engine's thread to this one."""
    call_here = asyncio.get_running_loop().call_soon_threadsafe

    def listener(delta: Delta) -> None:
        with suppress(RuntimeError):  # the server was stopped without waiting
            call_here(deltas.put_nowait, delta)

    return listener


async def arriving_deltas(deltas: "asyncio.Queue[Delta]", num: int) -> AsyncIterator[Delta]:
    """Yields the deltas of a job until all its completions are finished.

    Args:
        deltas: The queue that the job's listener fills.
        num: Number of completions.

    Raises:
        ApiError: the engine failed, or gave up the request.
    """
    while num:
        delta = await deltas.get()
        if delta.finish_reason == "abort":
            if delta.text:
                raise ApiError(400, delta.text)
            raise ApiError(503, "the engine gave up this request; try again", code="aborted")
        num -= delta.finish_reason is not None
        yield delta


async def no_tokens(num: int) -> AsyncIterator[Delta]:
    """Yields the ends of completions of which no token is requested."""
    for index in range(num):
        yield Delta(index, 0, [], [], [], [], [], "length", "")


async def collect(arriving: AsyncIterator[Delta], num: int) -> list[Completion]:
    """Returns the completions when all deltas have arrived."""
    completions = [Completion() for _ in range(num)]
    async for delta in arriving:
        completions[delta.index].add(delta)
    return completions
