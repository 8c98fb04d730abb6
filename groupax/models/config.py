"""The architecture of a decoder-only transformer. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

# Kinds of norms: by the root mean square, the same with weights centered at 0, or by mean and standard deviation.
NormKind = Literal["rms", "zero_centered_rms", "layer"]
# Norms of queries and keys: none, per head with shared weights, per head with separate weights, or over all heads.
QKNorm = Literal["none", "head", "each_head", "all_heads"]
# Activations of feed-forward layers, by Hugging Face's names.
Activation = Literal["silu", "gelu_pytorch_tanh"]
# Norms of a block: before attention and feed-forward, after them, both, or one before the two in parallel.
BlockKind = Literal["pre_norm", "post_norm", "sandwich_norm", "parallel"]


@dataclass(frozen=True)
class LinearRope:
    """Rotary embeddings with all positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """Rotary embeddings whose base grows beyond the original context ("NTK-aware"; see `rope.frequencies`)."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary embeddings with frequency-dependent stretching (Llama 3.1; see `rope.frequencies`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN, which stretches low frequencies, keeps high ones, and has a ramp in between (arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: divisors per frequency, for up to the original context and for longer ones (arXiv:2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embeddings of a layer.

    Attributes:
        theta: Base of the frequencies.
        dims: Number of rotated dims of each head, starting at the first.
        scaling: Method for contexts longer than the original one; None for none.
        scale: Factor of cosines and sines.
        interleaved: Whether pairs are adjacent dims, rather than one of each half.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    Attributes:
        scale: Factor of the products of queries and keys.
        softcap: Scores become softcap tanh(score / softcap); None leaves them unchanged.
        window: Number of positions that a query sees, including its own; None for all up to its own.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of a feed-forward layer.

    Attributes:
        num: Number of experts E.
        per_token: Number of experts per token, chosen by a router's probabilities.
        ffn_size: Hidden size of each expert.
        norm_topk_prob: Whether the router's weights of a token are divided by their sum.
        layers: Indices of the layers with experts; the others have ordinary feed-forward layers.
        aux_loss_coef: Coefficient of the load-balancing loss that the model was trained with.
        router_name, gate_name, up_name, down_name: Names of a layer's weights in a checkpoint; `{expert}` is an index.
    """

    num: int
    per_token: int
    ffn_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]
    aux_loss_coef: float = 0.0
    router_name: str = "mlp.gate"
    gate_name: str = "mlp.experts.{expert}.gate_proj"
    up_name: str = "mlp.experts.{expert}.up_proj"
    down_name: str = "mlp.experts.{expert}.down_proj"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one model. It is hashable, so that a jitted program can be specialized on it.

    Dims: D `hidden_size`, L `num_layers`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
    F `ffn_size`, V `vocab_size`. With `num_labels` the model classifies sequences and has no vocabulary head.

    Attributes:
        max_positions: Length of the longest sequence.
        ropes: Rotary embeddings of each layer; None for a layer without positions.
        windows: Sliding window of each layer; None for a layer that sees all earlier positions.
        attention_scale: Factor of the products of queries and keys.
        attention_softcap, logit_softcap: Scores and logits x become softcap tanh(x / softcap).
        embedding_scale, residual_scale, logit_scale: Factors of embeddings, of each block's output, and of logits.
        experts: Mixture of experts; None for a dense model.
        fused_projections: Whether a checkpoint has queries, keys and values in one tensor, and gate and up in another.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    attention_scale: float
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    block: BlockKind = "pre_norm"
    qk_norm: QKNorm = "none"
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    fused_projections: bool = False
    num_labels: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        for name in ("ropes", "windows"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"config.json lists the kinds of {len(getattr(self, name))} layers, but num_hidden_layers is "
                    f"{self.num_layers}"
                )
        odd = [rope.dims for rope in self.ropes if rope and (rope.dims % 2 or rope.dims > self.head_dim)]
        if odd:
            raise ValueError(
                f"rotary embeddings need an even number of dims, at most head_dim, got {odd[0]} of {self.head_dim} dims"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"a sliding window must be at least 1, got {self.windows}")
        if self.experts and not 1 <= self.experts.per_token <= self.experts.num:
            raise ValueError(
                f"experts per token must be between 1 and {self.experts.num}, got {self.experts.per_token}"
            )

    def attention(self, layer: int) -> AttentionConfig:
        """Returns the attention of a layer."""
        return AttentionConfig(self.attention_scale, self.attention_softcap, self.windows[layer])

    def first_similar_layer(self, layer: int) -> int:
        """Returns the first layer of the same kind."""
        kinds = [
            (rope, window, self.has_experts(i))
            for i, (rope, window) in enumerate(zip(self.ropes, self.windows, strict=True))
        ]
        return kinds.index(kinds[layer])

    @property
    def hidden_scale(self) -> float:
        """Factor of the last hidden states, which scales the logits."""
        return 1.0 if self.num_labels else self.logit_scale

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers
