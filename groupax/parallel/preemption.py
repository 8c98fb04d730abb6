"""Requests to stop a run: signals, and a cloud's maintenance notices. Imports no jax.

SIGTERM, SIGINT    the current update is finished and a rollout cancelled; a second signal ends the program at once
SIGHUP             likewise, unless it is ignored, as under nohup; a second one changes nothing
metadata server    announces that a cloud's machine will be taken away

handler or notice ──► reason ──► `check`, between two chunks of decoding ──────────────────► RolloutCancelled
                        └──► after PATIENCE_S, in code that does not look: raised there ────────────┘
"""

import errno
import os
import queue
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from groupax.core.errors import PreemptedError

METADATA_HOST = "metadata.google.internal"  # GCE_METADATA_HOST names another, as for Google's own tools
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}  # the answers when nothing is announced
POLL_S = 5.0
ANSWER_S = 5.0  # in which the server answers
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

    Signals are handled in the main thread only; in other threads there are only notices.

    Args:
        watch_metadata: Whether to ask the cloud's metadata server for notices.
        agree: Maps this process's reason to that of any process of the run; all of them call it at the same points.
            None for a single process. With it, a request cancels work only at `check` and `check_cancellable`.

    Attributes:
        reason: The reason to stop; None if there is none.
    """

    def __init__(self, watch_metadata: bool = False, agree: Callable[[str | None], str | None] | None = None) -> None:
        self.agree = agree
        self.watch_metadata = watch_metadata or "GCE_METADATA_HOST" in os.environ
        self.reason: str | None = None
        self._is_cancellable = False
        self._signaled_s: float | None = None
        self._handlers: dict[int, Any] = {}
        self._hook = sys.unraisablehook
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose `put` may interrupt itself
        self._closed = threading.Event()

    def __enter__(self) -> "PreemptionHandler":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._handle) for number in stop_signals()}
            self._handlers[WAKE] = signal.signal(WAKE, self._cancel)
            self._hook = keep_stops()
            threading.Thread(target=self._insist, name="stop", daemon=True).start()
        if self.watch_metadata:
            threading.Thread(target=watch, args=(self._notice, self._closed), name="maintenance", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._requests.put(None)
        if self._handlers:
            sys.unraisablehook = self._hook
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
            self._request(signal.Signals(number).name)
        elif number != signal.SIGHUP and now_s - self._signaled_s > SAME_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _notice(self, text: str) -> None:
        if not self._closed.is_set():
            self._request(text)

    def _request(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._requests.put(None)

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


def keep_stops() -> Callable[["sys.UnraisableHookArgs"], Any]:
    """Sets a `sys.unraisablehook`, after which no request to stop the main thread is lost; returns the previous one.

    Python calls it with exceptions that destructors and callbacks of the garbage collector have let pass.
    If the handler of a signal raised one there, it is called again as soon as the code below reaches another line.
    """
    previous = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        number = WAKE if isinstance(lost.exc_value, RolloutCancelled) else signal.SIGINT
        is_stop = isinstance(lost.exc_value, (RolloutCancelled, KeyboardInterrupt))
        if not is_stop or threading.current_thread() is not threading.main_thread():
            previous(lost)
            return
        tracer = sys.gettrace()

        def handle_again(*_: object) -> None:
            sys.settrace(tracer)
            signal.raise_signal(number)

        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = handle_again
            frame = frame.f_back
        sys.settrace(lambda *_: None)  # without which no frame is traced

    sys.unraisablehook = hook
    return previous


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


def watch(notice: Callable[[str], None], closed: threading.Event) -> None:
    """Asks the metadata server until it announces that the machine will be taken away, or turns out not to exist."""
    host = os.environ.get("GCE_METADATA_HOST", METADATA_HOST)
    answered = False
    while not closed.wait(POLL_S if answered else 0.0):
        for name, quiet in QUIET.items():
            url = f"http://{host}/computeMetadata/v1/instance/{name}"
            request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                    said = response.read().decode().strip()
            except urllib.error.HTTPError:  # a server, but it has no such entry
                answered = True
                continue
            except (OSError, ValueError):
                if not answered:
                    return  # not in that cloud
                continue
            answered = True
            if said != quiet:
                notice(f"the cloud announced {name} {said}")
                return


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
