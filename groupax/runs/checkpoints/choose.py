"""Chooses the checkpoint that a run continues."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from groupax.core.storage.buckets import RemoteFolder, is_remote
from groupax.events import Emit, Message
from groupax.runs.checkpoints.fingerprint import Identity, describe, differences, incompatible
from groupax.runs.checkpoints.store import CHECKSUMS, HF, OWN, STATE, LocalStore, RemoteStore, Store, damage

FORMAT = 6  # of `state.json`
# Required entries of a state of that format.
ENTRIES = {"cursor", "devices", "identity", "learner", "log", "metrics_bytes", "model", "rollout", "versions"}


@dataclass(frozen=True, eq=False)
class Saved:
    """A complete checkpoint."""

    step: int  # of the run
    where: str  # path or URL, for messages
    folder: Path  # local folder with its files
    state: Mapping[str, Any]  # content of its `state.json`

    @property
    def location(self) -> str:
        """The URL, or the path from the root."""
        return self.where if is_remote(self.where) else str(Path(self.where).absolute())


class Fault(NamedTuple):
    """Names a checkpoint that cannot be continued with the reason, and says whether it was once complete."""

    text: str
    was_complete: bool


def store_of(run: str, scratch: Path) -> Store:
    """Returns the checkpoints of a run by its folder or URL; `scratch` is a local folder for those in a bucket.

    They are in the folder's `checkpoints/`, or, named as transformers names them, in the folder itself or in the one
    that it is in.
    """
    if is_remote(run):
        return RemoteStore(RemoteFolder(run), scratch)
    folder = Path(run).expanduser()
    if not (folder / "checkpoints").is_dir():
        for place in (folder, folder.resolve().parent) if folder.name == HF.inside else (folder,):
            store = LocalStore(place, HF)
            if store.steps():
                return store
    return LocalStore(folder / "checkpoints")


def split_path(path: str) -> tuple[str, int | None]:
    """Returns the run folder of a path and, if the path is a checkpoint, its step."""
    head, _, name = path.rstrip("/").rpartition("/")
    if (step := HF.step_of(name)) is not None:
        return head or ("/" if path.startswith("/") else "."), step
    if (step := OWN.step_of(name)) is not None:
        return head.removesuffix("/checkpoints") if head.endswith("/checkpoints") else str(Path(head).parent), step
    return path.rstrip("/"), None


def readable_checkpoints(store: Store, faults: dict[int, Fault]) -> Iterator[Saved]:
    """Yields the checkpoints that this groupax can continue, newest first; `faults` receives those of the others."""
    for step in reversed(store.steps()):
        saved = Saved(step, store.where(step), store.local(step), store.state(step))
        damaged = damage(saved.folder)
        text = _unreadable(saved) if damaged is None else f"the checkpoint {saved.where} is damaged: {damaged}"
        if text:
            faults[step] = Fault(text, store.is_atomic or (saved.folder / CHECKSUMS).is_file())
        else:
            yield saved


def to_continue(resume: str, output: Store, scratch: Path, identity: Identity, emit: Emit) -> Saved | None:
    """Returns the checkpoint that a run continues; None if it starts from the beginning.

    Args:
        resume: "auto" for the newest readable checkpoint in the run's own folder, if it is of the same run; "never"
            for none; the path of a run or a checkpoint for that one.
        output: Checkpoints in the run's own folder.
        scratch: Local folder for downloads.
        identity: Identity of this run.
        emit: Receives messages about the choice.

    Raises:
        ValueError: The checkpoint that `resume` names does not exist, is damaged, or is of a run that cannot be
            continued with this model, tokenizer, data or these settings; or no existing checkpoint can be read.
    """
    if resume == "never":
        return None
    faults: dict[int, Fault] = {}
    saved, step = next(readable_checkpoints(output, faults), None), None
    is_restarted = saved is not None and saved.state.get("origin") == resume  # this run, which was stopped
    if resume == "auto" and saved is None and any(fault.was_complete for fault in faults.values()):
        raise ValueError(
            f"this run has checkpoints, but none of them can be continued:\n{_listed(faults)}\nNothing was changed. "
            "Use the groupax that wrote them, or start a new run: with resume='never', which moves this one aside, or "
            "in another output_dir"
        )
    if resume != "auto" and not is_restarted:
        faults.clear()
        saved, step = _named_checkpoint(resume, scratch, faults)
    for fault in faults.values() if step is None else ():
        emit(Message(f"{fault.text}; it is not used", warning=True))
    if saved is None or resume == "auto":
        return saved if saved is not None and _same_run(saved, identity, emit) else None
    _check(saved, identity, emit)
    return saved


def _named_checkpoint(resume: str, scratch: Path, faults: dict[int, Fault]) -> tuple[Saved, int | None]:
    """Returns the checkpoint that `resume` names by its path or that of its run, and its step if it is named too."""
    run, step = split_path(resume)
    store = store_of(run, scratch)
    if step is not None and step not in store.steps():
        raise ValueError(f"resume: there is no checkpoint {resume}; {_there_are(store, run)}")
    found = readable_checkpoints(store, faults)
    if (saved := next((saved for saved in found if step in (None, saved.step)), None)) is not None:
        return saved, step
    if step is not None:
        raise ValueError(f"resume: {faults[step].text}; {_there_are(store, run)}")
    if faults:
        raise ValueError(f"resume: no checkpoint of {run} can be continued:\n{_listed(faults)}")
    raise ValueError(f"resume: {_there_are(store, run)}")


def _listed(faults: Mapping[int, Fault]) -> str:
    return "\n".join(f"  {fault.text}" for fault in faults.values())


def _same_run(saved: Saved, identity: Identity, emit: Emit) -> bool:
    found = differences(saved.state["identity"], identity)
    if found:
        emit(
            Message(
                f"the checkpoint {saved.where} is of another run, so this one starts from the beginning; the "
                f"differences are\n{describe(found)}\nTo continue the earlier run on purpose, set resume to its folder",
                warning=True,
            )
        )
    return not found


def _check(saved: Saved, identity: Identity, emit: Emit) -> None:
    found = differences(saved.state["identity"], identity)
    if refused := incompatible(found):
        raise ValueError(
            f"resume: {saved.where} cannot be continued by this run; the differences are\n{describe(refused)}\nGive "
            "the same, or export the checkpoint (groupax checkpoints RUN_DIR export) and start a new run from it"
        )
    if found:
        emit(Message(f"{saved.where} is continued with other settings:\n{describe(found)}", warning=True))


def _unreadable(saved: Saved) -> str:
    """Returns why this groupax cannot continue an undamaged checkpoint; empty if it can."""
    state = saved.state
    if "format" not in state:
        return f"the checkpoint {saved.where} is damaged: its {STATE} has no format"
    if state["format"] != FORMAT:
        versions = state.get("versions")
        version = versions.get("groupax") if isinstance(versions, Mapping) else None
        return (
            f"the checkpoint {saved.where} has format {state['format']!r}, written by groupax {version}, and this "
            f"groupax reads {FORMAT}; its weights can be exported (groupax checkpoints RUN_DIR export)"
        )
    missing = sorted(ENTRIES - state.keys())
    return f"the checkpoint {saved.where} is damaged: its {STATE} has no {', '.join(missing)}" if missing else ""


def _there_are(store: Store, run: str) -> str:
    steps = store.steps()
    if steps:
        names = ("/".join(store.where(step).split("/")[-2:]) for step in steps)
        return f"the checkpoints of {run} are {', '.join(names)}"
    if isinstance(store, LocalStore) and not store.folder.parent.is_dir():
        return f"there is no run in {run}; a run is named by its output_dir, its checkpoints are RUN/checkpoints/step_N"
    return (
        f"{run} has no checkpoint: nothing was saved there before the run stopped; start the run again from its start"
    )
