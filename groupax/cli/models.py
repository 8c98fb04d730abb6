"""Commands for what is on disk: models, checkpoints and reports of runs. Each imports only the modules it needs."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from groupax.core.settings.command_line import Positional, parsed
from groupax.core.settings.optimizer import LoRABias
from groupax.core.terminal.printable import printable
from groupax.runs.model_card import code, shown_name

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print a model's architecture, parameter counts and memory, from its config.json alone."""

    model: Positional[str]
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

    adapter: Positional[str]
    """Folder or hub id of an adapter, in PEFT's format."""
    destination: Positional[Path]
    """Destination folder. A model that groupax wrote there is replaced; a folder with other files is refused."""
    base: str | None = None
    """Folder or hub id of the base, if it is not the one that the adapter's config names."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default that of the base."""


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a model to another dtype, in safetensors files of at most 5 GB; quantized weights are dequantized."""

    model: Positional[str]
    """Folder or Hugging Face Hub id."""
    destination: Positional[Path]
    """Destination folder. A model that groupax wrote there is replaced; a folder with other files is refused."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default that of the model."""


@dataclass(frozen=True, kw_only=True)
class Quantize(Convert):
    """Quantize the matrices of a model's layers to bitsandbytes' nf4, which groupax and transformers load. An adapter
    is merged."""

    model: Positional[str]
    """Folder or Hugging Face Hub id; an adapter is merged."""
    dtype: Dtype = "bfloat16"
    """Dtype of the other weights."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload the folder of a model or an adapter to the Hugging Face Hub, with the token in HF_TOKEN."""

    folder: Positional[Path]
    """Folder to upload."""
    repo_id: Positional[str]
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
    model = _loaded(command.destination, command.adapter, command.base)
    if model.adapter is None:
        raise ValueError(f"{command.adapter} is a model and not an adapter; there is nothing to merge (see convert)")
    base = model.adapter.base_name
    how = f"The LoRA adapter {code(shown_name(command.adapter))}, merged into its base {code(shown_name(base))}."
    _write(model, command.destination, command.dtype, how, base, command.adapter)


def convert(arguments: Sequence[str]) -> None:
    """Runs `groupax convert`."""
    command = parsed(Convert, "convert", arguments)
    model = _loaded(command.destination, command.model)
    if model.adapter is not None:
        raise ValueError(f"{command.model} is an adapter; use merge to add it to its base")
    how = f"{code(shown_name(command.model))}, converted."
    _write(model, command.destination, command.dtype, how, command.model, command.model)


def quantize(arguments: Sequence[str]) -> None:
    """Runs `groupax quantize`."""
    command = parsed(Quantize, "quantize", arguments)
    model = _loaded(command.destination, command.model)
    how = f"{code(shown_name(command.model))} with its layers' matrices in 4 bits (nf4, double quantization)."
    _write(model, command.destination, command.dtype, how, command.model, command.model, weights="nf4")


def push(arguments: Sequence[str]) -> None:
    """Runs `groupax push`."""
    command = parsed(Push, "push", arguments)

    from groupax.core.storage.hub import push_folder

    print(f"{command.folder} is at {push_folder(command.folder, command.repo_id, private=not command.public)}")


def _loaded(destination: Path, source: str, base: str | None = None) -> Any:
    """Returns a model or an adapter, after refusing a destination that it cannot be written to."""
    from groupax.core.storage.replacing import check_destination
    from groupax.models.weights.checkpoint import load_model

    paths = [Path(each).expanduser() for each in (source, base) if each is not None]
    check_destination(destination, [path for path in paths if path.is_dir()])
    return load_model(source, base=base)


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


@dataclass(frozen=True)
class Checkpoints:
    """List a run's checkpoints, check their files, delete one, or export one as a Hugging Face folder."""

    run_dir: Positional[str]
    """Run folder or URL, or one of its checkpoints."""
    action: Positional[Literal["list", "verify", "delete", "export"]] = "list"
    """The action is to list them with their metrics, verify the checksums of their files, delete one, or export one."""
    step: Positional[int | None] = None
    """Step of the checkpoint to delete or export; the default for export is the newest."""
    to: Path | None = None
    """Folder to export the model to."""


