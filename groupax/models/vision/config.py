"""The architecture of the part of a model that sees images. Imports no jax.

An image is cut into patches, which a vision transformer (the tower) turns into vectors. A projector merges the vectors
of neighbouring patches into features of the language model's size, each of which takes the place of one token.
"""

from dataclasses import dataclass
from typing import Literal

# Activations of a tower, by Hugging Face's names; "gelu" is exact, and "quick_gelu" is x sigmoid(1.702 x).
TowerActivation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"]
# The families whose names weights may have in a checkpoint.
VisionNames = Literal["gemma3", "idefics3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"]


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """A vision transformer whose tokens are the patches of one image, which see each other.

    Attributes:
        hidden_size, ffn_size, num_layers, num_heads: Sizes, like those of a decoder.
        channels: Number of channels of an image.
        patch_size: Side of a patch in pixels.
        frames: Number of frames that a patch spans; an image is repeated that often.
        positions_per_side: Side of the square table of learned positions; None for none.
        interpolated: Whether a patch's learned position is interpolated between those of the table, over the whole
            image, rather than the one of the table's cell in which the patch begins.
        rope_theta: Base of the rotary embeddings of rows and columns; None for none.
        fused_qkv: Whether queries, keys and values are computed by one matrix.
        final_norm: Whether there is a norm after the last layer.
        norm: Kind of the norms, of which only "layer" has biases.
        norm_eps: Epsilon of the norms.
        activation: Activation of the feed-forward layers.
        is_gated: Whether the feed-forward layers are gated.
        patch_bias: Whether the matrix that multiplies patches has a bias.
        window: Side in patches of the squares of an image, from its first corner on, in which patches see each other;
            None for the whole image.
        whole_layers: Layers in which they see the whole image even so.
    """

    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    channels: int
    patch_size: int
    positions_per_side: int | None
    norm_eps: float
    activation: TowerActivation
    norm: Literal["layer", "rms"] = "layer"
    frames: int = 1
    interpolated: bool = False
    rope_theta: float | None = None
    fused_qkv: bool = False
    final_norm: bool = True
    is_gated: bool = False
    patch_bias: bool = True
    window: int | None = None
    whole_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"vision_config has hidden_size={self.hidden_size}, which {self.num_heads} heads do not divide"
            )
        if self.positions_per_side is not None and self.positions_per_side < 1:
            raise ValueError(f"vision_config has patches of {self.patch_size} pixels, larger than an image")

    @property
    def patch_dims(self) -> int:
        """Number of values of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def head_dim(self) -> int:
        """Number of dims of a head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class PixelShuffle:
    """A linear function of the vectors of `merge` x `merge` patches (Idefics 3)."""

    merge: int


@dataclass(frozen=True)
class AveragePool:
    """The mean of the vectors of `merge` x `merge` patches, normed and multiplied by a matrix (Gemma 3)."""

    merge: int
    norm_eps: float


@dataclass(frozen=True)
class PatchMerger:
    """A feed-forward layer of the normed vectors of `merge` x `merge` patches, after the last layer and others (Qwen).

    Attributes:
        merge: Number of patches along a side that become one feature.
        deepstack_layers: Layers of the tower after each of which a feature is added to the hidden states of a further
            layer of the decoder (arXiv:2406.04334).
    """

    merge: int
    deepstack_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The part of a model that sees images. It is hashable, like `models.config.ModelConfig`.

    Attributes:
        tower: The vision transformer.
        projector: From its vectors to features.
        image_token_id: Token that stands for one feature of an image in a prompt.
        placeholder_ids: Tokens that stand for features, of which the model must sample none; `image_token_id` is first.
        sees_whole_images: Whether the tokens of an image see each other, also those after them.
        has_grid_positions: Whether an image's tokens have positions of three coordinates (frame, row, column), and the
            text after it continues after the largest of them.
        names: Family whose names the weights have in a checkpoint.
        text_prefix: Prefix of the language model's weights in a checkpoint.
    """

    tower: TowerConfig
    projector: PixelShuffle | AveragePool | PatchMerger
    image_token_id: int
    placeholder_ids: tuple[int, ...]
    names: VisionNames
    text_prefix: str
    sees_whole_images: bool = False
    has_grid_positions: bool = False

    @property
    def num_levels(self) -> int:
        """Number of features of each image token: one for its embedding, and one per layer of the decoder after it."""
        return 1 + (len(self.projector.deepstack_layers) if isinstance(self.projector, PatchMerger) else 0)

    @property
    def patches_per_feature(self) -> int:
        """Number of patches that become one feature."""
        return self.projector.merge**2
