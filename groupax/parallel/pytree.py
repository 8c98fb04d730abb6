"""Frozen dataclasses that jax can flatten."""

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static() -> Any:
    """Returns a field of a `pytree` that is part of its structure, which programs are compiled for, not a child."""
    return field(metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass whose fields, except those that are `static`, are the children of a pytree.

    Unflattening bypasses `__init__`, because jax rebuilds trees with tracers, axis sizes or sentinels in place of
    arrays, none of which passes a check of annotated shapes.
    """
    cls = dataclass(frozen=True)(cls)
    declared = fields(cls)  # pyright: ignore[reportArgumentType]
    names = tuple(each.name for each in declared if "static" not in each.metadata)
    static_names = tuple(each.name for each in declared if "static" in each.metadata)

    def flatten(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(tree, name) for name in names], tuple(getattr(tree, name) for name in static_names)

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, structure = flatten(tree)
        return list(zip(map(jax.tree_util.GetAttrKey, names), children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Any) -> T:
        tree = object.__new__(cls)
        for name, child in zip((*names, *static_names), (*children, *structure), strict=True):
            object.__setattr__(tree, name, child)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
