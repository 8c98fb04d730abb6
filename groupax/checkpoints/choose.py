"""Which checkpoint a run continues. Imports no jax beyond what says what a run is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.checkpoints.files import damage
from groupax.checkpoints.identity import Identity, differences, forbidden, told
from groupax.checkpoints.store import PREFIX, LocalStore, RemoteStore, Store, name_of
from groupax.remote import Remote, is_remote

FORMAT = 4  # of `state.json`
Tell = Callable[..., None]  # text, and whether it is a warning


@dataclass(frozen=True, eq=False)
class Saved:
    """A whole checkpoint.

    Attributes:
        step: of the run.
        where: its place, to be told.
        folder: its files, locally.
        state: the contents of its `state.json`.
    """

    step: int
    where: str
    folder: Path
    state: Mapping[str, Any]


def store_of(run: str, scratch: Path) -> Store:
    """The checkpoints of a run by its folder or URL; those in a bucket pass through the local folder `scratch`."""
    return RemoteStore(Remote(run), scratch) if is_remote(run) else LocalStore(Path(run).expanduser() / "checkpoints")


def split_path(path: str) -> tuple[str, int | None]:
    """A run's folder and, if the path is one of its checkpoints, that one's step."""
    head, _, name = path.rstrip("/").rpartition("/")
    number = name.removeprefix(PREFIX)
    if name.startswith(PREFIX) and number.isdigit():
        return head.removesuffix("/checkpoints") if head.endswith("/checkpoints") else str(Path(head).parent), int(
            number
        )
    return path.rstrip("/"), None


def whole_checkpoints(store: Store, tell: Tell) -> Iterator[Saved]:
    """The checkpoints that are whole, newest first. Damaged ones are told of."""
    for step in reversed(store.steps()):
        folder = store.local(step)
        fault = damage(folder)
        if fault is None:
            yield Saved(step, store.where(step), folder, store.state(step))
        else:
            tell(f"the checkpoint {store.where(step)} is damaged and is not used: {fault}", warning=True)


def to_continue(resume: str, output: Store, scratch: Path, identity: Identity, tell: Tell) -> Saved | None:
    """The checkpoint that a run goes on from; None if it begins at its start.

    Args:
        resume: "auto" takes the newest whole checkpoint of the run's own folder if it is of the same run; "never"
            none; a run's folder or checkpoint has that one continued.
        output: the checkpoints in the run's own folder.
        scratch: for downloads.
        identity: of this run.
        tell: takes a text and `warning`.

    Raises:
        ValueError: the checkpoint that `resume` names is not there, damaged, or of a run that cannot be continued with
            this model, tokenizer, data or these settings.
    """
    if resume == "never":
        return None
    if resume == "auto":
        newest = next(whole_checkpoints(output, tell), None)
        return newest if newest is not None and _same_run(newest, identity, tell) else None
    begun = next(whole_checkpoints(output, tell), None)
    if begun is not None and begun.state.get("origin") == resume:  # this run itself, which was stopped
        _check(begun, identity, tell)
        return begun
    run, step = split_path(resume)
    store = store_of(run, scratch)
    if step is not None and step not in store.steps():
        raise ValueError(f"resume: there is no checkpoint {resume}; {_there_are(store, run)}")
    for saved in whole_checkpoints(store, tell):
        if step in (None, saved.step):
            _check(saved, identity, tell)
            return saved
    what = f"the checkpoint {resume} is damaged" if step is not None else f"{run} has no whole checkpoint"
    raise ValueError(f"resume: {what}; {_there_are(store, run)}")


def _same_run(saved: Saved, identity: Identity, tell: Tell) -> bool:
    if not _known_format(saved):
        tell(f"{_other_format(saved)}, so this run begins at its start", warning=True)
        return False
    found = differences(saved.state["identity"], identity)
    if found:
        tell(
            f"the checkpoint {saved.where} is of another run, so this one begins at its start; different are\n"
            f"{told(found)}\nTo continue the earlier run on purpose, set resume to its folder",
            warning=True,
        )
    return not found


def _check(saved: Saved, identity: Identity, tell: Tell) -> None:
    if not _known_format(saved):
        raise ValueError(f"resume: {_other_format(saved)}; its weights are there (groupax checkpoints RUN_DIR export)")
    found = differences(saved.state["identity"], identity)
    refused = forbidden(found)
    if refused:
        raise ValueError(
            f"resume: {saved.where} cannot be continued by this run; different are\n{told(refused)}\nGive the same, or "
            "export the checkpoint (groupax checkpoints RUN_DIR export) and start a new run from that model"
        )
    if found:
        tell(f"{saved.where} is continued with other settings:\n{told(found)}", warning=True)


def _known_format(saved: Saved) -> bool:
    return saved.state.get("format") == FORMAT


def _other_format(saved: Saved) -> str:
    version = saved.state.get("versions", {}).get("groupax")
    return (
        f"the checkpoint {saved.where} has format {saved.state.get('format')}, written by groupax {version}, and this "
        f"groupax reads {FORMAT}"
    )


def _there_are(store: Store, run: str) -> str:
    steps = store.steps()
    return f"{run} has {', '.join(map(name_of, steps))}" if steps else f"{run} has no checkpoints"
