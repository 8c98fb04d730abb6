"""One weight of a model: its shape, its axes, its name in a checkpoint, its initialization. Imports no jax."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Spec:
    """One weight.

    Attributes:
        shape: Shape as in the checkpoint; matrices are [out, in], the embedding and the head [V, D].
        axes: Logical axis name (or None) of each dim; `parallel.mesh.RULES` maps them to mesh axes.
        name: Name of the tensor in a Hugging Face checkpoint; with `{expert}` one tensor for each index of the first
            dim.
        init: Initialization; "normal" draws from N(0, 0.02^2).
        first_row: First row of the weight in a tensor that is fused with other weights.
        num_rows: Number of rows of that fused tensor; None if the tensor is the weight.
        is_float32: Whether it is kept in float32 whatever the dtype of the other weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Literal["normal", "ones", "zeros"] = "normal"
    first_row: int = 0
    num_rows: int | None = None
    is_float32: bool = False

    @property
    def is_matrix(self) -> bool:
        """True if it is a matrix that multiplies all tokens."""
        return len(self.shape) == 2 and None not in self.axes

    @property
    def is_vision_matrix(self) -> bool:
        """True if it is a matrix that multiplies all patches or features of an image, which may be adapted."""
        return self.is_matrix and "vision" in self.axes

    @property
    def is_layer_matrix(self) -> bool:
        """True if it is such a matrix of a layer of the decoder, which may be quantized and adapted."""
        return self.is_matrix and ".layers." in self.name and not self.is_vision_matrix

    @property
    def is_stacked(self) -> bool:
        """True if each index of the first dim is a separate tensor in the checkpoint."""
        return "{expert}" in self.name

    @property
    def tensor_names(self) -> list[str]:
        """The names of the checkpoint's tensors that hold the weight."""
        return [self.name.format(expert=index) for index in range(self.shape[0])] if self.is_stacked else [self.name]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of these tensors."""
        if self.is_stacked:
            return self.shape[1:]
        return self.shape if self.num_rows is None else (self.num_rows, *self.shape[1:])
