"""Saving models into folders that may hold other files."""

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from groupax.compat.fields import warn
from groupax.models.weights.saving import source_folders
from groupax.parallel import processes
from groupax.storage.replacing import check_disjoint, is_replaceable, merge_into_folder


def save_policy(trainer: Any, folder: Any) -> None:
    """Saves a native trainer's current policy into a folder that may hold other files, even the run's own folder.

    All processes must call this; the primary process writes.
    """
    own = trainer.run_folder.path
    if Path(folder).resolve() == own.resolve():
        warn(f"{folder} is the run's folder, which has its own config.json; the model is saved in {own / 'model'}")
        trainer.save_model()
        return
    check_disjoint(Path(folder), source_folders(trainer.model))
    if processes.run_on_primary(lambda: is_replaceable(Path(folder))):
        trainer.save_model(folder)
        return
    with tempfile.TemporaryDirectory() as name:
        saved = trainer.save_model(Path(name) / "model")
        processes.run_on_primary(lambda: merge_into_folder(saved, Path(folder)))


def save_into(save: Callable[[Path], Any], folder: Any, sources: Collection[Path] = ()) -> None:
    """Saves into a folder and keeps the other files in it.

    Raises:
        ForeignFilesError: The folder holds files of a model that groupax did not write.
        ValueError: The folder is, contains or is inside one of the sources.
    """
    check_disjoint(Path(folder), sources)
    if is_replaceable(Path(folder)):
        save(Path(folder))
        return
    with tempfile.TemporaryDirectory() as name:
        save(Path(name) / "model")
        merge_into_folder(Path(name) / "model", Path(folder))
