"""TRL's `model_init_kwargs`: what of them names the model, what is quiet, and what is refused."""

from pathlib import Path
from typing import Any

from groupax.compat import hf
from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.settings.fields import nearest, shown
from groupax.storage.folders import at_revision

# Arguments of transformers' `from_pretrained` without effect, besides those of `hf.INERT`.
_INERT = {
    "cache_dir": "the hub's cache is chosen by HF_HUB_CACHE",
    "local_files_only": "the hub's client is offline with HF_HUB_OFFLINE=1",
    "force_download": "files are downloaded once; remove them from the hub's cache to download them again",
    "resume_download": "interrupted downloads always continue",
    "proxies": "the hub's client reads HTTPS_PROXY",
    "use_kernels": "programs are compiled by XLA",
    "disable_mmap": "weights are read straight to the devices",
    "weights_only": "weights are always safetensors",
    "offload_folder": "weights are put on all devices",
    "offload_state_dict": "weights are read straight to the devices",
    "offload_buffers": "weights are put on all devices",
    "experts_implementation": "experts are computed by groupax's own kernels",
}
# Arguments that change which model is trained, and what to do instead.
_REFUSED = {
    "config": "the model's own config.json counts; edit a copy of the folder",
    "subfolder": "download the repository and name the subfolder as the model",
    "variant": "only the files without a variant are read; convert the model into a folder of its own",
    "gguf_file": "convert the file to safetensors, and name that folder as the model",
    "adapter_kwargs": "load the adapter with compat.hf.PeftModel.from_pretrained, and pass the model",
    "code_revision": "groupax never runs code from a model's folder; leave it out",
    "ignore_mismatched_sizes": "all weights must have the sizes of config.json; leave it out",
    "from_tf": "only safetensors are read; convert the model",
    "from_flax": "only safetensors are read; convert the model",
    "key_mapping": "weights must have the names of their family; convert the model",
    "tp_plan": "set the mesh: parallelism_config has tp_size",
    "output_loading_info": "the trainer loads the model itself; leave it out",
    "state_dict": "pass a model object instead of its name",
}
_EXACT_DTYPES = ("float32", "auto", "None")  # with which TRL trains float32 weights, as groupax does


def resolve_model(model: Any, args: TrainingArguments, quantization_config: Any) -> tuple[Any, Any]:
    """Returns the model with its revision, and its quantization.

    Args:
        model: Model, or its folder or hub id, which `model_init_kwargs` apply to.
        args: Arguments with `model_init_kwargs`.
        quantization_config: The trainer's argument of that name.

    Raises:
        ValueError: An argument changes which model is trained in a way that groupax cannot honour, or is unknown.
    """
    given = dict(parse_mapping(getattr(args, "model_init_kwargs", None), "model_init_kwargs"))
    quantized = given.pop("quantization_config", None)
    if quantization_config is not None and quantized is not None:
        raise ValueError("quantization_config is given twice: to the trainer and in model_init_kwargs")
    given.pop("attn_implementation", None)  # read by `GRPOConfig.to_native`
    revision = given.pop("revision", None)
    for name, value in given.items():
        _check(name, value)
    is_named = isinstance(model, (str, Path))
    if given and not is_named:
        warn("model_init_kwargs change nothing: the model is already loaded")
    named = at_revision(str(model), revision) if is_named and revision not in (None, "main") else model
    return named, quantized if quantization_config is None else quantization_config


def _check(name: str, value: Any) -> None:
    """Warns about an argument without effect, and refuses one that cannot be honoured."""
    if value is None or value is False:  # transformers' defaults
        known = {*_INERT, *_REFUSED, *hf.INERT, "dtype", "torch_dtype"}
        if name not in known:
            raise ValueError(f"model_init_kwargs has {name!r}{nearest(name, known)}")
        return
    if name in _REFUSED:
        raise ValueError(f"model_init_kwargs {name}={shown(value)} is not supported: {_REFUSED[name]}")
    if name in ("dtype", "torch_dtype"):
        if str(value).removeprefix("torch.") not in _EXACT_DTYPES:
            reason = "master weights are float32, and bf16 chooses the dtype of the computation"
            warn(f"model_init_kwargs {name}={value!r} changes nothing in groupax: {reason}")
        return
    inert = _INERT | hf.INERT
    if name not in inert:
        raise ValueError(
            f"model_init_kwargs has {name!r}; groupax cannot tell what it would change in the model, so load the model "
            f"with transformers and pass the object{nearest(name, inert)}"
        )
    warn(f"model_init_kwargs {name}={value!r} changes nothing in groupax: {inert[name]}")
