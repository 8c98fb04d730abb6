"""Models and adapters as Hugging Face folders: safetensors in, safetensors out. Never pickle, never remote code."""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from groupax.config import BaseWeights
from groupax.models import bitsandbytes_format, peft_format
from groupax.models.adapted import Frozen, joined
from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.lora import Adapter, LoRAConfig, init_adapter, lora_config
from groupax.models.nf4 import Nf4, nf4_bytes, quantized_nf4
from groupax.models.quantize import dense, quantizer
from groupax.models.specs import (
    Params,
    Spec,
    init_params,
    model_specs,
    num_params,
    param_shardings,
    spec_leaves,
    split_dims,
)
from groupax.models.split import laid_out
from groupax.parallel.mesh import check_divides, mesh_for, sizes_text

INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Tensors that some exporters write and no forward pass needs.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Model:
    """A model in memory: what it is, its weights on the mesh, and the files' settings to be written back.

    Attributes:
        config: the architecture.
        params: the weights (see `models.specs`), an adapter's among them.
        mesh: where they lie.
        hf_config: the parsed `config.json`.
        generation_config: the parsed `generation_config.json`, empty if there was none.
        source: the folder that it came from, where the tokenizer lies too; None for a model made here.
        name: the folder or hub id that it was loaded by; None for a model made here.
        adapter: base and changes, if the model is a base with an adapter.
    """

    config: ModelConfig
    params: Params
    mesh: Mesh
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    source: Path | None = None
    name: str | None = None
    adapter: Adapter | None = None


def init_model(
    hf_config: Mapping[str, Any],
    seed: int = 0,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    replicated: Collection[str] = (),
) -> Model:
    """A model with random weights from the contents of a `config.json`; the rest as in `load_model`."""
    config = read_config(hf_config)
    mesh = mesh or mesh_for(num_params(config) * jnp.dtype(dtype).itemsize)
    check_divides(split_dims(config), mesh, replicated)
    return Model(config, init_params(config, jax.random.key(seed), mesh, dtype), mesh, dict(hf_config), {})


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    weights: BaseWeights = "same",
    base: str | os.PathLike[str] | None = None,
    max_positions: int | None = None,
    replicated: Collection[str] = (),
) -> Model:
    """Load a causal language model from a folder or, if there is none of that name, from the Hugging Face hub.

    Each device receives its part of each tensor straight from the file, so that no host holds a second copy.

    Args:
        name_or_path: a folder with `config.json` and safetensors files, or with a PEFT adapter, or a hub id like
            "Qwen/Qwen3-0.6B".
        dtype: of the weights in memory; None keeps each tensor's own.
        mesh: where to put them; by default a copy on every device (see `parallel.mesh.mesh_for`).
        weights: "int8", "float8" or "nf4" quantize the layers' matrices, each as it is read.
        base: the base of an adapter, if it is not where `adapter_config.json` says.
        max_positions: the longest sequence; None for what `config.json` says, and for the original context if rotary
            embeddings are others beyond it ("longrope"). It decides for all sequences (see `rope.frequencies`).
        replicated: dims that may stay whole on every device if they do not divide by the mesh.

    Raises:
        ValueError: the folder is no model, its config or weights are unsupported, damaged or incomplete, or the mesh
            does not divide it.
        ImportError: 8 bits are asked for and qwix is not installed.
    """
    folder = resolve_folder(name_or_path)
    if (folder / peft_format.CONFIG_NAME).is_file():
        return _load_adapter(
            name_or_path,
            folder,
            base,
            lambda name: load_model(name, dtype, mesh, weights, max_positions=max_positions, replicated=replicated),
        )
    if base is not None:
        raise ValueError(f"{name_or_path} is a model and no adapter; it has no base ({base})")
    hf_config = read_json(folder / "config.json")
    is_nf4 = bitsandbytes_format.is_nf4(hf_config.get("quantization_config"))
    if is_nf4:
        hf_config.pop("quantization_config")
        if weights not in ("same", "nf4"):
            raise ValueError(f"the weights in {folder} are 4-bit ones; they cannot be quantized to {weights}")
    config = read_config(hf_config)
    config = config if max_positions is None else replace(config, max_positions=max_positions)
    mesh = mesh or mesh_for(num_params(config) * 4)
    check_divides(split_dims(config), mesh, replicated)
    if (is_nf4 or weights != "same") and mesh.shape["tp"] * mesh.shape["ep"] > 1:
        raise ValueError(
            f"mesh {sizes_text(mesh)}: quantized weights lie whole on every device and cannot be multiplied in parts; "
            "have tp and ep 1, or the base as it is stored"
        )
    generation_config = {}
    if (folder / "generation_config.json").is_file():
        generation_config = read_json(folder / "generation_config.json")
    tensors = _tensors_in(folder)
    quantized = {name for name in tensors if is_nf4 and f"{name}.{bitsandbytes_format.FURTHER[0]}" in tensors}
    _check_tensors(config, tensors, folder, quantized)
    load = _loader(mesh, tensors, dtype, weights, quantized)
    params = jax.tree.map(load, model_specs(config), param_shardings(config, mesh))
    return Model(config, params, mesh, hf_config, generation_config, folder, _absolute(name_or_path))


