"""New weights for a running server: uploaded, checked, and taken over between two chunks, all or nothing.

An upload names the weights that it replaces by their state, a string that changes with every commit and every start of
the server. So a late upload, or one to weights that another client has changed, is refused.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from groupax.models.adapted import apply_adapter
from groupax.models.lora import LoRAConfig, adapter_specs, as_lora_config, as_plain, init_adapter
from groupax.models.specs import Params, model_specs
from groupax.models.weights.casts import cast_unquantized
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import param_leaves, replace_tensors
from groupax.serve.loop import EngineLoop
from groupax.serve.remote import read_bytes
from groupax.serve.web import ApiError, bad_request

HEADER_BYTES = 16 << 20  # most bytes of an upload besides its tensors


@dataclass(frozen=True, eq=False)
class Held:
    """The weights of a served model.

    Attributes:
        base: Weights without an adapter.
        lora: Settings of the adapter, if there is one.
        trained: Weights of the adapter, in the base's dtype.
        state: A name that no other weights of this or another server have.
    """

    base: Params
    lora: LoRAConfig | None = None
    trained: Params | None = None
    state: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def params(self) -> Params:
        """The weights for the forward pass."""
        if self.lora is None or self.trained is None:
            return self.base
        return apply_adapter(self.base, self.trained)


@dataclass(frozen=True, eq=False)
class Upload:
    """Weights that were uploaded. Tensors that it lacks keep their values.

    Attributes:
        version: Version of the new weights.
        replaces: State of the weights that they replace.
        lora: Settings of the adapter that the tensors belong to; None for the model's own weights.
        tensors: The tensors by their names in files.
    """

    version: int
    replaces: str
    lora: LoRAConfig | None
    tensors: Mapping[str, np.ndarray]


class Weights:
    """The weights of a server's model.

    Args:
        loop: The engine.
        model: The model; None if its weights cannot be changed, as those of several adapters that share a batch.
    """

    def __init__(self, loop: EngineLoop, model: Model | None) -> None:
        self._loop, self._model = loop, model
        self._held = None if model is None else _held(model)

    @property
    def state(self) -> str | None:
        """The state of the weights; None if they cannot be changed."""
        return None if self._held is None else self._held.state

    def describe(self) -> dict[str, Any]:
        """Returns the version and the state of the weights."""
        _, held = self._current()
        return {"version": self._loop.engine.version, "state": held.state}

    def max_bytes(self) -> int:
        """Returns the size of the largest upload."""
        _, held = self._current()
        return HEADER_BYTES + 4 * sum(leaf.size for leaf in jax.tree.leaves(held.base))

    def read(self, data: np.ndarray) -> Upload:
        """Returns the upload in a safetensors file [bytes], checked. Safe in any thread."""
        with bad_request("tensors"):
            metadata, tensors = read_bytes(data)
            try:
                version, replaces = int(metadata["version"]), metadata["replaces"]
                adapter = json.loads(metadata["adapter"]) if "adapter" in metadata else None
                lora = None if adapter is None else as_lora_config(adapter, has_weights=True)
            except (KeyError, RecursionError, TypeError) as error:
                message = f"the metadata must have a version, replaces and perhaps an adapter: {error}"
                raise ValueError(message) from error
            if lora is not None and lora.is_pissa:
                raise ValueError("an adapter of PiSSA lacks what it removes from the base; send it as plain LoRA")
            if not 0 <= version < 1 << 63:
                raise ValueError(f"version must be in [0, 2^63), got {version}")
            upload = Upload(version, replaces, lora, tensors)
            self._check_state(upload)
            self._check_tensors(upload)
        return upload

    def prepared(self, upload: Upload) -> Held:
        """Returns the weights of an upload, on the devices. Safe in any thread."""
        model, held = self._current()
        if upload.lora is None:
            return Held(replace_tensors(model_specs(model.config), held.base, upload.tensors))
        trained = held.trained
        if held.lora != upload.lora:
            sharding = jax.NamedSharding(model.mesh, jax.P())
            added = init_adapter(model.config, upload.lora, held.base, jax.random.key(0), sharding)
            trained = _in_dtype_of(held.base, added)
        assert trained is not None, "an adapter has weights"
        specs = adapter_specs(model.config, upload.lora)
        return Held(held.base, upload.lora, replace_tensors(specs, trained, upload.tensors))

    def take_over(self, upload: Upload, held: Held) -> dict[str, Any]:
        """Gives the engine its new weights. Must be run between two chunks."""
        self._check_state(upload)
        self._held, engine = held, self._loop.engine
        engine.params, engine.version = held.params, upload.version
        return self.describe()

    def _current(self) -> tuple[Model, Held]:
        if self._model is None or self._held is None:
            raise ApiError(403, "the weights of this server cannot be changed; start it without --adapter")
        return self._model, self._held

    def _check_state(self, upload: Upload) -> None:
        if upload.replaces != self.state:
            message = f"this replaces the weights {upload.replaces!r:.80}, and the server has others ({self.state})"
            raise ApiError(409, message, param="replaces", code="other_weights")

    def _check_tensors(self, upload: Upload) -> None:
        lora, tensors = upload.lora, upload.tensors
        model, held = self._current()
        if lora is None:
            if held.lora is not None:
                raise ValueError("the model has an adapter; send that, or start the server with its base")
            specs = model_specs(model.config)
            param_leaves(specs, held.base)
        else:
            if held.base is not _base(model):
                raise ValueError("the base of the model was changed by uploads; start the server again")
            specs = adapter_specs(model.config, lora)
        expected = {name: spec.tensor_shape for spec in jax.tree.leaves(specs) for name in spec.tensor_names}
        unknown = sorted(tensors.keys() - expected.keys())
        if unknown:
            raise ValueError(f"the model has no tensors {', '.join(unknown[:3])}")
        for name, tensor in tensors.items():
            if tensor.shape != expected[name]:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}")
        missing = sorted(expected.keys() - tensors.keys())
        if lora is not None and lora != held.lora and missing:
            raise ValueError(f"the model has no such adapter yet, and the first upload lacks {', '.join(missing[:3])}")


def _held(model: Model) -> Held:
    adapter, base = model.adapter and as_plain(model.adapter), _base(model)
    return Held(base) if adapter is None else Held(base, adapter.config, _in_dtype_of(base, adapter.trained))


def _base(model: Model) -> Params:
    return model.params if model.adapter is None else model.adapter.frozen


def _in_dtype_of(base: Params, trained: Params) -> Params:
    return cast_unquantized(trained, base["embed"].dtype)
