"""Reading of rotary embeddings from `config.json`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from groupax.models.config import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, RopeScaling, YarnRope
from groupax.terminal.printable import short_repr


class Parameters:
    """A table of rotary parameters, each of which must be consumed.

    Args:
        table: `rope_parameters` (transformers 5), `rope_scaling`, or an entry of it for one kind of layer.
        hf: Parsed `config.json`.
    """

    def __init__(self, table: Mapping[str, Any] | None, hf: Mapping[str, Any]) -> None:
        self.left = {key: value for key, value in (table or {}).items() if value is not None}
        self.hf = hf
        named = [self.left.pop(key) for key in ("rope_type", "type") if key in self.left]
        self.kind: str = named[0] if named else "default"

    def take(self, name: str, default: Any = None) -> Any:
        """Consumes an entry and returns it, or the default if there is none.

        Raises:
            ValueError: There is neither an entry nor a default.
        """
        value = self.left.pop(name, default)
        if value is None:
            raise ValueError(f"rope type {self.kind!r} of config.json lacks {name}")
        return value

    @property
    def original_max_positions(self) -> int:
        """Context before scaling."""
        own = self.take("original_max_position_embeddings", self.max_positions)
        return self.hf.get("original_max_position_embeddings") or own

    @property
    def max_positions(self) -> int:
        """Context after scaling."""
        return self.hf.get("max_position_embeddings", 2048)


def read_rope(
    hf: Mapping[str, Any],
    head_dim: int,
    table: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    partial: bool = False,
    interleaved: bool = False,
) -> Rope:
    """Returns the rotary embeddings of `rope_parameters` (transformers 5), or of `rope_theta` and `rope_scaling`.

    Args:
        hf: Parsed `config.json`.
        head_dim: Number of dims of a head of queries and keys.
        table: Parameters to use instead of those of `hf`.
        kinds: The family's own meanings of type names.
        partial: Whether the family may rotate some of a head's dims only.
        interleaved: Whether pairs are adjacent dims.

    Raises:
        ValueError: The type is unknown, an entry is missing or unknown, or the file contradicts itself.
    """
    if table is None:
        table = rope_table(hf)
    parameters = Parameters(table, hf)
    parameters.kind = (kinds or {}).get(parameters.kind, parameters.kind)
    if parameters.kind not in _READERS:
        raise ValueError(
            f"rope type {short_repr(parameters.kind)} is not supported; supported are {', '.join(_READERS)}"
        )
    theta = float(parameters.take("rope_theta", hf.get("rope_theta") or 10_000.0))
    fraction = float(parameters.take("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0))
    if fraction != 1.0 and not partial:
        raise ValueError(
            f"config.json has partial_rotary_factor={fraction}; groupax supports only 1 for {hf['model_type']}"
        )
    dims = int(head_dim * fraction)
    if dims < 2:
        raise ValueError(f"rotary embeddings need at least 2 dims of a head; config.json leaves {dims} of {head_dim}")
    scaling, scale = _READERS[parameters.kind](parameters)
    if parameters.left:
        entries = ", ".join(f"{key}={short_repr(value)}" for key, value in sorted(parameters.left.items()))
        raise ValueError(f"rope type {parameters.kind!r} of config.json has {entries}, which groupax does not apply")
    if isinstance(scaling, LongRope) and {len(scaling.short_factors), len(scaling.long_factors)} != {dims // 2}:
        raise ValueError(
            f"rope type 'longrope' needs {dims // 2} factors, one per pair of dims; config.json has "
            f"{len(scaling.short_factors)} short and {len(scaling.long_factors)} long ones"
        )
    return Rope(theta=theta, dims=dims, scaling=scaling, scale=scale, interleaved=interleaved)


def read_ropes_by_kind(
    hf: Mapping[str, Any], head_dim: int, local_theta: float, full_theta: float
) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of layers with a sliding window, and of the others, which alone may be scaled.

    Args:
        hf: Parsed `config.json`.
        head_dim: Number of dims of a head of queries and keys.
        local_theta, full_theta: Base of either if the file's table does not say.

    Raises:
        ValueError: `rope_parameters` has no entry for either kind of layer, or see `read_rope`.
    """
    table = rope_table(hf) if hf.get("rope_parameters") else None
    if table is None:
        local, full = {"rope_theta": local_theta}, {"rope_theta": full_theta, **(hf.get("rope_scaling") or {})}
        return read_rope(hf, head_dim, local), read_rope(hf, head_dim, full)
    other = sorted(set(table) - {"sliding_attention", "full_attention"})
    if other:
        raise ValueError(
            f"rope_parameters of a {hf['model_type']} model must have the entries sliding_attention and "
            f"full_attention, got {short_repr(other)}"
        )
    local = {"rope_theta": local_theta, **(table.get("sliding_attention") or {})}
    full = {"rope_theta": full_theta, **(table.get("full_attention") or {})}
    return read_rope(hf, head_dim, local), read_rope(hf, head_dim, full)


def rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns `rope_parameters` of a file, or `rope_scaling` of an older one; None without either.

    Args:
        hf: Parsed `config.json`.

    Raises:
        ValueError: Both exist and disagree, in which case transformers silently ignores the former.
    """
    table, scaling = hf.get("rope_parameters"), hf.get("rope_scaling")
    if not table or not scaling:
        return table or scaling
    kind = {"rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}
    others = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    said = {"rope_type": "default", **table}
    if any(said.get(key) != value for key, value in (kind | others).items()):
        raise ValueError(
            f"config.json has rope_scaling={short_repr(scaling)}, but rope_parameters={short_repr(table)}; write the "
            "intended values into rope_parameters, and remove rope_scaling"
        )
    return table


def _default(_: Parameters) -> tuple[None, float]:
    return None, 1.0


def _linear(parameters: Parameters) -> tuple[RopeScaling, float]:
    return LinearRope(parameters.take("factor")), 1.0


def _dynamic(parameters: Parameters) -> tuple[RopeScaling, float]:
    return DynamicRope(parameters.take("factor"), parameters.max_positions), 1.0


def _llama3(parameters: Parameters) -> tuple[RopeScaling, float]:
    factor, low, high = (parameters.take(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3Rope(factor, low, high, parameters.original_max_positions), 1.0


def _yarn(parameters: Parameters) -> tuple[RopeScaling, float]:
    """Reads YaRN; its temperature, 0.1 ln(factor) + 1, scales cosines and sines (arXiv:2309.00071, equation 22)."""
    original, factor = parameters.original_max_positions, parameters.left.pop("factor", None)
    factor = factor or parameters.max_positions / original

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    own, all_dims = (parameters.left.pop(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    scale = temperature(own) / temperature(all_dims) if own and all_dims else temperature(1.0)
    betas = parameters.take("beta_fast", 32.0), parameters.take("beta_slow", 1.0)
    scaling = YarnRope(factor, original, *betas, parameters.take("truncate", True))
    return scaling, parameters.take("attention_factor", scale)


def _long(parameters: Parameters) -> tuple[RopeScaling, float]:
    """Reads LongRoPE, which scales by sqrt(1 + ln(factor) / ln(original)) (released code of arXiv:2402.13753)."""
    original = parameters.original_max_positions
    factor = parameters.take("factor", parameters.max_positions / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (tuple(map(float, parameters.take(name))) for name in ("short_factor", "long_factor"))
    return LongRope(short, long, original), parameters.take("attention_factor", scale)


_READERS: dict[str, Callable[[Parameters], tuple[RopeScaling | None, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
}