def _absolute(name_or_path: str | os.PathLike[str]) -> str:
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if path.is_dir() else str(name_or_path)


def load_adapter(model: Model, name_or_path: str | os.PathLike[str]) -> Model:
    """A model with an adapter of a folder or a hub id; the model's weights are not copied.

    Raises:
        ValueError: it is no adapter, does not fit the model, or the model has one already.
    """
    folder = resolve_folder(name_or_path)
    if not (folder / peft_format.CONFIG_NAME).is_file():
        raise ValueError(f"{name_or_path} is no adapter: it has no {peft_format.CONFIG_NAME}")
    if model.adapter is not None:
        raise ValueError(f"{model.name or 'the model'} has an adapter already; give its base")
    lora = lora_config(read_json(folder / peft_format.CONFIG_NAME))
    _check_dropout(lora, model.mesh)
    trained = peft_format.read_tensors(model.config, lora, folder, _replicated(model.mesh))
    trained = laid_out(model.config, model.mesh, trained)
    adapted = _adapted(model, Adapter(lora, Frozen(model.params, np.float32(lora.scale)), trained, model.name))
    return replace(adapted, name=_absolute(name_or_path))


def _load_adapter(
    name_or_path: str | os.PathLike[str], folder: Path, base: Any, load_base: Callable[[str], Model]
) -> Model:
    settings = read_json(folder / peft_format.CONFIG_NAME)
    named = base or settings.get("base_model_name_or_path")
    if not named:
        raise ValueError(f"{folder / peft_format.CONFIG_NAME} does not say which base the adapter is for; give it")
    try:
        model = load_base(named)
    except ValueError as error:
        raise ValueError(f"the base of the adapter in {folder} cannot be loaded: {error}") from error
    if model.adapter is not None:
        raise ValueError(f"the base of the adapter in {folder}, {named}, is an adapter too; merge it first")
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return replace(load_adapter(model, name_or_path), source=folder if has_tokenizer else model.source)


def add_adapter(model: Model, lora: LoRAConfig, seed: int = 0) -> Model:
    """The model with a new adapter, which changes nothing yet; the base's weights are not copied.

    Raises:
        ValueError: it has an adapter already, or the adapter's settings do not fit it.
    """
    if model.adapter is not None:
        raise ValueError(f"{model.name or 'the model'} has an adapter already; merge it first, or train that one")
    _check_dropout(lora, model.mesh)
    trained = init_adapter(model.config, lora, model.params, jax.random.key(seed), _replicated(model.mesh))
    trained = laid_out(model.config, model.mesh, trained)
    return _adapted(model, Adapter(lora, Frozen(model.params, np.float32(lora.scale)), trained, model.name))


