"""Evaluation sets by name. Imports no jax."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ONLY_SET = "eval"  # name of a single evaluation set without a name


def named_sets(dataset: Any) -> dict[str, Any]:
    """Returns evaluation sets by name, given a mapping, such as a `datasets.DatasetDict`, or a single set.

    Raises:
        ValueError: The mapping is empty, or a name is not usable as a file name.
    """
    if not isinstance(dataset, Mapping):
        return {ONLY_SET: dataset}
    if not dataset:
        raise ValueError("eval_dataset is an empty mapping; pass a dataset or a dict of datasets by name")
    for name in dataset:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            raise ValueError(f"the name of an evaluation set may have letters, digits, '_', '-' and '.', got {name!r}")
    return dict(dataset)


def sources_by_name(texts: Sequence[str], only: str | None = None) -> dict[str, str]:
    """Parses NAME=SOURCE, one per evaluation set; a source without a name is named after its last path component.

    Args:
        texts: One text per set.
        only: Name of a single source without a name.

    Raises:
        ValueError: Two sets have the same name.

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
                f"two evaluation sets have the name {name!r}: {sources[name]} and {source}; name them as NAME=SOURCE"
            )
        sources[name] = source
    return named_sets(sources)
