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

from groupax.models.adapted import Changes, FrozenBase, apply_adapter, check_finite_changes, stack_adapters
from groupax.models.lora import LoRAConfig, adapter_specs, as_lora_config, init_adapter
from groupax.models.specs import Params, model_specs
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
        return apply_adapter(FrozenBase(self.base, np.float32(self.lora.scale)), self.trained)


@dataclass(frozen=True, eq=False)
class Upload:
    """Weights that were uploaded. Tensors that it lacks keep their values.

    Attributes:
        model: Name of the model.
        version: Version of the new weights.
        replaces: State of the weights that they replace.
        lora: Settings of the adapter that the tensors belong to; None for the model's own weights.
        tensors: The tensors by their names in files.
    """

    model: str
    version: int
    replaces: str
    lora: LoRAConfig | None
    tensors: Mapping[str, np.ndarray]


class Weights:
    """The weights of a server's models.

    Args:
        loop: The engine.
        models: Models whose weights may be changed, by name.
    """

    def __init__(self, loop: EngineLoop, models: Mapping[str, Model]) -> None:
        self.loop, self.models = loop, models
        self._held = {name: _held(model) for name, model in models.items()}

    def describe(self) -> dict[str, Any]:
        """Returns the version and the state of each model's weights."""
        return {"models": [{"model": name, **self._state(name)} for name in self.models]}

    def state(self, model: str) -> str | None:
        """Returns the state of a model's weights; None if they cannot be changed."""
        return self._held[model].state if model in self._held else None

    def max_bytes(self, model: str) -> int:
        """Returns the size of the largest upload for a model; raises an `ApiError` if there is no such model."""
        if model not in self._held:
            names = ", ".join(self.models)
            raise ApiError(404, f"there is no model {model!r}; this server has {names}", "model", "model_not_found")
        return HEADER_BYTES + 4 * sum(leaf.size for leaf in jax.tree.leaves(self._held[model].base))

    def read(self, model: str, data: np.ndarray) -> Upload:
        """Returns the upload in a safetensors file [bytes], checked. Safe in any thread."""
        with bad_request("tensors"):
            metadata, tensors = read_bytes(data)
            try:
                version, replaces = int(metadata["version"]), metadata["replaces"]
                adapter = json.loads(metadata["adapter"]) if "adapter" in metadata else None
                lora = None if adapter is None else as_lora_config(adapter, has_weights=True)
            except (KeyError, RecursionError, TypeError) as error:
                raise ValueError(
                    f"the metadata must have a version, replaces and perhaps an adapter: {error}"
                ) from error
            if not 0 <= version < 1 << 63:
                raise ValueError(f"version must be in [0, 2^63), got {version}")
            upload = Upload(model, version, replaces, lora, tensors)
            self._check_state(upload)
            self._check_tensors(upload)
        return upload

    def prepared(self, upload: Upload) -> Held:
        """Returns the weights of an upload, on the devices. Safe in any thread."""
        model = upload.model
        held, config = self._held[model], self.models[model].config
        if upload.lora is None:
            return Held(replace_tensors(model_specs(config), held.base, upload.tensors))
        specs = adapter_specs(config, upload.lora)
        trained = held.trained
        if held.lora != upload.lora:
            sharding = jax.NamedSharding(self.models[model].mesh, jax.P())
            added = init_adapter(config, upload.lora, held.base, jax.random.key(0), sharding)
            trained = _in_dtype_of(held.base, added)
        assert trained is not None, "an adapter has weights"
        new = replace_tensors(specs, trained, upload.tensors)
        if self.loop.engine.adapters:
            with bad_request("tensors"):
                check_finite_changes(new)
        return Held(held.base, upload.lora, new)

    def take_over(self, upload: Upload, held: Held) -> dict[str, Any]:
        """Gives an engine its new weights. Must be run between two chunks."""
        self._check_state(upload)
        engine = self.loop.engine
        self._held[upload.model] = held
        if engine.adapters:
            version = engine.version
            adapters = [self._held[name] for name in engine.adapters]
            changes = [Changes(each.trained, each.lora.scale) for each in adapters if each.lora and each.trained]
            assert len(changes) == len(adapters), "adapters have weights"
            engine.params = stack_adapters(held.base, changes)
            engine.version, engine.adapter_versions[upload.model] = version, upload.version
        else:
            engine.params = held.params
            engine.version = upload.version
        return self._state(upload.model)

    def _state(self, model: str) -> dict[str, Any]:
        held = self._held[model]
        return {"version": self.loop.version_of(model), "state": held.state, "has_adapter": held.lora is not None}

    def _check_state(self, upload: Upload) -> None:
        state = self._held[upload.model].state
        if upload.replaces != state:
            message = f"this replaces the weights {upload.replaces!r:.80} of {upload.model}, which has others ({state})"
            raise ApiError(409, message, param="replaces", code="other_weights")

    def _check_tensors(self, upload: Upload) -> None:
        model, lora, tensors = upload.model, upload.lora, upload.tensors
        held, config, shared = self._held[model], self.models[model].config, self.loop.engine.adapters
        if shared and model not in shared:
            raise ValueError(
                f"{model} is the base of {', '.join(shared)}, which are decoded together with it; send the weights of "
                "one of them, or start the server without --adapter"
            )
        if shared and lora is not None and (lora.bias != "none" or lora.modules_to_save):
            raise ValueError(f"{model} shares its batch with others: train it without lora_bias and modules_to_save")
        if lora is None:
            if held.lora is not None:
                raise ValueError(f"{model} has an adapter; send that, or start the server with its base")
            specs = model_specs(config)
            param_leaves(specs, held.base)
        else:
            if held.base is not _base(self.models[model]):
                raise ValueError(f"the base of {model} was changed by uploads; start the server again")
            specs = adapter_specs(config, lora)
        expected = {name: spec.tensor_shape for spec in jax.tree.leaves(specs) for name in spec.tensor_names}
        unknown = sorted(tensors.keys() - expected.keys())
        if unknown:
            raise ValueError(f"{model} has no tensors {', '.join(unknown[:3])}")
        for name, tensor in tensors.items():
            if tensor.shape != expected[name]:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}")
        missing = sorted(expected.keys() - tensors.keys())
        if lora is not None and lora != held.lora and missing:
            raise ValueError(f"{model} has no such adapter yet, and its first upload lacks {', '.join(missing[:3])}")


def _held(model: Model) -> Held:
    adapter, base = model.adapter, _base(model)
    return Held(base) if adapter is None else Held(base, adapter.config, _in_dtype_of(base, adapter.trained))


def _base(model: Model) -> Params:
    return model.params if model.adapter is None else model.adapter.frozen.params


def _in_dtype_of(base: Params, trained: Params) -> Params:
    return jax.tree.map(lambda array: array.astype(base["embed"].dtype), trained)