def on_mesh(model: Model, mesh: Mesh, replicated: Collection[str] = ()) -> Model:
    """The model on another mesh.

    Raises:
        ValueError: the mesh does not divide it.
    """
    if mesh == model.mesh:
        return model
    check_divides(split_dims(model.config), mesh, replicated)
    if model.adapter is None:
        return replace(model, params=laid_out(model.config, mesh, model.params), mesh=mesh)
    adapter = model.adapter
    _check_dropout(adapter.config, mesh)
    frozen = replace(adapter.frozen, params=laid_out(model.config, mesh, adapter.frozen.params))
    adapter = replace(adapter, frozen=frozen, trained=laid_out(model.config, mesh, adapter.trained))
    return _adapted(replace(model, params=frozen.params, mesh=mesh), adapter)


def _check_dropout(lora: LoRAConfig, mesh: Mesh) -> None:
    if lora.lora_dropout and mesh.shape["tp"] > 1:
        raise ValueError(
            f"mesh {sizes_text(mesh)}: lora_dropout {lora.lora_dropout} is not built for inputs that are split over "
            "tp; set it to 0, or tp to 1"
        )


def _adapted(model: Model, adapter: Adapter) -> Model:
    like_base = jax.tree.map(lambda x: x.astype(model.params["embed"].dtype), adapter.trained)
    return replace(model, params=joined(adapter.frozen, like_base), adapter=adapter)


def _replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def resolve_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the path itself, or a download from the hub.

    Raises:
        ValueError: it is neither a model folder nor can it be had from the hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / peft_format.CONFIG_NAME).is_file():
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


def save_model(
    model: Model,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    dtype: Any = None,
    weights: Literal["same", "nf4"] = "same",
    card: str | None = None,
) -> Path:
    """Write a folder that `transformers` loads. It appears whole or not at all.

    Args:
        model: the model; quantized weights become numbers again, and an adapter is added to its base.
        folder: replaced if it exists.
        tokenizer: written beside the weights if given.
        dtype: of the weights on disk; None keeps each weight's own.
        weights: "nf4" writes the layers' matrices in 4 bits, as bitsandbytes does.
        card: the `README.md`, if given.

    Raises:
        ValueError: 4 bits are asked of tensors that hold several matrices.
    """
    if weights == "nf4" and model.config.fused_projections:
        raise ValueError(
            f"{model.config.model_type} has several matrices in one tensor; groupax writes no 4 bits of it"
        )
    folder = Path(folder)
    with replacing_folder(folder) as partial:
        dtype_name = jnp.dtype(dtype or model.params["embed"].dtype).name
        hf_config = {key: value for key, value in model.hf_config.items() if key not in ("dtype", "torch_dtype")}
        if weights == "nf4":
            hf_config["quantization_config"] = bitsandbytes_format.quantization_config(dtype_name)
        _write_json(partial / "config.json", {**hf_config, "dtype": dtype_name})
        if model.generation_config:
            _write_json(partial / "generation_config.json", model.generation_config)
        _save_params(model, partial, dtype, weights)
        _write_beside(partial, tokenizer, card)
    return folder


def save_adapter(model: Model, folder: str | os.PathLike[str], tokenizer: Any = None, card: str | None = None) -> Path:
    """Write the model's adapter as a folder that PEFT loads, without the base. It appears whole or not at all.

    Args:
        model: a base with an adapter.
        folder: replaced if it exists.
        tokenizer: written beside it if given.
        card: the `README.md`, if given.
    """
    if model.adapter is None:
        raise ValueError(f"{model.name or 'the model'} has no adapter to be saved")
    folder = Path(folder)
    with replacing_folder(folder) as partial:
        _write_json(partial / peft_format.CONFIG_NAME, peft_format.adapter_json(model.adapter, model.config))
        peft_format.write_tensors(model.config, model.adapter.config, model.adapter.trained, partial)
        _write_beside(partial, tokenizer, card)
    return folder


def _write_beside(folder: Path, tokenizer: Any, card: str | None) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


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

    def get_tensor(self, name: str) -> np.ndarray:
        """A whole tensor."""
        return self.file.get_tensor(name)

    def close(self) -> None:
        """Give back the memory; the file is opened again when it is needed."""
        self._file = None


Tensors = dict[str, TensorFile]  # tensor name -> the file that holds it


def _tensors_in(folder: Path) -> Tensors:
    if (folder / INDEX_NAME).is_file():
        names = sorted(set(read_json(folder / INDEX_NAME)["weight_map"].values()))
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


