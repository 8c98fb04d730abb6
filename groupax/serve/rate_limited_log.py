"""A log of clients' misbehaviour that stays short whatever they do, without their control characters."""

import asyncio
import logging
from collections import Counter

from groupax.terminal.printable import one_line

logger = logging.getLogger(__name__)

FIRST_S = 1.0  # until the first line of a kind, so that simultaneous events share one line
INTERVAL_S = 10.0  # between two lines of a kind
MAX_CHARACTERS = 200


class RateLimitedLog:
    """Counts events by kind and logs each kind at most once in ten seconds. Belongs to the thread of an event loop.

    Attributes:
        counts: Events of each kind since the start.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._pending: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, detail: str) -> None:
        """Counts an event.

        Args:
            kind: One of a few fixed texts, as "connections closed: too slow".
            detail: Description of this event; each line shows the first one.
        """
        self.counts[kind] += 1
        if kind not in self._pending:
            asyncio.get_running_loop().call_later(INTERVAL_S if self.counts[kind] > 1 else FIRST_S, self._write, kind)
        num, first = self._pending.get(kind, (0, detail))
        self._pending[kind] = num + 1, first

    def _write(self, kind: str) -> None:
        num, first = self._pending.pop(kind)
        logger.warning("groupax serve: %d %s (%s)", num, kind, one_line(first, MAX_CHARACTERS))
