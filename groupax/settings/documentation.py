"""Descriptions of settings, read from the docstrings below the fields of dataclasses. Imports no jax."""

import ast
import functools
import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from typing import Any

_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.:;]\s+(?=[A-Z0-9\"(])")


@functools.cache
def descriptions(record: type) -> dict[str, str]:
    """Returns the descriptions of the fields of a dataclass, inherited ones included, each as one line."""
    found: dict[str, str] = {}
    for each in reversed(record.__mro__):
        if is_dataclass(each):
            found |= _class_descriptions(each.__module__).get(each.__qualname__, {})
    return {each.name: found[each.name] for each in fields(record) if each.name in found}


def first_sentence(text: str) -> str:
    """Returns the first sentence of a description, without its full stop."""
    return _SENTENCE_END.split(text, maxsplit=1)[0].rstrip(".")


def parts(record: Any) -> list[type]:
    """Returns the dataclasses that a dataclass directly inherits, in the order of their fields."""
    bases = record.__bases__ if isinstance(record, type) and is_dataclass(record) else ()
    return [base for base in reversed(bases) if is_dataclass(base)]


def title(part: type) -> str:
    """Returns "learning_rate" for LearningRateSettings."""
    return re.sub("(?<!^)(?=[A-Z])", "_", part.__name__.removesuffix("Settings")).lower()


@functools.cache
def _class_descriptions(module: str) -> dict[str, dict[str, str]]:
    """Returns the descriptions of the fields of the classes at the top of a module, by class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _field_descriptions(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_descriptions(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for first, second in zip(node.body, node.body[1:], strict=False):
        if not isinstance(first, ast.AnnAssign) or not isinstance(first.target, ast.Name):
            continue
        if isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant):
            found[first.target.id] = " ".join(str(second.value.value).split())
    return found
