"""The architecture of a decoder-only transformer. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.models.vision.config import VisionConfig

# Kinds of norms: by the root mean square, or by mean and standard deviation, either also with weights centered at 0.
NormKind = Literal["rms", "zero_centered_rms", "layer", "zero_centered_layer"]
# Norms of queries and keys: none, per head with shared weights, per head with separate weights, over all heads, or per
# head without weights or with shared ones, after rotary embeddings; the former only in layers that have these.
QKNorm = Literal["none", "head", "each_head", "all_heads", "after_rope", "head_after_rope"]
# Activations of feed-forward layers, by Hugging Face's names.
Activation = Literal["silu", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu2"]
# Norms of a block: before attention and feed-forward, after them, both, or, of the two in parallel, one before both or
# one before each.
BlockKind = Literal["pre_norm", "post_norm", "sandwich_norm", "parallel", "parallel_norms"]
# How one matrix has the queries, keys and values of all heads: those of a head together, or all queries first.
JointQKV = Literal["by_head", "by_kind"]
# Scores of experts: a softmax over all of them, or the sigmoid of each one's logit.
ExpertScores = Literal["softmax", "sigmoid"]
# How a checkpoint has the two matrices of a hidden size in one tensor: as halves, or with a column of each in turn.
FusedExperts = Literal["halves", "alternating"]


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
            positions are numbers.
        mixed_sections: Whether the pairs of a row and of a column are every third one, from the second and the third
            pair on, and the others the frame's; otherwise those of a coordinate follow each other.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None
    scale: float = 1.0
    interleaved: bool = False
    sections: tuple[int, int, int] | None = None
    mixed_sections: bool = True


@dataclass(frozen=True)
class ClampedSwiglu:
    """The gated activation (up + 1) gate sigmoid(alpha gate) of a gate of at most `limit`, and up within +- `limit`.

    Source: gpt-oss's released model code.
    """

    alpha: float
    limit: float


# Gated activations: an activation of the gate times the other factor, or one of both together.
GatedActivation = Activation | ClampedSwiglu


@dataclass(frozen=True)
class Chunks:
    """The window of a query that sees its own chunk only, as sequences are cut into chunks of `size` positions."""

    size: int


# Number of positions that a query sees, including its own, or its chunk; None for all positions up to its own.
Window = int | Chunks | None


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    Attributes:
        scale: Factor of the products of queries and keys.
        softcap: Scores become softcap tanh(score / softcap); None leaves them unchanged.
        window: Positions that a query sees (see `Window`).
    """

    scale: float
    softcap: float | None = None
    window: Window = None


