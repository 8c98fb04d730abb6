"""New weights for a running server: uploaded, checked, and taken over between two chunks, all or nothing.

    begin (manifest) ──► the tensors' bytes ──► devices ──► between two chunks
                           while the engine runs

An upload names the weights that it replaces by their state, a string that changes with every commit and every start of
the server. So a late upload, or one to weights that another client has changed, is refused.
"""

import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from groupax.models.adapted import Changes, FrozenBase, apply_adapter, check_finite_changes, stack_adapters
from groupax.models.lora import LoRAConfig, adapter_specs, as_lora_config, init_adapter
from groupax.models.specs import Params, model_specs
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import param_leaves, replace_tensors
from groupax.serve.loop import EngineLoop, adapter_of
from groupax.serve.remote import Extent, read_manifest, tensors_in
from groupax.serve.requests import check_known, validated
from groupax.serve.web import ApiError, bad_request

ALIGNMENT = 64  # of memory that devices of the host can use without a copy


class UploadRequest(BaseModel):
    """The announcement of an upload. Tensors that it does not list keep their values.

    Attributes:
        model: Name of the model.
        version: Version of the new weights.
        replaces: State of the weights that they replace.
        adapter: The `adapter_config.json` of an adapter.
        tensors: The manifest (see `serve.remote`).
    """

    model_config = ConfigDict(strict=True)

    model: str
    version: int = Field(ge=0, lt=1 << 63)
    replaces: Any = None
    adapter: dict[str, Any] | None = None
    tensors: Any = None


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
    """Weights that are being uploaded."""

    request: UploadRequest
    lora: LoRAConfig | None
    extents: Mapping[str, Extent]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return max(extent.end for extent in self.extents.values())


class Weights:
    """The weights of a server's models, and current uploads.

    All methods but `prepared` and `take_over` belong to one thread.

    Args:
        loop: The engines.
        models: Models whose weights may be changed, by name.
    """

    def __init__(self, loop: EngineLoop, models: Mapping[str, Model]) -> None:
        self.loop, self.models = loop, models
        self._held = {name: _held(model) for name, model in models.items()}
        self._uploads: dict[str, Upload] = {}

    def describe(self) -> dict[str, Any]:
        """Returns the version and the state of each model's weights."""
        return {"models": [{"model": name, **self._state(name)} for name in self.models]}

    def state(self, model: str) -> str | None:
        """Returns the state of a model's weights; None if they cannot be changed."""
        return self._held[model].state if model in self._held else None

    def begin(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Starts an upload (see `UploadRequest`), and discards an earlier one of the same model."""
        check_known(given, UploadRequest.model_fields, "the upload")
        request = validated(UploadRequest, given)
        model = request.model
        if model not in self._held:
            names = ", ".join(self.models)
            raise ApiError(404, f"there is no model {model!r}; this server has {names}", "model", "model_not_found")
        self._check_state(request)
        with bad_request("tensors"):
            try:
                lora = None if request.adapter is None else as_lora_config(request.adapter, has_weights=True)
            except TypeError as error:
                raise ValueError(str(error)) from error
            extents = read_manifest(request.tensors)
            self._check_tensors(model, lora, extents)
        self._uploads = {name: each for name, each in self._uploads.items() if each.request.model != model}
        name = secrets.token_hex(8)
        self._uploads[name] = Upload(request, lora, extents)
        return {"upload": name}

    def take(self, name: str) -> Upload:
        """Returns an upload whose bytes arrive, which nobody else can send any more."""
        if name not in self._uploads:
            message = f"there is no upload {name!r}: it was sent, or another one was started"
            raise ApiError(404, message, code="upload_not_found")
        return self._uploads.pop(name)

    async def received(self, upload: Upload, parts: AsyncIterator[bytes]) -> dict[str, np.ndarray]:
        """Returns the tensors of an upload when all of its bytes have arrived."""
        size, at = upload.num_bytes, 0
        data = np.empty(size + ALIGNMENT, np.uint8)
        first = -data.ctypes.data % ALIGNMENT
        data = data[first : first + size]
        async for part in parts:
            if at + len(part) <= size:
                data[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        if at != size:
            raise ApiError(400, f"the tensors have {size} bytes, {at} came", code="torn")
        self._check_state(upload.request)
        return tensors_in(data, upload.extents)

    def prepared(self, upload: Upload, tensors: dict[str, np.ndarray]) -> Held:
        """Returns the weights of an upload, on the devices. Safe in any thread."""
        model = upload.request.model
        held, config = self._held[model], self.models[model].config
        if upload.lora is None:
            return Held(replace_tensors(model_specs(config), held.base, tensors))
        specs = adapter_specs(config, upload.lora)
        trained = held.trained
        if held.lora != upload.lora:
            sharding = jax.NamedSharding(self.models[model].mesh, jax.P())
            added = init_adapter(config, upload.lora, held.base, jax.random.key(0), sharding)
            trained = _in_dtype_of(held.base, added)
        assert trained is not None, "an adapter has weights"
        new = replace_tensors(specs, trained, tensors)
        if self.loop.engines[model].adapters:
            with bad_request("tensors"):
                check_finite_changes(new)
        return Held(held.base, upload.lora, new)

    def take_over(self, upload: Upload, held: Held) -> dict[str, Any]:
        """Gives an engine its new weights. Must be run between two chunks."""
        request = upload.request
        self._check_state(request)
        engine = self.loop.engines[request.model]
        self._held[request.model] = held
        if engine.adapters:
            version = engine.version
            adapters = [self._held[name] for name in engine.adapters]
            changes = [Changes(each.trained, each.lora.scale) for each in adapters if each.lora and each.trained]
            assert len(changes) == len(adapters), "adapters have weights"
            engine.params = stack_adapters(held.base, changes)
            engine.version, engine.adapter_versions[request.model] = version, request.version
        else:
            engine.params = held.params
            engine.version = request.version
        return self._state(request.model)

    def _state(self, model: str) -> dict[str, Any]:
        held, engine = self._held[model], self.loop.engines[model]
        version = engine.version_of(adapter_of(engine, model))
        return {"version": version, "state": held.state, "has_adapter": held.lora is not None}

    def _check_state(self, request: UploadRequest) -> None:
        state = self._held[request.model].state
        if request.replaces != state:
            message = f"this replaces the weights {request.replaces!r} of {request.model}, which has others ({state})"
            raise ApiError(409, message, param="replaces", code="other_weights")

    def _check_tensors(self, model: str, lora: LoRAConfig | None, extents: Mapping[str, Extent]) -> None:
        held, config, shared = self._held[model], self.models[model].config, self.loop.engines[model].adapters
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
        unknown = sorted(extents.keys() - expected.keys())
        if unknown:
            raise ValueError(f"{model} has no tensors {', '.join(unknown[:3])}")
        for name, extent in extents.items():
            if extent.shape != expected[name]:
                raise ValueError(f"{name} has shape {list(extent.shape)}, not {list(expected[name])}")
        missing = sorted(expected.keys() - extents.keys())
        if lora is not None and lora != held.lora and missing:
            raise ValueError(f"{model} has no such adapter yet, and its first upload lacks {', '.join(missing[:3])}")


def _held(model: Model) -> Held:
    adapter, base = model.adapter, _base(model)
    return Held(base) if adapter is None else Held(base, adapter.config, _in_dtype_of(base, adapter.trained))


def _base(model: Model) -> Params:
    return model.params if model.adapter is None else model.adapter.frozen.params


def _in_dtype_of(base: Params, trained: Params) -> Params:
    return jax.tree.map(lambda array: array.astype(base["embed"].dtype), trained)
