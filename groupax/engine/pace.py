"""The number of tokens of a chunk where somebody waits for them, chosen by time.

Short chunks return tokens sooner and let requests join sooner; each chunk costs time of the host. A chunk therefore
takes about MIN_CHUNK_S, or longer where the host needs more than HOST_FRAC of its time.
"""

MIN_CHUNK_S = 0.025
HOST_FRAC = 0.1
MAX_HOST_S = 0.1  # longer times are those of something else, for example of new arrays
SMOOTHING = 0.25  # weight of the newest time of the host


class Pace:
    """Chooses the length of each chunk by the time that previous ones have taken.

    Args:
        max_steps: Maximum number of steps of a chunk.

    Attributes:
        num_steps: Number of steps of the next chunk.
        host_s: Mean time of the host between two chunks.
        device_s: Time of the last chunk and of the admission before it.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.num_steps = 1
        self.host_s = self.device_s = 0.0

    def add_chunk(self, num_steps: int, seconds: float, admission_s: float) -> None:
        """Chooses the next number of steps.

        Args:
            num_steps: Number of steps that the last chunk took.
            seconds: Its time.
            admission_s: Time for which it waited for an admission.
        """
        self.device_s = admission_s + seconds
        if num_steps:
            self.num_steps = steps_in(self.target_s, seconds / num_steps, min(2 * self.num_steps, self.max_steps))

    def add_host(self, seconds: float) -> None:
        """Adds the time of the host between two chunks."""
        self.host_s += SMOOTHING * (min(seconds, MAX_HOST_S) - self.host_s)

    @property
    def target_s(self) -> float:
        """Time that a chunk may take."""
        return max(MIN_CHUNK_S, self.host_s / HOST_FRAC)


def steps_in(seconds: float, step_s: float, most: int) -> int:
    """Returns the number of steps that take this time, at least one.

    Args:
        seconds: The time.
        step_s: Time of a step.
        most: Maximum number of steps.
    """
    return max(1, min(most, int(seconds / max(step_s, 1e-9))))
