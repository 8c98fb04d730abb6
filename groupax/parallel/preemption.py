"""Requests to stop a run by signals. Imports no jax.

SIGTERM, SIGINT    the current update is finished and a rollout cancelled; a second signal ends the program at once
SIGHUP             likewise, unless it is ignored, as under nohup; a second one changes nothing

handler ──► reason ──► `check`, between two chunks of decoding ──────────────────► RolloutCancelled
              └──► after PATIENCE_S, in code that does not look: raised there ────────────┘
"""

import errno
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from groupax.core.errors import PreemptedError

PATIENCE_S = 0.5  # in which code that looks for requests finds them; then they are raised, until they arrive
SAME_S = 0.2  # a program such as `timeout` signals a process and its group
WAKE = signal.SIGURG  # ignored by default, so that a late one does nothing


class RolloutCancelled(BaseException):
    """Repeatable work was cancelled by a request to stop. Not an `Exception`, so that no handler swallows it."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask this process to stop."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGTERM, signal.SIGINT, *hangup


class PreemptionHandler:
    """A context that handles requests to stop, and restores the previous signal handlers at its end.

    Signals are handled in the main thread only.

    Args:
        agree: Maps this process's reason to that of any process of the run; all of them call it at the same points.
            None for a single process. With it, a request cancels work only at `check` and `check_cancellable`.
        at_once: Is called with the name of a second signal before that ends the program.

    Attributes:
        reason: The reason to stop; None if there is none.
    """

    def __init__(
        self,
        agree: Callable[[str | None], str | None] | None = None,
        at_once: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.agree, self.at_once = agree, at_once
        self.reason: str | None = None
        self._is_cancellable = False
        self._signaled_s: float | None = None
        self._handlers: dict[int, Any] = {}
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose `put` may interrupt itself
        self._closed = threading.Event()

    def __enter__(self) -> "PreemptionHandler":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._handle) for number in stop_signals()}
            self._handlers[WAKE] = signal.signal(WAKE, self._cancel)
            threading.Thread(target=self._insist, name="stop", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._requests.put(None)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._handlers = {}

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Lets a request to stop end the block, in which case its result and its errors do not count.

        Raises:
            RolloutCancelled: A stop was requested.
        """
        try:
            self.check()
            self._is_cancellable = True
            yield
            self.check()
        except Exception as error:
            if self.reason is None or self.agree is not None:
                raise
            raise RolloutCancelled from error  # workers die of the signal too
        finally:
            self._is_cancellable = False

    def check(self) -> None:
        """Raises an exception if a stop was requested.

        Raises:
            RolloutCancelled: A stop was requested.
        """
        if self.agree is not None:
            self.reason = self.agree(self.reason)
        if self.reason is not None:
            raise RolloutCancelled

    def check_cancellable(self) -> None:
        """Runs `check` if a cancellable block is under way."""
        if self._is_cancellable:
            self.check()

    def _handle(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        now_s = time.monotonic()
        if self._signaled_s is None:
            self._signaled_s = now_s
            self.reason = signal.Signals(number).name
            self._requests.put(None)
        elif number != signal.SIGHUP and now_s - self._signaled_s > SAME_S:
            signal.signal(number, signal.SIG_DFL)  # also if a third one arrives
            try:
                self.at_once(signal.Signals(number).name)
            finally:
                os.kill(os.getpid(), number)

    def _insist(self) -> None:
        """Wakes the main thread, in a thread of its own, as long as a request has not ended a cancellable block."""
        self._requests.get()
        while not self._closed.wait(PATIENCE_S):
            if self._is_cancellable and self.agree is None:
                signal.pthread_kill(threading.main_thread().ident or 0, WAKE)

    def _cancel(self, *_: object) -> None:
        """Raises a request in the main thread, unless that is being done: code that ends is not interrupted again."""
        if self._is_cancellable and self.agree is None and not is_raised(RolloutCancelled):
            raise RolloutCancelled


def is_raised(kind: type[BaseException]) -> bool:
    """Returns whether such an exception is being handled, or has led to the one that is."""
    error = sys.exception()
    while error is not None and not isinstance(error, kind):
        error = error.__context__
    return error is not None


def leave_closed_terminal() -> None:
    """Has output that went to a terminal go nowhere if that is closed, since writing to it is an error."""
    for descriptor in (1, 2):
        try:
            os.ttyname(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:  # another one for a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextmanager
def stoppable(when: str = "before training started; nothing was saved") -> Iterator[None]:
    """Lets a request to stop end the block, which can be repeated.

    Args:
        when: When the program is stopped, and what is saved by then.

    Raises:
        PreemptedError: A stop was requested; the user has been informed.
    """
    with PreemptionHandler() as stop:
        try:
            with stop.cancellable():
                yield
        except RolloutCancelled:
            message = f"stopped ({stop.reason}) {when}. Start it again as before"
            print(message, file=sys.stderr)
            raise PreemptedError(message) from None


class FairLock:
    """A fair (FIFO) lock for threads that compute on the same devices; it can be closed.

    Programs that several devices compute together must reach all devices in the same order, which threads without a
    lock do not guarantee.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._is_held = self._is_closed = False

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._is_closed or (not self._is_held and self._waiting[0] is ticket))
                if self._is_closed:
                    raise RolloutCancelled
                self._is_held = True
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def close(self) -> None:
        """Makes all current and later attempts to acquire the lock raise `RolloutCancelled`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
