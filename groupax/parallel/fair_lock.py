"""A lock for threads that compute on the same devices. Imports no jax.

Programs that several devices compute together must reach all devices in the same order, which threads without a lock
do not guarantee.
"""

import threading
from collections import deque

from groupax.parallel.preemption import RolloutCancelled


class FairLock:
    """A fair (FIFO) lock that can be closed."""

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
