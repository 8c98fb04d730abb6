"""One weight of a model: its shape, its axes, its name in a checkpoint, its initialization. Imports no jax."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Spec:
    """One weight.

    Attributes:
        shape: Shape as in the checkpoint; matrices are [out, in], the embedding and the head [V, D].
        axes: Logical axis name (or None) of each dim; `parallel.mesh.RULES` maps them to mesh axes.
        name: Name of the tensor in a Hugging Face checkpoint; with `{expert}` one tensor for each index of the first
            dim.
        init: Initialization; "normal" draws from N(0, 0.02^2), "log_uniform" takes logarithms of draws from [0.01, 16).
        first_row: First row of the weight in a tensor that is fused with other weights.
        num_rows: Number of rows of that fused tensor; None if the tensor is the weight.
        row_dim: Dim of its rows.
        row_step: Distance of its rows in the fused tensor.
        is_transposed: Whether the tensor has the last two dims in the other order.
        is_float32: Whether it is kept in float32 whatever the dtype of the other weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Literal["normal", "ones", "zeros", "log_uniform"] = "normal"
    first_row: int = 0
    num_rows: int | None = None
    row_dim: int = 0
    row_step: int = 1
    is_transposed: bool = False
    is_float32: bool = False

    @property
    def is_matrix(self) -> bool:
        """True if it is a matrix that multiplies all tokens."""
        return len(self.shape) == 2 and None not in self.axes and "expert" not in self.axes

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
        return _swapped(self.fused_shape[1:] if self.is_stacked else self.fused_shape, self.is_transposed)

    @property
    def fused_shape(self) -> tuple[int, ...]:
        """The shape of the weight with all others in its tensor, in the weight's order of dims."""
        if self.num_rows is None:
            return self.shape
        return (*self.shape[: self.row_dim], self.num_rows, *self.shape[self.row_dim + 1 :])

    def fused_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the index in a fused tensor, whose dims are in the weight's order, of a part of the weight."""
        if self.num_rows is None:
            return index
        first, end, _ = index[self.row_dim].indices(self.shape[self.row_dim])
        start = self.first_row + first * self.row_step
        rows = slice(start, start + (end - first - 1) * self.row_step + 1, self.row_step)
        return (*index[: self.row_dim], rows, *index[self.row_dim + 1 :])

    def stored_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the index in the checkpoint's tensor of a part of the weight."""
        return _swapped(self.fused_index(index), self.is_transposed)

    def reordered(self, array: Any) -> Any:
        """Returns a tensor of the checkpoint with the weight's order of dims, or the reverse."""
        return array.swapaxes(-1, -2) if self.is_transposed else array


def _swapped(dims: tuple[Any, ...], is_transposed: bool) -> tuple[Any, ...]:
    """Returns what there is for each dim, with that of the last two swapped if the tensor is transposed."""
    return (*dims[:-2], dims[-1], dims[-2]) if is_transposed else dims
