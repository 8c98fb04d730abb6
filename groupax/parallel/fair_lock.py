"""Threads that compute on the same devices, one at a time. Imports no jax.

Programs that several devices compute together must reach all of them in one order, which two threads by themselves do
not keep.
"""

import threading
from collections import deque

from groupax.parallel.preemption import RolloutCancelled


class FairLock:
    """A lock for which who has waited longest comes next, and which can be closed."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = self._closed = False

    def __enter__(self) -> None:
        mine = object()
        with self._free:
            self._waiting.append(mine)
            try:
                self._free.wait_for(lambda: self._closed or (not self._taken and self._waiting[0] is mine))
                if self._closed:
                    raise RolloutCancelled
                self._taken = True
            finally:
                self._waiting.remove(mine)
                self._free.notify_all()

    def __exit__(self, *_: object) -> None:
        with self._free:
            self._taken = False
            self._free.notify_all()

    def close(self) -> None:
        """Whoever wants a turn from now on gets a `RolloutCancelled`."""
        with self._free:
            self._closed = True
            self._free.notify_all()
