"""Models as Hugging Face folders: safetensors in, safetensors out. Never pickle, never remote code."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.specs import Params, Spec, init_params, model_specs, num_params, param_shardings, spec_leaves
from groupax.parallel.mesh import mesh_for

INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Tensors that some exporters write and no forward pass needs.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Model:
    """A model in memory: what it is, its weights on the mesh, and the files' settings to be written back.

    Attributes:
        config: the architecture.
        params: the weights (see `models.specs`).
        mesh: where they lie.
        hf_config: the parsed `config.json`.
        generation_config: the parsed `generation_config.json`, empty if there was none.
        source: the folder that it came from, where the tokenizer lies too; None for a model made here.
    """

    config: ModelConfig
    params: Params
    mesh: Mesh
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    source: Path | None = None


def init_model(
    hf_config: Mapping[str, Any], seed: int = 0, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> Model:
    """A model with random weights from the contents of a `config.json`."""
    config = read_config(hf_config)
    mesh = mesh or mesh_for(num_params(config) * jnp.dtype(dtype).itemsize)
    return Model(config, init_params(config, jax.random.key(seed), mesh, dtype), mesh, dict(hf_config), {})


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    max_positions: int | None = None,
) -> Model:
    """Load a causal language model from a folder or, if there is none of that name, from the Hugging Face hub.

    Each device receives its part of each tensor straight from the file, so that no host holds a second copy.

    Args:
        name_or_path: a folder with `config.json` and safetensors files, or a hub id like "Qwen/Qwen3-0.6B".
        dtype: of the weights in memory; None keeps each tensor's own.
        mesh: where to put them; by default a copy on every device (see `parallel.mesh.mesh_for`).
        max_positions: the longest sequence; None for what `config.json` says, and for the original context if rotary
            embeddings are others beyond it ("longrope"). It decides for all sequences (see `rope.frequencies`).

    Raises:
        ValueError: the folder is no model, or its config or weights are unsupported, damaged or incomplete.
    """
    folder = resolve_folder(name_or_path)
    hf_config = _read_json(folder / "config.json")
    config = read_config(hf_config)
    config = config if max_positions is None else replace(config, max_positions=max_positions)
    mesh = mesh or mesh_for(num_params(config) * 4)
    generation_config = {}
    if (folder / "generation_config.json").is_file():
        generation_config = _read_json(folder / "generation_config.json")
    tensors = _tensors_in(folder)
    _check_tensors(config, tensors, folder)
    shardings = param_shardings(config, mesh)
    params = jax.tree.map(lambda spec, sharding: _load(spec, sharding, tensors, dtype), model_specs(config), shardings)
    return Model(config, params, mesh, hf_config, generation_config, folder)


def resolve_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the path itself, or a download from the hub.

    Raises:
        ValueError: it is neither a model folder nor can it be had from the hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise ValueError(f"{path} is no model folder: it has no config.json (it holds {inside})")
        return path
    if path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name_or_path)):
        raise ValueError(f"{name_or_path} is neither a model folder nor a hub id of the form 'owner/name'")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=patterns))
    except (OSError, ValueError) as error:  # what the hub's client raises for network, name and permission faults
        raise ValueError(f"there is no folder {name_or_path}, and the hub does not give it: {error}") from error


def save_model(model: Model, folder: str | os.PathLike[str], tokenizer: Any = None, dtype: Any = None) -> Path:
    """Write a folder that `transformers` loads. It appears whole or not at all.

    Args:
        model: the model.
        folder: replaced if it exists.
        tokenizer: written beside the weights if given.
        dtype: of the weights on disk; None keeps each weight's own.
    """
    folder = Path(folder)
    with replacing_folder(folder) as partial:
        dtype_name = jnp.dtype(dtype or model.params["embed"].dtype).name
        hf_config = {key: value for key, value in model.hf_config.items() if key not in ("dtype", "torch_dtype")}
        _write_json(partial / "config.json", {**hf_config, "dtype": dtype_name})
        if model.generation_config:
            _write_json(partial / "generation_config.json", model.generation_config)
        _save_params(model.config, model.params, partial, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    return folder


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give a new folder to write into, and put it in the place of `folder` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            folder.replace(replaced / folder.name)
            partial.replace(folder)
            shutil.rmtree(replaced)
        else:
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class TensorFile:
    """A safetensors file that is mapped only while a weight is read.

    What was read of a mapped file counts as memory of the process, as a second copy of the weights would.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    @property
    def file(self) -> Any:
        """The file, opened if need be.

        Raises:
            ValueError: it is damaged.
        """
        if self._file is None:
            try:
                self._file = safe_open(self.path, framework="np")
            except SafetensorError as error:
                size = self.path.stat().st_size
                raise ValueError(f"{self.path} ({size} bytes) is damaged or truncated: {error}") from error
        return self._file

    def get_slice(self, name: str) -> Any:
        """A tensor, of which parts can be read."""
        return self.file.get_slice(name)

    def close(self) -> None:
        """Give back the memory; the file is opened again when it is needed."""
        self._file = None


