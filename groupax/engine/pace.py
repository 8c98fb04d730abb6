"""The times between two visits to the host where somebody waits for tokens: steps of a chunk, prompts of an admission.

Short chunks return tokens sooner and let requests join sooner; each chunk costs time of the host. An admission and the
chunk after it therefore take about MIN_CHUNK_S together, or longer where the host needs more than HOST_FRAC of its
time. Prompts that have to wait for the next admission leave the device to those that are decoded, which get at least
one token for about every ADMISSION_STEPS steps' time of admissions.
"""

from groupax.engine.plan import CacheShape

MIN_CHUNK_S = 0.025
HOST_FRAC = 0.1
MAX_HOST_S = 0.1  # longer times are those of something else, for example of new arrays
SMOOTHING = 0.25  # weight of the newest time of the host
ADMISSION_STEPS = 4


class Pace:
    """Chooses the lengths of chunks and of admissions by the time that previous ones have taken.

    Args:
        max_steps: Maximum number of steps of a chunk.

    Attributes:
        host_s: Mean time of the host between two chunks.
        device_s: Time of the last chunk and of the admission before it.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.host_s = self.device_s = 0.0
        self._step_s: dict[CacheShape, float] = {}
        self._prompt_s = self._admission_s = 0.0

    def num_steps(self, shape: CacheShape) -> int:
        """Returns the number of steps of the next chunk: one for a shape that has had none.

        Args:
            shape: Shape of the cache.
        """
        if shape not in self._step_s:
            return 1
        return times_in(self.target_s - self._admission_s, self._step_s[shape], self.max_steps)

    def num_prompts(self, shape: CacheShape, most: int) -> int:
        """Returns the maximum number of prompts of the next admission.

        Args:
            shape: Shape of the cache.
            most: Number of prompts that an admission may have.
        """
        return times_in(max(self.target_s, ADMISSION_STEPS * self._step_s.get(shape, 0.0)), self._prompt_s, most)

    def add_admission(self, num_prompts: int, seconds: float) -> None:
        """Adds the time of the admission before the next chunk.

        Args:
            num_prompts: Number of prompts that were computed.
            seconds: Their time.
        """
        self._prompt_s, self._admission_s = seconds / num_prompts, seconds

    def add_chunk(self, shape: CacheShape, num_steps: int, seconds: float) -> None:
        """Adds the time of a chunk.

        Args:
            shape: Shape of the cache.
            num_steps: Number of steps that the chunk took.
            seconds: Its time.
        """
        self.device_s, self._admission_s = self._admission_s + seconds, 0.0
        if num_steps:
            self._step_s[shape] = seconds / num_steps

    def add_host(self, seconds: float) -> None:
        """Adds the time of the host between two chunks."""
        self.host_s += SMOOTHING * (min(seconds, MAX_HOST_S) - self.host_s)

    @property
    def target_s(self) -> float:
        """Time that an admission and a chunk may take together."""
        return max(MIN_CHUNK_S, self.host_s / HOST_FRAC)


def times_in(seconds: float, each_s: float, most: int) -> int:
    """Returns how many of these take about this time, at least one.

    Args:
        seconds: The time.
        each_s: Time of each.
        most: Maximum number.
    """
    return max(1, min(most, round(seconds / max(each_s, 1e-9))))