def checkpoints(arguments: Sequence[str]) -> None:
    """Runs `groupax checkpoints`."""
    command = parsed(Checkpoints, "checkpoints", arguments)

    from groupax.core.storage.buckets import is_remote
    from groupax.core.storage.folders import run_folder_in
    from groupax.runs.checkpoints.choose import split_path, store_of
    from groupax.runs.checkpoints.store import damage
    from groupax.runs.ending import ending_of

    run, step = split_path(command.run_dir)
    with tempfile.TemporaryDirectory() as scratch:
        store = store_of(run, Path(scratch))
        steps = store.steps()
        end = "" if is_remote(run) else ending_of(run_folder_in(Path(run).expanduser())).sentence
        ended = printable(f"how the run ended: {end}") if end else ""
        if not steps:
            raise ValueError(f"{run} has no checkpoints" + (f"; {ended}" if ended else ""))
        chosen = command.step if command.step is not None else step
        if chosen is not None and chosen not in steps:
            raise ValueError(f"{run} has no checkpoint of step {chosen}; it has {', '.join(map(str, steps))}")
        match command.action:
            case "list":
                for each in steps:
                    print(_about_checkpoint(each, store.state(each)))
                if ended:
                    print(f"\n{ended}")
                print(f"\nto check their files: groupax checkpoints {command.run_dir} verify")
            case "verify":
                found = {each: damage(store.local(each)) for each in steps}
                for each, fault in found.items():
                    print(printable(f"step {each:6d}  {'whole' if fault is None else f'DAMAGED: {fault}'}"))
                if num_damaged := sum(fault is not None for fault in found.values()):
                    raise ValueError(f"{num_damaged} of {len(found)} checkpoints in {command.run_dir} are damaged")
            case "delete":
                if chosen is None:
                    raise ValueError(f"which one? groupax checkpoints {command.run_dir} delete STEP")
                store.delete(chosen)
                print(f"deleted {store.where(chosen)}")
            case "export":
                from groupax.runs.checkpoints.export import export

                if command.to is None:
                    raise ValueError("where to? give --to FOLDER")
                chosen = steps[-1] if chosen is None else chosen
                folder = export(store, chosen, command.to)
                print(f"the model of {store.where(chosen)} is in {folder}")


def _about_checkpoint(step: int, state: Mapping[str, Any]) -> str:
    """Returns a line about a checkpoint by its `state.json`."""
    metrics = state.get("metrics", {})
    shown = (name for name in ("reward", "eval_reward", "loss", "eval_loss", "kl") if name in metrics)
    values = "  ".join(f"{name} {metrics[name]:.4g}" for name in shown)
    where = "within the updates on a rollout" if state.get("rollout") is not None else ""
    return printable(
        f"step {step:6d}  {state.get('saved_at') or 'state.json cannot be read'}  {values}  {where}".rstrip()
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report, for example for a pull request: report.md, with curves as lines of characters."""

    run_dir: Positional[Path]
    """The run's folder."""
    to: Path | None = None
    """Folder for the report; by default the run's."""


def report(arguments: Sequence[str]) -> None:
    """Runs `groupax report`."""
    command = parsed(Report, "report", arguments)

    from groupax.runs.report import write_report

    print(f"report: {write_report(command.run_dir, command.to)}")


@dataclass(frozen=True, kw_only=True)
class Annotate:
    """Give a run a name, tags and notes, which groupax view shows, or print them; options that are left out stay."""

    run_dir: Positional[Path]
    """The run's folder."""
    name: str | None = None
    """Name to show in place of the folder's; "" removes it."""
    tags: tuple[str, ...] | None = None
    """Words to filter the list of runs by, in place of the earlier ones."""
    notes: str | None = None
    """Text about the run; "" removes it."""


def note(arguments: Sequence[str]) -> None:
    """Runs `groupax note`."""
    command = parsed(Annotate, "note", arguments)

    from groupax.core.storage.folders import run_folder_in
    from groupax.runs.note import check_run, read_note, write_note

    folder = run_folder_in(command.run_dir.expanduser())
    check_run(folder)
    changed = {key: value for key in ("name", "tags", "notes") if (value := getattr(command, key)) is not None}
    if changed:
        write_note(folder, replace(read_note(folder), **changed))
    found = read_note(folder)
    print(printable(f"name   {found.name}\ntags   {' '.join(found.tags)}\nnotes  {found.notes}"))
