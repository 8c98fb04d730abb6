"""A trace of some steps, for Perfetto (https://ui.perfetto.dev) or XProf."""

from groupax.events import Emit, Event, Message, StepEnded
from groupax.runs.folder import RunFolder

WARM_UP_STEPS = 2  # which compile


class Profile:
    """A sink that traces `num_steps` steps after the first ones into `profile/` of the run folder; 0 traces none."""

    def __init__(self, folder: RunFolder, num_steps: int, emit: Emit) -> None:
        self.folder, self.num_steps, self.emit = folder, num_steps, emit
        self.first: int | None = None

    def __call__(self, event: Event) -> None:
        """Starts or ends the trace after a step."""
        if not self.num_steps or not isinstance(event, StepEnded):
            return
        if self.first is None and event.step >= WARM_UP_STEPS:
            import jax

            self.first = event.step
            jax.profiler.start_trace(self.folder.path / "profile", create_perfetto_trace=True)
        elif self.first is not None and event.step == self.first + self.num_steps:
            self.emit(Message(f"the trace of {self.num_steps} steps is in {self.folder.uri_of('profile')}"))
            self.close()

    def close(self) -> None:
        """Writes the trace if one is under way."""
        if self.first is not None and self.num_steps:
            import jax

            jax.profiler.stop_trace()
            self.num_steps = 0
