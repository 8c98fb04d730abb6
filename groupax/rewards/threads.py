"""Threads that do not keep the interpreter from ending: one with a loop, one for a call. Imports no jax."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from groupax.rewards.calls import as_exception
from groupax.rewards.main_thread import SignalWanted


def new_loop(name: str) -> asyncio.AbstractEventLoop:
    """A loop that runs in a thread of its own until it is stopped; what it has not finished by then is cancelled."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        try:
            loop.run_forever()
            loop.run_until_complete(_cancel_others())
        finally:
            loop.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_daemon_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run a function in a thread of its own, which does not keep the interpreter from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(method: str, value: Any) -> None:
        if not future.done():
            getattr(future, method)(value)

    def run() -> None:
        try:
            outcome = ("set_result", function())
        except SignalWanted as error:
            outcome = ("set_exception", error)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            outcome = ("set_exception", as_exception(error))
        with contextlib.suppress(RuntimeError):  # the runner was closed meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future
