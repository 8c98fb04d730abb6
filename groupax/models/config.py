"""What a decoder-only transformer is, in numbers. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

# How a row of numbers is normalized: by its root mean square, the same with weights around 0, or by mean and deviation.
NormKind = Literal["rms", "zero_centered_rms", "layer"]
# What queries and keys are normalized over: nothing, each head with weights for all, each with its own, or all at once.
QKNorm = Literal["none", "head", "each_head", "all_heads"]
# The function within the feed-forward part, by Hugging Face's name.
Activation = Literal["silu", "gelu_pytorch_tanh"]
# Where a block has norms: before attention and feed-forward, behind them, both, or once before the two side by side.
BlockKind = Literal["pre_norm", "post_norm", "sandwich_norm", "parallel"]


@dataclass(frozen=True)
class LinearRope:
    """All positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """The base grows with the context beyond the original one ("NTK-aware"; see `rope.frequencies`)."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency-dependent stretching of rotary embeddings (Llama 3.1; see `rope.frequencies`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRope:
    """Slow pairs are stretched, fast ones kept, with a ramp between them (arXiv:2309.00071; see `rope.frequencies`)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """A divisor for each pair, one set up to the original context and one for models of longer sequences
    (arXiv:2402.13753).
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embeddings of a layer.

    Attributes:
        theta: base of the frequencies.
        dims: of each head that turn, from the first on.
        scaling: for contexts longer than the original one; None for none.
        scale: multiplies cosines and sines.
        interleaved: neighbouring dims are a pair, instead of one of the first half and one of the second.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """How a layer attends.

    Attributes:
        scale: multiplies the products of queries and keys.
        softcap: scores become softcap tanh(score / softcap); None leaves them.
        window: a query sees so many positions, its own included; None for all up to its own.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward part.

    Attributes:
        num: E, of which each token goes through `per_token`, by the probabilities of a router.
        per_token: experts of a token.
        ffn_size: of each.
        norm_topk_prob: a token's weights are divided by their sum.
        layers: those with experts; the others have an ordinary feed-forward part.
        aux_loss_coef: weight of the load-balancing loss that the model was trained with.
        router_name, gate_name, up_name, down_name: of the weights in a layer of a checkpoint; `{expert}` is a number.
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
    """The architecture of one model: hashable, so a jitted program can be specialized on it.

    Dims: D `hidden_size`, L `num_layers`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
    F `ffn_size`, V `vocab_size`. With `num_labels` the model classifies sequences and has no vocabulary head.

    Attributes:
        max_positions: the longest sequence.
        ropes: of each layer; None where positions do not enter.
        windows: of each layer; None where it sees everything before.
        attention_scale: multiplies the products of queries and keys.
        attention_softcap, logit_softcap: x becomes softcap tanh(x / softcap), of scores and of logits.
        embedding_scale, residual_scale, logit_scale: multiply embeddings, what a part adds, and logits.
        experts: a mixture of experts; None for none.
        fused_projections: the checkpoint has queries, keys and values in one tensor, and gate and up in another.
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
                    f"config.json speaks of {len(getattr(self, name))} layers where it lists their kinds, and of "
                    f"{self.num_layers} in num_hidden_layers"
                )
        odd = [rope.dims for rope in self.ropes if rope and (rope.dims % 2 or rope.dims > self.head_dim)]
        if odd:
            raise ValueError(
                f"rotary embeddings need an even head_dim or part of it, got {odd[0]} of {self.head_dim} dims"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"a sliding window must be at least 1, got {self.windows}")
        if self.experts and not 1 <= self.experts.per_token <= self.experts.num:
            raise ValueError(f"a token goes through 1 to {self.experts.num} experts, got {self.experts.per_token}")

    def attention(self, layer: int) -> AttentionConfig:
        """How this layer attends."""
        return AttentionConfig(self.attention_scale, self.attention_softcap, self.windows[layer])

    def first_similar_layer(self, layer: int) -> int:
        """The first layer of the same kind."""
        kinds = [
            (rope, window, self.has_experts(i))
            for i, (rope, window) in enumerate(zip(self.ropes, self.windows, strict=True))
        ]
        return kinds.index(kinds[layer])

    @property
    def hidden_scale(self) -> float:
        """The factor of the last hidden states, which scales the logits."""
        return 1.0 if self.num_labels else self.logit_scale

    def has_experts(self, layer: int) -> bool:
        """Whether this layer is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers
