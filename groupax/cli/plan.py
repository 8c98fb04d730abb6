"""The command `groupax plan`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from groupax.cli.train import train_defaults
from groupax.core.config import GRPOConfig
from groupax.core.settings.command_line import parsed
from groupax.recipes import load_recipe
from groupax.satellites.planning.devices import prepare


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Estimate a run's memory and step time on absent devices, and whether it fits.

    All prompts and completions are assumed to have their maximum length. Flags override --config, which overrides the
    recipe, as for groupax train.
    """

    model: str | None = None
    """Folder, config.json or Hugging Face hub id of the model; only config.json is read."""
    devices: str | None = None
    """NVIDIA GPUs (a kind and a number of them, e.g. rtx4090-1, h100-8, or h100-64 for hosts with 8 each; or figures,
    e.g. custom:24GB,1008GB/s,165TF-1), a TPU slice (e.g. v4-64, v5e-32, v5p-128 or v6e-16), or virtual CPU devices
    (e.g. cpu:8)."""
    libtpu: Path = Path("build/libtpu")
    """Folder that libtpu was installed into (pip install --no-deps --target build/libtpu libtpu), if not with jax."""
    cuda: Path = Path("build/cuda")
    """Folder that jax's CUDA plugin was installed into (pip install --no-deps --target build/cuda jax-cuda13-plugin
    jax-cuda13-pjrt nvidia-cudnn-cu13, the first two in jax's version), if not with jax by .[cuda13]; it needs neither a
    GPU nor a driver."""
    all_layers: bool = False
    """Compile programs with all layers of the model, which takes minutes for some. By default, programs that are not
    loops over layers are compiled with two and four layers of each kind, from which the others are extrapolated."""
    json: Path | None = None
    """File to which the plan is written as JSON."""
    recipe: str | None = None
    """Defaults of a known task."""
    config: Path | None = None
    """A YAML file with settings."""
    args: GRPOConfig = field(default_factory=GRPOConfig)
    """Settings of the run."""


def plan(arguments: Sequence[str]) -> int:
    """Runs `groupax plan` with the defaults of `groupax train`; the exit status is 1 if the run does not fit."""
    defaults = train_defaults(arguments)
    task = load_recipe(defaults.recipe) if defaults.recipe else None
    default = PlanCommand(model=defaults.model or (task and task.model), args=defaults.args)
    command = parsed(PlanCommand, "plan", arguments, default)
    if command.model is None or command.devices is None:
        raise ValueError("give a model and devices, e.g. --model Qwen/Qwen3-8B --devices h100-8")
    prepare(command.devices, command.libtpu, command.cuda)

    from rich.console import Console

    from groupax.core.terminal.activities import Activities
    from groupax.models.families import read_config
    from groupax.models.flops import find_config
    from groupax.models.weights.nf4 import without_nf4
    from groupax.recipes.recipe import fit_config
    from groupax.runs.build import lora_for
    from groupax.satellites.planning.fitting import Request, find_fitting_plan, make_plan
    from groupax.satellites.planning.measured import Compiler
    from groupax.satellites.planning.tables import format_plan, plan_record, verdict

    activities = Activities(Console(stderr=True))
    args, compiler = command.args, Compiler(command.all_layers)
    stored, lora = find_config(command.model)
    hf_config, lora = without_nf4(stored), lora or lora_for(args, None)
    if hf_config != stored:
        if lora is None:
            raise ValueError(f"the weights of {command.model} have 4 bits; train an adapter: set lora_r, e.g. to 16")
        args = replace(args, base_weights="nf4")
    model = read_config(hf_config)
    if task is not None:
        args, notes = fit_config(args, task, model.max_positions)
        for note in notes:
            _log(note)
    requested = make_plan(
        model,
        Request(command.devices, args),
        lora,
        compiler,
        activities,
        on_estimate=lambda plan: print(format_plan(plan), flush=True),
    )
    print(f"\n{format_plan(requested)}")
    plans = [requested]
    if not requested.fits:
        found = find_fitting_plan(model, requested, lora, compiler, activities)
        if found is None:
            print("\nno change of a few settings makes it fit")
        else:
            plans.append(found)
            print(f"\nwith {', '.join(found.request.changes)} it {verdict(found)}\n\n{format_plan(found)}")
    if command.json is not None:
        records = [plan_record(each) for each in plans]
        command.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0 if requested.fits else 1


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
