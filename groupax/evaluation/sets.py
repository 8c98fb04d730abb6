"""Evaluation sets by name. Imports no jax."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ONLY_SET = "eval"  # the name of an evaluation set that was given without one


def named_sets(dataset: Any) -> dict[str, Any]:
    """Evaluation sets by name: a mapping of them, such as a `datasets.DatasetDict`, or a single one.

    Raises:
        ValueError: there is none, or a name cannot be that of a file.
    """
    if not isinstance(dataset, Mapping):
        return {ONLY_SET: dataset}
    if not dataset:
        raise ValueError("eval_dataset is a mapping without a set; give a dataset or a dict of them by name")
    for name in dataset:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            raise ValueError(f"an evaluation set's name has letters, digits, '_', '-' and '.', got {name!r}")
    return dict(dataset)


def sources_by_name(texts: Sequence[str], only: str | None = None) -> dict[str, str]:
    """Where sets are to be read from, of texts NAME=SOURCE; a source without a name is called after its last part.

    Args:
        texts: one per set.
        only: what a single source without a name is called.

    Raises:
        ValueError: two sets have one name.

    Example:
        >>> sources_by_name(["data/gsm8k", "hard=data/math500/test.jsonl"])
        {'gsm8k': 'data/gsm8k', 'hard': 'data/math500/test.jsonl'}
    """
    sources: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or "/" in name:
            name, source = (only if only and len(texts) == 1 else Path(text).stem), text
        if name in sources:
            raise ValueError(
                f"two evaluation sets are called {name!r}: {sources[name]} and {source}; name them, NAME=SOURCE"
            )
        sources[name] = source
    return named_sets(sources)
