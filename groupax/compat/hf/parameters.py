"""The weights of a model as PyTorch tensors under the names of transformers and PEFT."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.models.lora import PREFIX, adapter_specs
from groupax.models.specs import HEAD, embedding_name, model_specs
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.quantize import dense
from groupax.models.weights.saving import join_tensors, specs_by_name

_CHANGING = ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
        weight: Its weight, as a PyTorch parameter.
    """

    weight: Any


def parameters_of(model: Model) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Yields the name of each parameter, its value, and whether it is trained.

    Names are those of the checkpoint; with an adapter they are those of `peft.PeftModel`. Quantized weights are
    dequantized.
    """
    adapter = model.adapter
    if adapter is None:
        yield from ((name, tensor, True) for name, tensor in _tensors(model_specs(model.config), model.params))
        return
    specs = adapter_specs(model.config, adapter.config)
    trained = {name.removeprefix(PREFIX): tensor for name, tensor in _tensors(specs, adapter.trained)}
    adapted = {name.rpartition(".lora_A.")[0] for name in trained if ".lora_A." in name}
    for name, tensor in _tensors(model_specs(model.config), adapter.frozen.params):
        module, _, kind = name.rpartition(".")
        if name in trained and kind == "weight":
            yield f"{PREFIX}{module}.original_module.{kind}", tensor, False
            yield f"{PREFIX}{module}.modules_to_save.default.{kind}", trained[name], True
        elif module in adapted:
            own = f"{module}.base_layer.{kind}"
            yield PREFIX + own, trained.get(own, tensor), own in trained
        else:
            yield PREFIX + name, trained.get(name, tensor), name in trained
        if module in adapted and kind == "weight":
            for part in ("lora_A", "lora_B"):
                yield f"{PREFIX}{module}.{part}.default.weight", trained[f"{module}.{part}.weight"], True


def tied_name(model: Model) -> tuple[str, str] | None:
    """Returns the second name of an embedding that is also the head, and its first one; None if it is not."""
    if not model.config.tie_embeddings or model.config.num_labels:
        return None
    prefix = "" if model.adapter is None else PREFIX
    return prefix + HEAD, prefix + embedding_name(model.config)


def _tensors(specs: Any, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    leaves = jax.tree.structure(specs).flatten_up_to(params)
    for parts in specs_by_name(specs).values():
        yield from join_tensors([(spec, _dense(leaves[index])) for index, spec in parts]).items()


def _dense(weight: Any) -> np.ndarray:
    return np.asarray(weight if isinstance(weight, (jax.Array, np.ndarray)) else dense(weight, jnp.float32))


def as_parameter(array: np.ndarray, is_trained: bool) -> Any:
    """Returns a copy of a weight as a PyTorch parameter that refuses to be changed.

    Raises:
        ImportError: PyTorch is not installed.
    """
    cls = _parameter_class()
    return cls._make_subclass(cls, _as_torch(array), is_trained)


@cache
def _parameter_class() -> Any:
    """Returns the class of these parameters, which needs PyTorch."""
    import torch

    class ReadOnlyParameter(torch.Tensor):
        """A copy of a weight; changes of it are refused, since they would not reach the model."""

        _is_param = True

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.__name__
            is_in_place = name.endswith("_") and not name.endswith("__")
            if (is_in_place or name in _CHANGING) and isinstance(args[0], cls):
                raise RuntimeError(
                    f"{name} would change a copy of a weight of compat.hf's model, not the model; train with an "
                    "adapter to freeze weights, or load the model with transformers and pass that to the trainer"
                )
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    return ReadOnlyParameter


def _as_torch(array: np.ndarray) -> Any:
    import torch

    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