@dataclass(frozen=True)
class QueryGrowth:
    """Queries that grow with their position p, by the factor 1 + slope ln(1 + floor((p + offset) / period)).

    Attributes:
        slope: Slope of the growth; 0 for none.
        period: Number of positions with the same factor, usually the context before it was extended.
        offset: Number that is added to positions.
        only_without_rope: Whether only the layers without rotary embeddings have it.
    """

    slope: float
    period: int
    offset: int = 0
    only_without_rope: bool = False


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
class ShortConvolution:
    """Gated causal convolutions over few tokens (LFM2), in place of attention.

    Attributes:
        layers: Indices of the layers that have them.
        size: Number of tokens that a convolution sees, the newest one included.
        has_bias: Whether the convolution and the matrices before and after it have biases.
    """

    layers: tuple[int, ...]
    size: int
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention with a memory that the gated delta rule updates (arXiv:2412.06464), in place of attention.

    Attributes:
        layers: Indices of the layers that have it.
        size: Number of tokens that the convolution of queries, keys and values sees, the newest one included.
        num_key_heads: Number of heads of queries and keys, each for as many neighbouring heads of values.
        num_value_heads: Number of heads of values, each of which has a memory.
        key_dims, value_dims: Dims of each head.
        fused: Whether a checkpoint has the matrices of queries, keys, values and output gates in one tensor, head by
            head of the keys, and so those of the two gates of the memory.
    """

    layers: tuple[int, ...]
    size: int
    num_key_heads: int
    num_value_heads: int
    key_dims: int
    value_dims: int
    fused: bool = False

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"the value heads of linear attention must be a multiple of its key heads, got {self.num_value_heads} "
                f"and {self.num_key_heads}"
            )

    @property
    def mixed_dims(self) -> int:
        """Dims of all heads of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dims + self.num_value_heads * self.value_dims


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
        weighs_inputs: Whether the router's weights multiply the inputs of experts, rather than their outputs.
        has_bias: Whether the router and the matrices of experts have biases.
        fused: Whether and how a checkpoint has `gate_name` and `up_name` in one tensor [E, D, 2 F], which both of these
            name, and the third matrix of all experts in another one, [E, F, D]; None for a tensor per matrix.
        fused_is_transposed: Whether such tensors are as above; otherwise they are [E, 2 F, D] and [E, D, F].
        squares_are_kept: Whether such a tensor has its last two dims in the other order, [E, 2 F, D] or [E, D, F], if
            they are equal, as its other readers assume, who tell the order by the shape.
        has_shared_gate: Whether the output of that layer is multiplied by the sigmoid of a logit per token.
        sum_eps: Number that is added to the sum of sigmoids that the router's weights are divided by.
        router_name, gate_name, up_name, down_name: Names of a layer's weights in a checkpoint; `{expert}` is an index.
        correction_name, shared_name: Names of the correction and of the layer for every token.
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
    weighs_inputs: bool = False
    has_bias: bool = False
    fused: FusedExperts | None = None
    fused_is_transposed: bool = True
    squares_are_kept: bool = False
    has_shared_gate: bool = False
    sum_eps: float = 1e-20
    router_name: str = "mlp.gate"
    gate_name: str = "mlp.experts.{expert}.gate_proj"
    up_name: str = "mlp.experts.{expert}.up_proj"
    down_name: str = "mlp.experts.{expert}.down_proj"
    correction_name: str = "mlp.gate.e_score_correction_bias"
    shared_name: str = "mlp.shared_experts"

    def __post_init__(self) -> None:
        # an expert that a token does not choose sees an input of 0, and must make 0 of it
        assert not (self.weighs_inputs and self.has_bias), "no family weighs the inputs of experts with biases"
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
        windows: Window of each layer.
        attention_scale: Factor of the products of queries and keys.
        query_growth: Growth of the queries with their position; None for none.
        latent: Latent attention; then a cache has one head of keys and values. None for ordinary attention.
        sinks: Whether each head has a logit that adds to the sum of its softmax, without a value.
        norm_bias: Whether the norms of hidden states have biases.
        gated: Whether the activation of feed-forward layers is a gate of further factors (see `layers.mlp`).
        recurrent: What some layers have in place of attention; None if all have attention.
        attention_gate: Whether outputs of attention are multiplied by sigmoids, whose logits the matrix of the queries
            gives after each head's queries.
        attention_softcap, logit_softcap: Scores and logits x become softcap tanh(x / softcap).
        embedding_scale, residual_scale, logit_scale: Factors of embeddings, of each block's output, and of logits.
        experts: Mixture of experts; None for a dense model.
        module_names: Names of a layer's modules in a checkpoint, by ours, where they are not those of most families;
            also those of the whole decoder, of its embedding, layers and final norm, and of the head.
        joint_qkv: How one matrix computes queries, keys and values (see `JointQKV`); None for a matrix of each.
        num_learned_positions: Number of positions with a learned vector, which is added to embeddings; 0 for none.
        transposed: Whether a checkpoint has the matrices of layers as [in, out].
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
    windows: tuple[Window, ...]
    attention_scale: float
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_bias: bool = False
    block: BlockKind = "pre_norm"
    qk_norm: QKNorm = "none"
    activation: GatedActivation = "silu"
    gated: bool = True
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    query_growth: QueryGrowth | None = None
    latent: LatentAttention | None = None
    sinks: bool = False
    recurrent: ShortConvolution | GatedDeltaNet | None = None
    attention_gate: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    module_names: tuple[tuple[str, str], ...] = ()
    joint_qkv: JointQKV | None = None
    num_learned_positions: int = 0
    transposed: bool = False
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
        if any(
            window.size < 1 if isinstance(window, Chunks) else window is not None and window < 1
            for window in self.windows
        ):
            raise ValueError(f"a window must have at least one position, got {self.windows}")
        if self.num_learned_positions and self.max_positions > self.num_learned_positions:
            raise ValueError(
                f"the model has learned {self.num_learned_positions} positions; sequences of {self.max_positions} need "
                "more: set max_positions to at most that"
            )
        if not self.attention_layers:
            raise ValueError(
                f"none of the {self.num_layers} layers has attention, by which groupax counts the memory of sequences; "
                "layer_types must have at least one full_attention"
            )

    def attention(self, layer: int) -> AttentionConfig:
        """Returns the attention of a layer."""
        return AttentionConfig(self.attention_scale, self.attention_softcap, self.windows[layer])

    def first_similar_layer(self, layer: int) -> int:
        """Returns the first layer of the same kind."""
        kinds = [
            (rope, window, self.has_experts(i), self.is_recurrent(i))
            for i, (rope, window) in enumerate(zip(self.ropes, self.windows, strict=True))
        ]
        return kinds.index(kinds[layer])

    def module(self, name: str, usual: str) -> str:
        """Returns the name of a module in a checkpoint, given its name in most families."""
        return dict(self.module_names).get(name, usual)

    @property
    def prefix(self) -> str:
        """Prefix of the decoder's weights in a checkpoint."""
        return self.vision.text_prefix if self.vision else f"{self.module('decoder', 'model')}."

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

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers with attention."""
        return [layer for layer in range(self.num_layers) if not self.is_recurrent(layer)]

    def is_recurrent(self, layer: int) -> bool:
        """Returns whether a layer has a recurrent state in place of attention."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers
