"""What a decoder-only transformer is, in numbers. Imports no jax."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency-dependent stretching of rotary embeddings (Llama 3.1; see `layers.rope_frequencies`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one model: hashable, so a jitted program can be specialized on it.

    Dims: D `hidden_size`, L `num_layers`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
    F `ffn_size`, V `vocab_size`. With `num_labels` the model classifies sequences and has no vocabulary head.
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
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_labels: int = 0

    @property
    def attention_dim(self) -> int:
        """Of a head's queries, keys and values in attention and in the cache; what exceeds `head_dim` is zero.

        XLA's CPU kernels add up products of fewer than 64 dims in orders that depend on all other sizes.
        """
        return max(64, self.head_dim)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary embeddings need an even head_dim, got {self.head_dim}")
