"""Commands for models on disk: inspect, merge, convert, quantize, push. Each imports only the modules it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from groupax.runs.model_card import code, shown_name
from groupax.settings.adapter import LoRABias
from groupax.settings.command_line import parsed
from groupax.terminal.printable import printable

Dtype = Literal["float32", "bfloat16", "float16"]
Given = tyro.conf.Positional


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print a model's architecture, parameter counts and memory, from its config.json alone."""

    model: Annotated[str, Given]
    """Folder, config.json, or Hugging Face Hub id."""
    lora_r: int = 0
    """Count the trained parameters of a LoRA adapter of this rank; 0 for none."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules to adapt."""
    lora_bias: LoRABias = "none"
    """Biases to train in addition."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules whose weights are trained in full."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Merge an adapter into its base, and write the result as a model that transformers loads."""

    adapter: Annotated[str, Given]
    """Folder or hub id of an adapter, in PEFT's format."""
    folder: Annotated[Path, Given, tyro.conf.arg(metavar="DESTINATION")]
    """Destination folder. A model that groupax wrote there is replaced; a folder with other files is refused."""
    base: str | None = None
    """Folder or hub id of the base, if it is not the one that the adapter's config names."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default that of the base."""


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a model to another dtype, in safetensors files of at most 5 GB; quantized weights are dequantized."""

    model: Annotated[str, Given]
    """Folder or Hugging Face Hub id."""
    folder: Annotated[Path, Given, tyro.conf.arg(metavar="DESTINATION")]
    """Destination folder. A model that groupax wrote there is replaced; a folder with other files is refused."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default that of the model."""


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Quantize the matrices of a model's layers to bitsandbytes' nf4, which groupax and transformers load."""

    model: Annotated[str, Given]
    """Folder or Hugging Face Hub id; an adapter is merged."""
    folder: Annotated[Path, Given, tyro.conf.arg(metavar="DESTINATION")]
    """Destination folder. A model that groupax wrote there is replaced; a folder with other files is refused."""
    dtype: Dtype = "bfloat16"
    """Dtype of the other weights."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload the folder of a model or an adapter to the Hugging Face Hub, with the token in HF_TOKEN."""

    folder: Annotated[Path, Given]
    """Folder to upload."""
    repo_id: Annotated[str, Given]
    """Repository to create or update, as owner/name."""
    public: bool = False
    """Create a new repository as public; an existing one stays as it is."""


def inspect(arguments: Sequence[str]) -> None:
    """Runs `groupax inspect`."""
    command = parsed(Inspect, "inspect", arguments)

    from groupax.models.flops import find_config, summarize
    from groupax.models.lora import LoRAConfig

    hf_config, lora = find_config(command.model)
    if command.lora_r:
        lora = LoRAConfig(
            r=command.lora_r,
            target_modules=command.lora_target_modules,
            bias=command.lora_bias,
            modules_to_save=command.lora_modules_to_save,
        )
    print(printable(summarize(hf_config, lora)))


def merge(arguments: Sequence[str]) -> None:
    """Runs `groupax merge`."""
    command = parsed(Merge, "merge", arguments)

    from groupax.models.weights.checkpoint import load_model

    _check_folder(command.folder, command.adapter, command.base)
    model = load_model(command.adapter, base=command.base)
    if model.adapter is None:
        raise ValueError(f"{command.adapter} is a model and not an adapter; there is nothing to merge (see convert)")
    base = model.adapter.base_name
    how = f"The LoRA adapter {code(shown_name(command.adapter))}, merged into its base {code(shown_name(base))}."
    _write(model, command.folder, command.dtype, how, base, command.adapter)


def convert(arguments: Sequence[str]) -> None:
    """Runs `groupax convert`."""
    command = parsed(Convert, "convert", arguments)

    from groupax.models.weights.checkpoint import load_model

    _check_folder(command.folder, command.model)
    model = load_model(command.model)
    if model.adapter is not None:
        raise ValueError(f"{command.model} is an adapter; use merge to add it to its base")
    how = f"{code(shown_name(command.model))}, converted."
    _write(model, command.folder, command.dtype, how, command.model, command.model)


def quantize(arguments: Sequence[str]) -> None:
    """Runs `groupax quantize`."""
    command = parsed(Quantize, "quantize", arguments)

    from groupax.models.weights.checkpoint import load_model

    _check_folder(command.folder, command.model)
    model = load_model(command.model)
    how = f"{code(shown_name(command.model))} with its layers' matrices in 4 bits (nf4, double quantization)."
    _write(model, command.folder, command.dtype, how, command.model, command.model, weights="nf4")


def push(arguments: Sequence[str]) -> None:
    """Runs `groupax push`."""
    command = parsed(Push, "push", arguments)

    from groupax.storage.hub import push_folder

    print(f"{command.folder} is at {push_folder(command.folder, command.repo_id, private=not command.public)}")


def _check_folder(folder: Path, *sources: str | None) -> None:
    """Refuses a destination that a model cannot be written to, before one is loaded."""
    from groupax.storage.replacing import check_destination

    paths = [Path(source).expanduser() for source in sources if source is not None]
    check_destination(folder, [path for path in paths if path.is_dir()])


def _write(
    model: Any, folder: Path, dtype: Dtype | None, how: str, base: str | None, source: str, weights: Any = "same"
) -> None:
    """Writes the model with its tokenizer and a card."""
    from groupax.data.tokenizer import load_tokenizer
    from groupax.models.weights.saving import save_model
    from groupax.runs.model_card import derived_card, read_card

    try:
        tokenizer = load_tokenizer(model.source)
    except ValueError as error:
        print(f"the model is written without a tokenizer: {error}")
        tokenizer = None
    of_source = Path(source).expanduser()
    card = read_card(of_source if of_source.is_dir() else model.source)
    text = derived_card(how, base, card, bool(tokenizer is not None and tokenizer.chat_template))
    print(f"written: {save_model(model, folder, tokenizer, dtype, weights, text)}")
