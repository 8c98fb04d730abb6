"""Other weights for a running server: uploaded in pieces, checked, and taken over between two chunks, all or nothing.

    begin (manifest) ──► pieces, in any order, each with its checksum ──► commit ──► devices ──► between two chunks
                              while the engine goes on

What an upload replaces is named by its state, a word that changes with every commit and every start of the server. So
an upload that comes late, or changes weights that somebody else has changed, is refused.
"""

import math
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from groupax.models.adapted import FrozenBase, apply_adapter
from groupax.models.checkpoint import Model
from groupax.models.lora import LoRAConfig, adapter_specs, as_lora_config, init_adapter
from groupax.models.named_tensors import param_leaves, replace_tensors
from groupax.models.specs import Params, model_specs
from groupax.serve.errors import ApiError
from groupax.serve.loop import EngineLoop
from groupax.serve.protocol import MAX_PIECE_BYTES, PIECE_BYTES, Place, checksum, read_manifest, tensors_in

ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Held:
    """The weights of a served model.

    Attributes:
        base: without an adapter.
        lora: settings of its adapter, if it has one.
        trained: the adapter's weights, in the base's dtype.
        state: names them among all that this or another server ever had.
    """

    base: Params
    lora: LoRAConfig | None = None
    trained: Params | None = None
    state: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def params(self) -> Params:
        """What the forward pass reads."""
        if self.lora is None or self.trained is None:
            return self.base
        return apply_adapter(FrozenBase(self.base, np.float32(self.lora.scale)), self.trained)


@dataclass(eq=False)
class Upload:
    """Weights that are on their way.

    Attributes:
        model: whose.
        version: that they are to have.
        replaces: the state that they change.
        lora: of the adapter, if it is one.
        places: of the tensors.
        data: their bytes; what has not come is not yet defined.
        piece_bytes: size of a piece.
        arrived: the pieces that are there.
    """

    model: str
    version: int
    replaces: str
    lora: LoRAConfig | None
    places: Mapping[str, Place]
    data: np.ndarray
    piece_bytes: int
    arrived: set[int] = field(default_factory=set)

    @property
    def num_pieces(self) -> int:
        """How many there are."""
        return math.ceil(len(self.data) / self.piece_bytes)


