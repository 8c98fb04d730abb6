"""Requests to stop a run: signals, and a cloud's maintenance notices. Imports no jax.

SIGTERM, SIGINT    the current update is finished and a rollout cancelled; a second signal ends the program at once
metadata server    announces that a cloud's machine will be taken away
"""

import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from groupax.errors import PreemptedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
METADATA_HOST = "metadata.google.internal"  # GCE_METADATA_HOST names another, as for Google's own tools
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}  # the answers when nothing is announced
POLL_S = 5.0


class RolloutCancelled(BaseException):
    """Repeatable work was cancelled by a request to stop. Not an `Exception`, so that no handler swallows it."""


class PreemptionHandler:
    """A context that handles requests to stop, and restores the previous signal handlers at its end.

    Signals are handled in the main thread only; in other threads there are only notices.

    Args:
        watch_metadata: Whether to ask the cloud's metadata server for notices.
        agree: Maps this process's reason to that of any process of the run; all of them call it at the same points.
            None for a single process. With it, a request cancels work only at `check`.

    Attributes:
        reason: The reason to stop; None if there is none.
    """

    def __init__(self, watch_metadata: bool = False, agree: Callable[[str | None], str | None] | None = None) -> None:
        self.agree = agree
        self.watch_metadata = watch_metadata or "GCE_METADATA_HOST" in os.environ
        self.reason: str | None = None
        self._in_main_thread = False
        self._signaled = self._noticed = self._is_cancellable = False
        self._handlers: dict[int, Any] = {}
        self._closed = threading.Event()

    def __enter__(self) -> "PreemptionHandler":
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        if self.watch_metadata:
            threading.Thread(target=watch, args=(self._notice, self._closed), name="maintenance", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Lets a request to stop end the block at once.

        Raises:
            RolloutCancelled: A stop was requested.
        """
        try:
            self._is_cancellable = self.agree is None
            self.check()
            yield
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

    def _handle(self, number: int, _: object) -> None:
        if self._noticed:  # our own signal, to wake the main thread
            self._noticed = False
        elif self._signaled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            self._signaled = True
            self.reason = self.reason or signal.Signals(number).name
        if self._is_cancellable:
            self._is_cancellable = False
            raise RolloutCancelled

    def _notice(self, text: str) -> None:
        self.reason = self.reason or text
        if self._in_main_thread and not self._closed.is_set():
            self._noticed = True
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNALS[0])


@contextmanager
def before_training() -> Iterator[None]:
    """Lets a request to stop end the block, which prepares a run and has nothing to save.

    Raises:
        PreemptedError: A stop was requested; the user has been informed.
    """
    with PreemptionHandler() as stop:
        try:
            with stop.cancellable():
                yield
        except RolloutCancelled:
            message = f"stopped ({stop.reason}) before training started; nothing was saved. Start it again as before"
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
                with urllib.request.urlopen(request, timeout=POLL_S) as response:
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
