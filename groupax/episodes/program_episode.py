"""The state of a program's run while it is played. Imports no jax."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.branches import SampledTurn
from groupax.episodes.program import Event, ProgramClass, Session
from groupax.episodes.transcript import Templates, Transcript
from groupax.tools.threads import Outcome
from groupax.types import FinishReason


class ProgramEpisode:
    """One run of a program.

    Attributes:
        first: A sequence that is never sampled, with the indices and the randomness of the episode.
        example: Dataset row with the prompt.
        program: The program.
        num_retries: Number of times that it may begin again.
        session: The run, in the process that runs it; None in others, and while all is answered from the record.
        turns: Turns that were sampled.
        events: Events that wait for answers.
        num_heard: Number of reports of events.
        answered: Digests of answers by the number of their request.
        gone: Numbers of requests whose clients have gone.
        counts: Number of times that each prompt was sampled from.
        limit: Limit that it has exceeded.
        cut: Limit of the run that has cut off a turn.
        outcome: Its end; None while it runs.
        reward: Its reward; None for none.
        finish_reason: Reason of its end.
        num_asked: Number of turns that were asked for.
        place: Place for its keys and values between two turns.
    """

    def __init__(
        self, first: Completion, example: Mapping[str, Any], program: ProgramClass, templates: Templates, retries: int
    ) -> None:
        self.first, self.example, self.program, self.num_retries = first, example, program, retries
        self._templates = templates
        self._transcripts: dict[str | None, Transcript] = {}
        self.session: Session | None = None
        self.turns: list[SampledTurn] = []
        self.events: list[Event] = []
        self.num_heard = 0
        self.answered: dict[int, str] = {}
        self.gone: set[int] = set()
        self.counts: Counter[bytes] = Counter()
        self.limit: FinishReason | None = None
        self.cut: FinishReason | None = None
        self.outcome: Outcome | None = None
        self.reward: float | None = None
        self.finish_reason: FinishReason | None = None
        self.num_asked = 0
        self.place = Place(0)

    @property
    def index(self) -> tuple[int, int]:
        """Indices of its prompt and of its sample."""
        return self.first.prompt_index, self.first.sample_index

    def transcript(self, adapter: str | None) -> Transcript:
        """Returns the conversations with an adapter, or with the policy."""
        if adapter not in self._transcripts:
            self._transcripts[adapter] = Transcript(self._templates)
        return self._transcripts[adapter]

    def key(self, prompt: np.ndarray, adapter: str | None = None) -> np.ndarray:
        """Returns the randomness of the next turn after a prompt, which does not depend on what else was asked."""
        digest = prompt.tobytes() + (b"" if adapter is None else adapter.encode())
        content = [np.asarray(self.first.key, np.uint32).tobytes(), digest, str(self.counts[digest]).encode()]
        self.counts[digest] += 1
        hashed = hashlib.blake2b(b"".join(content), digest_size=8).digest()
        return np.frombuffer(hashed, np.uint32)