class Weights:
    """The weights of a server's models, and the uploads under way.

    Used by one thread, but for `prepared` and `take_over`.

    Args:
        loop: with the engines.
        models: by name, those whose weights may be changed.
    """

    def __init__(self, loop: EngineLoop, models: Mapping[str, Model]) -> None:
        self.loop, self.models = loop, models
        self._held = {name: _held(model) for name, model in models.items()}
        self._uploads: dict[str, Upload] = {}

    def describe(self) -> dict[str, Any]:
        """What each model has: the version and the state of its weights."""
        return {"models": [{"model": name, **self._state(name)} for name in self.models]}

    def state(self, model: str) -> str | None:
        """Of a model's weights; None if they cannot be changed."""
        return self._held[model].state if model in self._held else None

    def begin(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Take an upload's manifest; one of the same model that is under way is forgotten.

        Args:
            given: model, version, replaces (a state), tensors (see `wire`), and for an adapter its
                `adapter_config.json`. Tensors that are not given stay as they are.

        Raises:
            ApiError: it does not fit the model, or replaces other weights than the model has.
        """
        known = ("model", "version", "replaces", "adapter", "tensors", "piece_bytes")
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ApiError(400, f"unknown fields {', '.join(unknown)}; there are {', '.join(known)}", param=unknown[0])
        model, version, size = given.get("model"), given.get("version"), given.get("piece_bytes", PIECE_BYTES)
        if not isinstance(model, str):
            raise ApiError(400, f"model must be a text, got {model!r}", param="model")
        if model not in self._held:
            names = ", ".join(self.models)
            raise ApiError(404, f"there is no model {model!r}; this server has {names}", "model", "model_not_found")
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise ApiError(400, f"version must be a number from 0 up, got {version!r}", param="version")
        if type(size) is not int or not 1 <= size <= MAX_PIECE_BYTES:
            raise ApiError(400, f"piece_bytes must be in [1, {MAX_PIECE_BYTES}], got {size!r}", param="piece_bytes")
        self._check_state(model, given.get("replaces"))
        try:
            lora = None if given.get("adapter") is None else as_lora_config(given["adapter"], has_weights=True)
            where = read_manifest(given.get("tensors"))
            self._check_tensors(model, lora, where)
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="tensors") from error
        for name in [name for name, upload in self._uploads.items() if upload.model == model]:
            del self._uploads[name]
        data = _aligned(max(place.end for place in where.values()))
        upload = Upload(model, version, given["replaces"], lora, where, data, size)
        name = secrets.token_hex(8)
        self._uploads[name] = upload
        return {"upload": name, "num_pieces": upload.num_pieces, "piece_bytes": size}

    async def put(self, name: str, piece: int, crc: str | None, parts: AsyncIterator[bytes]) -> dict[str, Any]:
        """Take a piece, whose bytes go to their place as they come; sent twice, the last one counts.

        Raises:
            ApiError: there is no such upload or piece, or the bytes are not those that were sent.
        """
        upload = self._upload(name)
        if not 0 <= piece < upload.num_pieces:
            raise ApiError(400, f"piece {piece} is not one of the {upload.num_pieces} pieces")
        at = first = piece * upload.piece_bytes
        end = min(first + upload.piece_bytes, len(upload.data))
        async for part in parts:
            self._upload(name)  # it may have been closed meanwhile
            if at + len(part) > end:
                raise ApiError(400, f"piece {piece} has {end - first} bytes, more came", code="torn")
            upload.arrived.discard(piece)
            upload.data[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        self._upload(name)
        if at != end:
            raise ApiError(400, f"piece {piece} has {end - first} bytes, {at - first} came", code="torn")
        found = f"{checksum([upload.data[first:end].data]):08x}"
        if found != crc:
            message = f"piece {piece} has the checksum {found}, x-crc32 says {crc}; send it again"
            raise ApiError(400, message, code="torn")
        upload.arrived.add(piece)
        return {"arrived": len(upload.arrived)}

    def abort(self, name: str) -> dict[str, Any]:
        """Forget an upload."""
        self._upload(name)
        del self._uploads[name]
        return {"aborted": name}

    def close(self, name: str) -> Upload:
        """Take an upload for `prepared` and `take_over`; nothing can be added to it any more.

        Raises:
            ApiError: pieces are missing, or it would replace others than the model has.
        """
        upload = self._upload(name)
        missing = sorted(set(range(upload.num_pieces)) - upload.arrived)
        if missing:
            raise ApiError(409, f"{len(missing)} pieces are missing, among them {missing[:8]}; send them", code="torn")
        self._check_state(upload.model, upload.replaces)
        return self._uploads.pop(name)

    def prepared(self, upload: Upload) -> Held:
        """The weights of a closed upload, on the devices; may be run in any thread."""
        held = self._held[upload.model]
        tensors = tensors_in(upload.data, upload.places)
        config = self.models[upload.model].config
        if upload.lora is None:
            return Held(replace_tensors(model_specs(config), held.base, tensors))
        specs = adapter_specs(config, upload.lora)
        trained = held.trained if held.lora == upload.lora else self._new_adapter(upload.model, upload.lora)
        assert trained is not None, "an adapter has weights"
        return Held(held.base, upload.lora, replace_tensors(specs, trained, tensors))

    def take_over(self, upload: Upload, held: Held) -> dict[str, Any]:
        """Give an engine its new weights; to be run between two chunks.

        Raises:
            ApiError: others came first.
        """
        self._check_state(upload.model, upload.replaces)
        engine = self.loop.engines[upload.model]
        engine.params = held.params
        engine.version = upload.version
        self._held[upload.model] = held
        return self._state(upload.model)

    def _state(self, model: str) -> dict[str, Any]:
        held = self._held[model]
        return {
            "version": self.loop.engines[model].version,
            "state": held.state,
            "has_adapter": held.lora is not None,
        }

    def _upload(self, name: str) -> Upload:
        if name not in self._uploads:
            message = f"there is no upload {name!r}: it was taken over, aborted, or another one was begun"
            raise ApiError(404, message, code="upload_not_found")
        return self._uploads[name]

    def _check_state(self, model: str, replaces: Any) -> None:
        state = self._held[model].state
        if replaces != state:
            message = f"this replaces the weights {replaces!r} of {model}, which has others ({state})"
            raise ApiError(409, message, param="replaces", code="other_weights")

    def _check_tensors(self, model: str, lora: LoRAConfig | None, where: Mapping[str, Place]) -> None:
        held, config = self._held[model], self.models[model].config
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
        unknown = sorted(where.keys() - expected.keys())
        if unknown:
            raise ValueError(f"{model} has no tensors {', '.join(unknown[:3])}")
        for name, place in where.items():
            if place.shape != expected[name]:
                raise ValueError(f"{name} has shape {list(place.shape)}, not {list(expected[name])}")
        missing = sorted(expected.keys() - where.keys())
        if lora is not None and lora != held.lora and missing:
            raise ValueError(f"{model} has no such adapter yet, and its first upload lacks {', '.join(missing[:3])}")

    def _new_adapter(self, model: str, lora: LoRAConfig) -> Params:
        base = self._held[model].base
        sharding = jax.NamedSharding(self.models[model].mesh, jax.P())
        trained = init_adapter(self.models[model].config, lora, base, jax.random.key(0), sharding)
        return _in_dtype_of(base, trained)


def _held(model: Model) -> Held:
    adapter = model.adapter
    if adapter is None:
        return Held(model.params)
    base = _base(model)
    return Held(base, adapter.config, _in_dtype_of(base, adapter.trained))


def _aligned(size: int) -> np.ndarray:
    """Bytes that begin where devices of the host can take them over without a copy."""
    data = np.empty(size + ALIGNMENT, np.uint8)
    first = -data.ctypes.data % ALIGNMENT
    return data[first : first + size]


def _base(model: Model) -> Params:
    return model.params if model.adapter is None else model.adapter.frozen.params


def _in_dtype_of(base: Params, trained: Params) -> Params:
    return jax.tree.map(lambda array: array.astype(base["embed"].dtype), trained)