def _check_tensors(config: ModelConfig, tensors: Tensors, folder: Path, quantized: set[str]) -> None:
    specs = {name: spec for spec in spec_leaves(config) for name in spec.tensor_names}
    missing = [name for name in specs if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its config.json: {', '.join(missing[:4])} ...")
    for name, spec in specs.items():
        if name in quantized:
            if not spec.is_layer_matrix or spec.num_rows is not None:
                raise ValueError(f"{folder}: {name} is a 4-bit weight; groupax reads such only of single matrices")
            continue
        found = tensors[name].get_slice(name).get_shape()
        if found != list(spec.tensor_shape):
            raise ValueError(f"{folder}: {name} has shape {found}, config.json says {list(spec.tensor_shape)}")
    known = {*specs, *(["lm_head.weight"] if config.tie_embeddings else [])}
    known |= {f"{name}.{further}" for name in quantized for further in bitsandbytes_format.FURTHER}
    unknown = sorted(name for name in tensors if name not in known and not DERIVED.search(name))
    if unknown:
        raise ValueError(f"{folder} has weights that a {config.model_type} model has no place for: {unknown[:4]}")


def _loader(
    mesh: Mesh, tensors: Tensors, dtype: Any, weights: BaseWeights, quantized: set[str]
) -> Callable[[Spec, Any], Any]:
    """What loads a weight to its devices; quantized weights are replicated."""
    quantize = None if weights == "same" else jax.jit(quantizer(weights), out_shardings=_replicated(mesh))

    def load(spec: Spec, sharding: Any) -> Any:
        if spec.name in quantized:
            return bitsandbytes_format.read_nf4(
                spec.name, spec.shape, lambda name: tensors[name].get_tensor(name), _replicated(mesh)
            )
        array = _load(spec, sharding, tensors, dtype)
        return array if quantize is None or not spec.is_layer_matrix else jax.block_until_ready(quantize(array))

    return load


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


def _save_params(model: Model, folder: Path, dtype: Any, weights: str) -> None:
    own = model.params["embed"].dtype
    specs, structure = jax.tree.flatten(model_specs(model.config))
    places: dict[str, list[tuple[Spec, Any]]] = {}  # weights that are stored together
    for spec, weight in zip(specs, structure.flatten_up_to(model.params), strict=True):
        places.setdefault(spec.name, []).append((spec, weight))
    shards: list[list[str]] = [[]]
    size = total = 0
    for place, parts in places.items():
        is_nf4 = weights == "nf4" and parts[0][0].is_layer_matrix
        itemsize = jnp.dtype(dtype or own).itemsize
        num_bytes = sum(nf4_bytes(spec.shape) if is_nf4 else math.prod(spec.shape) * itemsize for spec, _ in parts)
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(place)
        size, total = size + num_bytes, total + num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for place in shard:
            tensors |= _tensors_of(places[place], dtype, own, weights)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes files that only their owner can read
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tensors_of(parts: list[tuple[Spec, Any]], dtype: Any, own: Any, weights: str) -> dict[str, np.ndarray]:
    """The checkpoint's tensors that weights of one place make: one each, one for each index of one, or one of all."""
    spec, weight = parts[0]
    if weights == "nf4" and spec.is_layer_matrix:
        quantized = weight if isinstance(weight, Nf4) else jax.jit(quantized_nf4)(dense(weight, jnp.float32))
        return bitsandbytes_format.nf4_tensors(spec.name, quantized, jnp.dtype(dtype or own).name)
    ordered = sorted(parts, key=lambda part: part[0].first_row)
    arrays = [_numbers(weight, dtype, own) for _, weight in ordered]
    if spec.is_stacked:
        return dict(zip(spec.tensor_names, arrays[0], strict=True))
    return {spec.name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)}


def _numbers(weight: Any, dtype: Any, own: Any) -> np.ndarray:
    array = weight if isinstance(weight, jax.Array | np.ndarray) else dense(weight, dtype or own)
    return np.ascontiguousarray(_cast(np.asarray(array), dtype))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
