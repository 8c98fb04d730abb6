"""Frozen dataclasses that jax can flatten."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass whose fields are all children of a pytree.

    Unflattening bypasses `__init__`, because jax rebuilds trees with tracers, axis sizes or sentinels in place of
    arrays, none of which passes a check of annotated shapes.
    """
    cls = dataclass(frozen=True)(cls)
    names = tuple(field.name for field in fields(cls))  # pyright: ignore[reportArgumentType]

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in names], None

    def flatten(tree: Any) -> tuple[list[Any], None]:
        return [getattr(tree, name) for name in names], None

    def unflatten(_: None, children: Any) -> T:
        tree = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(tree, name, child)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
