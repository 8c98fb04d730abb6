"""The architecture of a decoder-only transformer. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.models.vision.config import VisionConfig

# Kinds of norms: by the root mean square, the same with weights centered at 0, or by mean and standard deviation.
NormKind = Literal["rms", "zero_centered_rms", "layer"]
# Norms of queries and keys: none, per head with shared weights, per head with separate weights, or over all heads.
QKNorm = Literal["none", "head", "each_head", "all_heads"]
# Activations of feed-forward layers, by Hugging Face's names.
Activation = Literal["silu", "gelu_pytorch_tanh"]
# Norms of a block: before attention and feed-forward, after them, both, or one before the two in parallel.
BlockKind = Literal["pre_norm", "post_norm", "sandwich_norm", "parallel"]
# Scores of experts: a softmax over all of them, or the sigmoid of each one's logit.
ExpertScores = Literal["softmax", "sigmoid"]


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
        sections: Number of pairs that turn with each coordinate (frame, row, column) of a position in an image; None if
            positions are numbers. The pairs of a row and of a column are every third one, from the second and the third
            pair on; the others are the frame's.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None
    scale: float = 1.0
    interleaved: bool = False
    sections: tuple[int, int, int] | None = None


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


@dataclass(frozen=True)
class QueryGrowth:
    """Queries that grow with their position p, by the factor 1 + slope ln(1 + floor(p / period)).

    Attributes:
        slope: Slope of the growth; 0 for none.
        period: Number of positions with the same factor, usually the context before it was extended.
    """

    slope: float
    period: int


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values are linear functions of a latent vector per token (arXiv:2405.04434, 2.1).

    Attributes:
        query_rank: Dims of the queries' latent vectors; None if queries are computed directly.
        rank: Dims of the latent vectors of keys and values.
        plain_dims: Dims of each head's queries and keys without rotary embeddings.
        rope_dims: Further dims of them with rotary embeddings, in which all heads have the same keys.
        value_dims: Dims of each head's values.
        norm_eps: Epsilon of the norms of latent vectors.
    """

    query_rank: int | None
    rank: int
    plain_dims: int
    rope_dims: int
    value_dims: int
    norm_eps: float = 1e-6

    @property
    def expanded_dims(self) -> int:
        """Dims of a head in which its queries, keys and values all fit."""
        return max(self.plain_dims + self.rope_dims, self.value_dims)

    @property
    def cached_dims(self) -> int:
        """Dims of the one head of keys and values that a cache holds for all heads."""
        return self.rank + self.rope_dims


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of a feed-forward layer.

    Attributes:
        num: Number of experts E.
        per_token: Number of experts per token, chosen by a router's scores.
        ffn_size: Hidden size of each expert.
        norm_topk_prob: Whether the router's weights of a token are divided by their sum.
        layers: Indices of the layers with experts; the others have ordinary feed-forward layers.
        aux_loss_coef: Coefficient of the load-balancing loss that the model was trained with.
        scores: How the router's logits become scores.
        scale: Factor of the router's weights.
        has_correction: Whether each expert has a bias that is added to its score for the choice only, and not trained.
        num_groups: Number of groups of neighbouring experts.
        groups_per_token: Number of groups that a token's experts are chosen from.
        shared_ffn_size: Hidden size of the feed-forward layer that every token goes through besides; 0 for none.
        router_name, gate_name, up_name, down_name: Names of a layer's weights in a checkpoint; `{expert}` is an index.
    """

    num: int
    per_token: int
    ffn_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]
    aux_loss_coef: float = 0.0
    scores: ExpertScores = "softmax"
    scale: float = 1.0
    has_correction: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    shared_ffn_size: int = 0
    router_name: str = "mlp.gate"
    gate_name: str = "mlp.experts.{expert}.gate_proj"
    up_name: str = "mlp.experts.{expert}.up_proj"
    down_name: str = "mlp.experts.{expert}.down_proj"

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num:
            raise ValueError(f"experts per token must be between 1 and {self.num}, got {self.per_token}")
        if self.num % self.num_groups or not 1 <= self.groups_per_token <= self.num_groups:
            raise ValueError(
                f"{self.num} experts must be divisible into groups, from 1 or more of which a token chooses; "
                f"config.json has {self.num_groups} groups, {self.groups_per_token} per token"
            )
        if self.num_groups > 1 and self.num < 2 * self.num_groups:
            raise ValueError(f"groups need two experts each, got {self.num} experts in {self.num_groups} groups")
        if self.per_token > self.groups_per_token * (self.num // self.num_groups):
            raise ValueError(
                f"{self.groups_per_token} of {self.num_groups} groups have fewer than the {self.per_token} experts per "
                f"token, as there are {self.num} experts in all"
            )


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
        query_growth: Growth of the queries with their position; None for none.
        latent: Latent attention; then a cache has one head of keys and values. None for ordinary attention.
        attention_softcap, logit_softcap: Scores and logits x become softcap tanh(x / softcap).
        embedding_scale, residual_scale, logit_scale: Factors of embeddings, of each block's output, and of logits.
        experts: Mixture of experts; None for a dense model.
        norm_names: Names of norms in a checkpoint, by ours, where they are not those of most families.
        fused_qkv: Whether a checkpoint has queries, keys and values in one tensor.
        fused_gate_up: Whether a checkpoint has the two matrices of a feed-forward layer's hidden size in one tensor.
        vision: The part that sees images; None for a model of text.
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
    query_growth: QueryGrowth | None = None
    latent: LatentAttention | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    norm_names: tuple[tuple[str, str], ...] = ()
    fused_qkv: bool = False
    fused_gate_up: bool = False
    num_labels: int = 0
    vision: VisionConfig | None = None

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
    def prefix(self) -> str:
        """Prefix of the decoder's weights in a checkpoint."""
        return self.vision.text_prefix if self.vision else "model."

    @property
    def num_feature_levels(self) -> int:
        """Number of features of each image token (see `VisionConfig.num_levels`); 0 for a model of text."""
        return self.vision.num_levels if self.vision else 0

    @property
    def update_heads(self) -> tuple[int, int]:
        """Number of heads of keys and values, and dims of each head, where attention uses no cache."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim
        return self.num_heads, self.latent.expanded_dims

    @property
    def hidden_scale(self) -> float:
        """Factor of the last hidden states, which scales the logits."""
        return 1.0 if self.num_labels else self.logit_scale

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers
