"""Errors that end a run through no fault of its settings, and those of missing packages. Imports nothing of groupax."""

import importlib
import importlib.util

# The modules of each extra, which are imported where they are needed.
EXTRAS = {
    "constraints": ("llguidance",),
    "gcs": ("gcsfs",),
    "math": ("math_verify",),
    "mcp": ("mcp",),
    "openenv": ("websockets",),
    "s3": ("s3fs",),
    "serve": ("llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    "tensorboard": ("tensorboardX",),
    "trackio": ("trackio",),
    "view": ("starlette", "tokenizers", "uvicorn"),
    "vision": ("PIL",),
    "wandb": ("wandb",),
}


class RunError(RuntimeError):
    """An error that ends a run; the message says why and what to do."""


class InfrastructureError(RuntimeError):
    """A tool or an environment cannot answer, through no fault of the model's.

    Tools and environments may raise it. The episode is then left out of its group's comparison and of the loss, where
    any other exception of a tool becomes a result that the model reads.
    """


class MissingPackageError(ImportError, ValueError):
    """A package of an extra is not installed, or cannot be imported."""


class DivergedError(RunError):
    """Too many consecutive updates were not finite."""


class RewardError(RunError):
    """A reward function failed, and the settings ask that the run stops then."""


PREEMPTED = 75  # exit status: stopped from outside, to be started again (EX_TEMPFAIL of sysexits.h)


def require(extra: str, user: str, is_imported: bool = True) -> None:
    """Raises a MissingPackageError that names their user if packages of an extra are not installed, or not importable.

    `is_imported=False` only looks for packages, which may take seconds to import.
    """
    faults = []
    for module in EXTRAS[extra]:
        try:
            if is_imported:
                importlib.import_module(module)
            elif importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}")
        except (ImportError, ValueError) as error:
            faults.append(" ".join(str(error).split()))
    if faults:
        raise MissingPackageError(
            f"{user} needs further packages: pip install 'groupax[{extra}]' ({', '.join(faults)})"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that the memory of the devices or of the host is full."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


class PreemptedError(SystemExit):
    """The run was asked to stop and has saved its state. A program that does not catch this exits with status 75."""

    def __init__(self, message: str) -> None:
        super().__init__(PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message


def raised_outside(error: BaseException) -> bool:
    """Returns whether an error comes from other code than ours, so that its traceback helps."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and not frame.tb_frame.f_globals.get("__name__", "").startswith("groupax")
