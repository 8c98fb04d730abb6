"""The results of a run that trains several adapters: a folder in PEFT's format for each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupax.models.adapted import apply_adapter
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import save_adapter


def result_folders(folder: Path, adapters: Sequence[str]) -> list[Path]:
    """Returns the folders of a run's results: the given one, or one in it for each of several adapters."""
    return [folder / name for name in adapters] or [folder]


def adapter_models(model: Model, trained: Mapping[str, Params]) -> dict[str, Model]:
    """Returns adapters as models, by their names.

    Args:
        model: Base with an adapter of the same settings.
        trained: Trained weights of each adapter.
    """
    assert model.adapter is not None, "the model has an adapter"
    adapters = {name: replace(model.adapter, trained=params) for name, params in trained.items()}
    return {
        name: replace(model, params=apply_adapter(each.frozen, each.trained), adapter=each)
        for name, each in adapters.items()
    }


def save_adapters(model: Model, trained: Mapping[str, Params], folder: Path, tokenizer: Any, card: str) -> Path:
    """Writes each adapter into a folder of its name, and returns the folder around them.

    Args:
        model: Base with an adapter of the same settings.
        trained: Trained weights of each adapter.
        folder: Folder to write into.
        tokenizer: Tokenizer to save with each.
        card: Text of the `README.md` of each.
    """
    for name, each in adapter_models(model, trained).items():
        save_adapter(each, folder / name, tokenizer, card)
    return folder
