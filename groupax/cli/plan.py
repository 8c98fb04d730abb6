"""The command `groupax plan`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from groupax.config import GRPOConfig
from groupax.planning.devices import prepare
from groupax.recipes import Recipe
from groupax.settings.command_line import parsed


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Tell what a run takes on devices that need not be here, and whether it fits.

    Prompts and completions are taken to be as long as they may become. Settings come from the recipe, then from
    --config, then from the flags, as those of groupax train do.
    """

    model: str | None = None
    """A folder, a config.json, or a Hugging Face hub id, of which no more is read than config.json."""
    devices: str | None = None
    """A TPU slice, as v4-64, v5e-32, v5p-128 or v6e-16, or virtual devices of this CPU, as cpu:8."""
    libtpu: Path = Path("build/libtpu")
    """The folder that libtpu was installed into (pip install --no-deps --target build/libtpu libtpu), where it is not
    installed beside jax."""
    json: Path | None = None
    """A file for the same as numbers."""
    recipe: str | None = None
    """Defaults of a known task."""
    config: Path | None = None
    """A YAML file with settings."""
    args: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=GRPOConfig)
    """Settings of the run."""


def plan(arguments: Sequence[str], model_name: str | None, defaults: GRPOConfig, task: Recipe | None = None) -> int:
    """`groupax plan`; the status is 1 if it does not fit.

    Args:
        arguments: its words.
        model_name: the model if they give none; None for no such.
        defaults: what settings are that are not given.
        task: the recipe that they are of, whose defaults are fitted to the model.

    Raises:
        ValueError: there is no such model, there are no such devices, or the settings are refused or not planned for.
    """
    default = PlanCommand(model=model_name, args=defaults)
    command = parsed(PlanCommand, "plan", arguments, default)
    args = command.args
    if command.model is None or command.devices is None:
        raise ValueError("give a model and devices, e.g. --model Qwen/Qwen3-8B --devices v5e-32")
    prepare(command.devices, command.libtpu)

    from groupax.models.bitsandbytes_format import without_nf4
    from groupax.models.families import read_config
    from groupax.models.summary import find_config
    from groupax.planning.fitting import Asked, fitting_plan, plan_of
    from groupax.planning.measured import Compiler
    from groupax.planning.tables import record_of, text_of, verdict
    from groupax.recipes.fit import fitted
    from groupax.runs.build import lora_for

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    stored, lora = find_config(command.model)
    hf_config = without_nf4(stored)
    model, lora, compiler = read_config(hf_config), lora or lora_for(args, None), Compiler()
    if hf_config != stored:
        if lora is None:
            raise ValueError(f"the weights of {command.model} are 4-bit ones; train an adapter: set lora_r, e.g. to 16")
        tell("the base has 4-bit weights; they are planned as if they were not quantized, which takes more memory")
    if task is not None:
        args, notes = fitted(args, task, model.max_positions)
        for note in notes:
            tell(note)
    asked = plan_of(model, Asked(command.devices, args), lora, compiler, tell)
    print(text_of(asked))
    plans = [asked]
    if not asked.fits:
        found = fitting_plan(model, asked, lora, compiler, tell)
        if found is None:
            print("\nno change of a few settings makes it fit")
        else:
            plans.append(found)
            print(f"\nwith {', '.join(found.asked.changes)} it {verdict(found)}\n\n{text_of(found)}")
    if command.json is not None:
        command.json.write_text(json.dumps([record_of(each) for each in plans], indent=1) + "\n", encoding="utf-8")
    return 0 if asked.fits else 1
