"""Lines in the log about what strangers do: few, whatever they do, and without control characters of theirs."""

import asyncio
import logging
from collections import Counter

from groupax.terminal.printable import one_line

logger = logging.getLogger(__name__)

FIRST_S = 1.0  # until the first line of a kind, so that what happens together is one line
EVERY_S = 10.0  # between two lines of a kind
MAX_CHARACTERS = 200


class Notices:
    """Counts events by kind and logs each kind at most once in ten seconds; in the thread of an event loop.

    Attributes:
        counts: events of each kind since the start.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._pending: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, detail: str) -> None:
        """Counts one more event.

        Args:
            kind: one of few fixed texts, as "connections closed: too slow".
            detail: of this event; the first one of each line is shown.
        """
        self.counts[kind] += 1
        if kind not in self._pending:
            asyncio.get_running_loop().call_later(EVERY_S if self.counts[kind] > 1 else FIRST_S, self._tell, kind)
        num, first = self._pending.get(kind, (0, detail))
        self._pending[kind] = num + 1, first

    def _tell(self, kind: str) -> None:
        num, first = self._pending.pop(kind)
        logger.warning("groupax serve: %d %s (%s)", num, kind, one_line(first, MAX_CHARACTERS))
