"""The commands about models on disk: inspect, merge, convert, quantize, push. Each imports what it needs."""

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
    """Tell what a model is and what it takes, from its config.json alone."""

    model: Annotated[str, Given]
    """A folder, a config.json, or a Hugging Face hub id."""
    lora_r: int = 0
    """Count the trained parameters of a LoRA adapter of this rank."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that it adapts."""
    lora_bias: LoRABias = "none"
    """Biases that are trained too."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules whose weights are trained whole."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Add an adapter to its base, and write the sum as a model that transformers loads."""

    adapter: Annotated[str, Given]
    """A folder or hub id with an adapter, as groupax and PEFT write them."""
    folder: Annotated[Path, Given, tyro.conf.arg(metavar="DESTINATION")]
    """Where to write. A model that groupax wrote there is replaced; a folder with other files is refused."""
    base: str | None = None
    """The base, if it is not where the adapter's config says."""
    dtype: Dtype | None = None
    """Of the weights; by default the base's own."""


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a model anew: in another dtype, in safetensors of at most 5 GB, quantized weights as numbers."""

    model: Annotated[str, Given]
    """A folder or a Hugging Face hub id."""
    folder: Annotated[Path, Given, tyro.conf.arg(metavar="DESTINATION")]
    """Where to write. A model that groupax wrote there is replaced; a folder with other files is refused."""
    dtype: Dtype | None = None
    """Of the weights; by default the model's own."""


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Write a model with its layers' matrices in nf4, as bitsandbytes does; groupax and transformers load it."""

    model: Annotated[str, Given]
    """A folder or a Hugging Face hub id; an adapter is merged."""
    folder: Annotated[Path, Given, tyro.conf.arg(metavar="DESTINATION")]
    """Where to write. A model that groupax wrote there is replaced; a folder with other files is refused."""
    dtype: Dtype = "bfloat16"
    """Of the other weights."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload a model's or an adapter's folder to the Hugging Face hub. The token is that of HF_TOKEN."""

    folder: Annotated[Path, Given]
    """What to upload."""
    repo_id: Annotated[str, Given]
    """owner/name."""
    public: bool = False
    """Let everybody see the repository, if it is new."""


def inspect(arguments: Sequence[str]) -> None:
    """`groupax inspect`."""
    command = parsed(Inspect, "inspect", arguments)

    from groupax.models.lora import LoRAConfig
    from groupax.models.summary import find_config, summarize

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
    """`groupax merge`."""
    command = parsed(Merge, "merge", arguments)

    from groupax.models.checkpoint import load_model

    _check_folder(command.folder, command.adapter, command.base)
    model = load_model(command.adapter, base=command.base)
    if model.adapter is None:
        raise ValueError(f"{command.adapter} is a model and no adapter; there is nothing to merge (see convert)")
    base = model.adapter.base_name
    how = f"The LoRA adapter {code(shown_name(command.adapter))}, merged into its base {code(shown_name(base))}."
    _write(model, command.folder, command.dtype, how, base, command.adapter)


def convert(arguments: Sequence[str]) -> None:
    """`groupax convert`."""
    command = parsed(Convert, "convert", arguments)

    from groupax.models.checkpoint import load_model

    _check_folder(command.folder, command.model)
    model = load_model(command.model)
    if model.adapter is not None:
        raise ValueError(f"{command.model} is an adapter; use merge to add it to its base")
    how = f"{code(shown_name(command.model))}, converted."
    _write(model, command.folder, command.dtype, how, command.model, command.model)


def quantize(arguments: Sequence[str]) -> None:
    """`groupax quantize`."""
    command = parsed(Quantize, "quantize", arguments)

    from groupax.models.checkpoint import load_model

    _check_folder(command.folder, command.model)
    model = load_model(command.model)
    how = f"{code(shown_name(command.model))} with its layers' matrices in 4 bits (nf4, double quantization)."
    _write(model, command.folder, command.dtype, how, command.model, command.model, weights="nf4")


def push(arguments: Sequence[str]) -> None:
    """`groupax push`."""
    command = parsed(Push, "push", arguments)

    from groupax.storage.hub import push_folder

    print(f"{command.folder} is at {push_folder(command.folder, command.repo_id, private=not command.public)}")


def _check_folder(folder: Path, *sources: str | None) -> None:
    """Refuses where to write, if a model cannot be written there, before one is loaded."""
    from groupax.storage.replacing import check_destination

    paths = [Path(source).expanduser() for source in sources if source is not None]
    check_destination(folder, [path for path in paths if path.is_dir()])


def _write(
    model: Any, folder: Path, dtype: Dtype | None, how: str, base: str | None, source: str, weights: Any = "same"
) -> None:
    """Write the model with its tokenizer and a card."""
    from groupax.data.tokenizer import load_tokenizer
    from groupax.models.saving import save_model
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