Tensors = dict[str, TensorFile]  # tensor name -> the file that holds it


def _tensors_in(folder: Path) -> Tensors:
    if (folder / INDEX_NAME).is_file():
        names = sorted(set(_read_json(folder / INDEX_NAME)["weight_map"].values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        pickled = next(iter(folder.glob("*.bin")), None)
        reason = (
            f"only {pickled.name}, a pickle, which is never loaded; convert it" if pickled else "no model.safetensors"
        )
        raise ValueError(f"{folder} has no safetensors weights: {reason}")
    tensors: Tensors = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is incomplete: {INDEX_NAME} names {name}, which is missing")
        file = TensorFile(folder / name)
        tensors.update(dict.fromkeys(file.file.keys(), file))
    return tensors


def _check_tensors(config: ModelConfig, tensors: Tensors, folder: Path) -> None:
    expected = {name: spec.tensor_shape for spec in spec_leaves(config) for name in spec.tensor_names}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its config.json: {', '.join(missing[:4])} ...")
    for name, shape in expected.items():
        found = tensors[name].get_slice(name).get_shape()
        if found != list(shape):
            raise ValueError(f"{folder}: {name} has shape {found}, config.json says {list(shape)}")
    known = {*expected, *(["lm_head.weight"] if config.tie_embeddings else [])}
    unknown = sorted(name for name in tensors if name not in known and not DERIVED.search(name))
    if unknown:
        raise ValueError(f"{folder} has weights that a {config.model_type} model has no place for: {unknown[:4]}")


def _load(spec: Spec, sharding: Any, tensors: Tensors, dtype: Any) -> jax.Array:
    array = jax.make_array_from_callback(
        spec.shape, sharding, lambda index: _cast(_stored(spec, tensors, index), dtype)
    )
    for name in spec.tensor_names:
        tensors[name].close()
    return array


def _stored(spec: Spec, tensors: Tensors, index: Any) -> np.ndarray:
    """The part of a weight that a tuple of slices says, straight from the files."""
    if spec.is_stacked:
        return np.stack([tensors[name].get_slice(name)[index[1:]] for name in spec.tensor_names[index[0]]])
    if spec.num_rows is not None:
        first, end, _ = index[0].indices(spec.shape[0])
        index = (slice(spec.first_row + first, spec.first_row + end), *index[1:])
    return tensors[spec.name].get_slice(spec.name)[index]


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    return array if dtype is None else array.astype(dtype)


def _save_params(config: ModelConfig, params: Params, folder: Path, dtype: Any) -> None:
    weights: dict[str, list[tuple[Spec, jax.Array]]] = {}  # that are stored together, by the name of their place
    for spec, array in zip(spec_leaves(config), jax.tree.leaves(params), strict=True):
        weights.setdefault(spec.name, []).append((spec, array))
    shards: list[list[str]] = [[]]
    size = total = 0
    for place, parts in weights.items():
        num_bytes = sum(array.size * jnp.dtype(dtype or array.dtype).itemsize for _, array in parts)
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(place)
        size, total = size + num_bytes, total + num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor for place in shard for name, tensor in _tensors_of(weights[place], dtype)}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes files that only their owner can read
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tensors_of(parts: list[tuple[Spec, jax.Array]], dtype: Any) -> list[tuple[str, np.ndarray]]:
    """The checkpoint's tensors that weights of one place make: one each, one for each index of one, or one of all."""
    ordered = sorted(parts, key=lambda part: part[0].first_row)
    arrays = [np.ascontiguousarray(_cast(np.asarray(array), dtype)) for _, array in ordered]
    spec, array = ordered[0][0], arrays[0]
    if spec.is_stacked:
        return list(zip(spec.tensor_names, array, strict=True))
    return [(spec.name, array if len(arrays) == 1 else np.concatenate(arrays))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
