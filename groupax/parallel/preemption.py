"""Requests from outside to stop a run: signals and notices of maintenance. Imports no jax.

SIGTERM, SIGINT    the update under way is finished, a rollout is given up; a second one ends the program at once
metadata server    says that a cloud's machine is about to go, some time before it does
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
METADATA_HOST = "metadata.google.internal"  # Google's; GCE_METADATA_HOST names another, as for its own tools
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}  # what the server says while all is well
POLL_S = 5.0


class RolloutCancelled(BaseException):
    """Work that can be done again was given up for a request to stop. No Exception, so that nobody swallows it."""


class PreemptionHandler:
    """Notices requests to stop. As a context it takes the signals, and gives them back at the end.

    Signals need the main thread; in another one there are notices only.

    Args:
        watch_metadata: ask the cloud's metadata server for notices.
        agreed: gives the reason of any of the run's processes for this one's, and is called by all of them at the same
            places; None for a single process. With it a request ends work only at `check`.

    Attributes:
        reason: why the run is to stop; None if it is not.
    """

    def __init__(self, watch_metadata: bool = False, agreed: Callable[[str | None], str | None] | None = None) -> None:
        self.agreed = agreed
        self.watch_metadata = watch_metadata or "GCE_METADATA_HOST" in os.environ
        self.reason: str | None = None
        self._in_main_thread = False
        self._signaled = self._noticed = self._abandonable = False
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
    def abandonable(self) -> Iterator[None]:
        """A request to stop ends the block at once.

        Raises:
            RolloutCancelled: there is one.
        """
        try:
            self._abandonable = self.agreed is None
            self.check()
            yield
        finally:
            self._abandonable = False

    def check(self) -> None:
        """Stop here if that was asked for.

        Raises:
            RolloutCancelled: it was.
        """
        if self.agreed is not None:
            self.reason = self.agreed(self.reason)
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
        if self._abandonable:
            self._abandonable = False
            raise RolloutCancelled

    def _notice(self, text: str) -> None:
        """In the thread that watches."""
        self.reason = self.reason or text
        if self._in_main_thread and not self._closed.is_set():
            self._noticed = True
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNALS[0])


@contextmanager
def before_training() -> Iterator[None]:
    """A request to stop ends the block at once, which prepares a run: there is nothing to save yet.

    Raises:
        PreemptedError: there was one; the user is told.
    """
    with PreemptionHandler() as stop:
        try:
            with stop.abandonable():
                yield
        except RolloutCancelled:
            message = f"stopped ({stop.reason}) before training began; nothing was saved. Start it again as before"
            print(message, file=sys.stderr)
            raise PreemptedError(message) from None


def watch(notice: Callable[[str], None], closed: threading.Event) -> None:
    """Ask the metadata server until it announces that the machine will go, or is not there at all."""
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
