"""A trace of some steps, for Perfetto (https://ui.perfetto.dev) or XProf."""

from pathlib import Path

WARM_UP_STEPS = 2  # which compile


class Profile:
    """Traces `num_steps` steps after the first ones into `folder`; with 0 it does nothing."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.folder, self.num_steps = folder, num_steps
        self.first: int | None = None

    def step_ended(self, step: int) -> bool:
        """To be called after each step; returns whether the trace has just been written."""
        if not self.num_steps:
            return False
        import jax

        if self.first is None and step >= WARM_UP_STEPS:
            self.first = step
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
        elif self.first is not None and step == self.first + self.num_steps:
            self.close()
            return True
        return False

    def close(self) -> None:
        """Write what there is, if a trace is under way."""
        if self.first is not None and self.num_steps:
            import jax

            jax.profiler.stop_trace()
            self.num_steps = 0
