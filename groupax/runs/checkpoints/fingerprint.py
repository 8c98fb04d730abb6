"""The identity of a run: model, tokenizer, data, rewards, settings. Checkpoints continue only runs that agree in it."""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import numpy as np
from jax.sharding import Mesh

from groupax.core.config import GRPOConfig, RunConfig, SFTConfig, config_class
from groupax.models.weights.checkpoint import Model
from groupax.parallel.collectives import weights_digest

# How each setting may change when a run is resumed (see `settings.fields.Resume`).
_RESUME = {
    field.name: field.metadata.get("resume", "explicit")
    for settings in (SFTConfig, GRPOConfig)
    for field in fields(settings)
}
LIBRARIES = ("groupax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "transformers")

Identity = Mapping[str, Any]


def identity_of(
    args: RunConfig,
    model: Model,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    rewards: Sequence[str],
    num_steps: int,
    images: Sequence[tuple[str, ...]] = (),
) -> Identity:
    """Returns everything that identifies a run, as plain data; `images` has digests, empty if all prompts are text."""
    data = [*(ids.tobytes() for ids in prompts), *(" ".join(digests).encode() for digests in images)]
    return _plain(
        {
            "model": asdict(model.config),
            "weights": weights_digest(model.params),
            "adapter": model.adapter and asdict(model.adapter.config),
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "train_dataset": {"prompts": len(prompts), "sha256": _sha256(data)},
            "rewards": list(rewards),
            "num_steps": num_steps,
            "settings": args.to_dict(),
        }
    )


@cache
def versions() -> Mapping[str, str]:
    """Returns the versions of the libraries that affect a run's numbers."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def devices_of(mesh: Mesh) -> Mapping[str, Any]:
    """Returns the kind and the mesh of a run's devices, as plain data."""
    return {"kind": mesh.devices.flat[0].device_kind, "mesh": {name: int(size) for name, size in mesh.shape.items()}}


def differences(saved: Identity, now: Identity) -> dict[str, tuple[Any, Any]]:
    """Returns the differences between two runs, then and now, by name; without settings that may change."""
    a, b = _flat(saved), _flat(now)
    return {name: (a.get(name), b.get(name)) for name in [*a, *(b.keys() - a.keys())] if a.get(name) != b.get(name)}


def incompatible(found: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Returns the differences with which a checkpoint cannot be continued, even on request."""
    return {
        name: (then, now)
        for name, (then, now) in found.items()
        if name.partition(".")[0] in ("model", "weights", "tokenizer", "train_dataset", "schedule")
        or _RESUME.get(name) == "fixed"
        or (_RESUME.get(name) == "fixed_zero" and bool(then) != bool(now))
        or (name == "sync_ref_model" and now)
    }


def describe(found: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns the differences as lines of text."""
    return "\n".join(
        f"  {name}: {_short(then)} in the checkpoint, {_short(now)} now" for name, (then, now) in found.items()
    )


def digest(identity: Identity) -> str:
    """Returns a digest of a run's identity."""
    return _sha256([json.dumps(_flat(identity), sort_keys=True).encode()])


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns a digest of a tokenizer's vocabulary, special tokens and chat template."""
    vocabulary = sorted((token, index) for token, index in tokenizer.get_vocab().items())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else ""
    return _sha256(str(part).encode() for part in (vocabulary, rules, tokenizer.eos_token_id, tokenizer.chat_template))


def _flat(identity: Identity) -> dict[str, Any]:
    # what an older version did not have yet was as the default is
    known = _plain(config_class(identity["settings"])().to_dict())
    settings = {name: value for name, value in {**known, **identity["settings"]}.items() if _RESUME.get(name) != "free"}
    flat: dict[str, Any] = {}
    for name, value in identity.items():
        if name == "settings":
            flat |= settings
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _plain(value: Any) -> Any:
    """Returns the value as JSON restores it."""
    return json.loads(json.dumps(value))


def _sha256(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
