"""Stand-ins for the objects of the other process, and the operators that they pass on to it."""

from __future__ import annotations

import operator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "matmul")
BINARY += ("divmod",)
COMPARISONS = ("lt", "le", "gt", "ge")
# Special methods that the other side executes with no operand but the object, and the functions that do so there.
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "round": round,
    "reversed": reversed,
    "enter": lambda value: value.__enter__(),
    "exit": lambda value, *how: value.__exit__(*how),
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
}
OPERATORS: dict[str, Callable[..., Any]] = {
    **CONVERSIONS,
    **{name: getattr(operator, f"__{name}__") for name in (*UNARY, *BINARY[:-1], *COMPARISONS, "eq", "contains")},
    "divmod": divmod,
}
OPERANDS = frozenset({*BINARY, *COMPARISONS})


class StandIn:
    """A stand-in for an object of the other process, which executes all operations there.

    Args:
        peer: The `Peer` that is connected to the other process.
        number: Number of the object there.
        rights: What the tests may do with it (see `test_process`).
    """

    __slots__ = ("__weakref__", "_groupax_number", "_groupax_peer", "_groupax_rights")

    def __init__(self, peer: Any, number: int, rights: str = "") -> None:
        object.__setattr__(self, "_groupax_peer", peer)
        object.__setattr__(self, "_groupax_number", number)
        object.__setattr__(self, "_groupax_rights", rights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._groupax_peer.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_groupax"):
            raise AttributeError(name)
        return self._groupax_peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._groupax_peer.request("setattr", self, name, value)

    def __mro_entries__(self, _bases: Any) -> Any:
        raise TypeError("a class of the other process cannot be extended")

    def __copy__(self) -> Any:
        return self._groupax_peer.request("copy", self)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self._groupax_peer.request("deepcopy", self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn) or other._groupax_peer is not self._groupax_peer:
            return False  # not left to the other side, which would answer yes to everything
        if other._groupax_number == self._groupax_number:
            return True
        return self._groupax_peer.request("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._groupax_peer.request("hash", self)

    def __contains__(self, item: Any) -> bool:
        peer = self._groupax_peer
        return peer.contains(self, item)

    def __iter__(self) -> Any:
        return self._groupax_peer.request("iter", self)

    def __exit__(self, *how: Any) -> bool:
        self._groupax_peer.request("exit", self, None, None, None)
        return False  # no exception of the tests is suppressed

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._groupax_peer.request("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._groupax_peer.request("issubclass", value, self) is True


def _operation(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any) -> Any:
        return self._groupax_peer.operate(self, name, args, is_reflected)

    return method


for _name in {*OPERATORS} - {"eq", "hash", "iter", "contains", "exit"}:
    setattr(StandIn, f"__{_name}__", _operation(_name))
for _name in BINARY:
    setattr(StandIn, f"__r{_name}__", _operation(_name, is_reflected=True))
