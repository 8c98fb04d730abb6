"""`groupax init`: writes a YAML file of settings, with comments, for `groupax train --config`."""

import os
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from groupax.cli.train import Train, train_defaults
from groupax.core.config import GRPOConfig
from groupax.core.settings.command_line import Option, Positional, common_options, options, parsed, parts, title
from groupax.core.terminal.printable import printable

WIDTH = 100
# What the file shows for options without a default.
EXAMPLES = {
    "recipe": "gsm8k",
    "model": "Qwen/Qwen3-0.6B",
    "dataset": "prompts.jsonl",
    "eval_dataset": ["held_out.jsonl"],
    "reward_funcs": ["my_rewards:reward"],
    "tools": ["my_tools:search"],
    "environments": ["my_environments:Game"],
    "report_to": ["wandb"],
}
REQUIRED = ("model", "dataset", "reward_funcs")


@dataclass(frozen=True, kw_only=True)
class Init(Train):
    """Write a YAML file with the settings of a run, each with its description, for groupax train --config: run.yaml, or
    the file that is named first. The options are those of groupax train."""

    file: Positional[Path] = Path("run.yaml")
    """File to write; it must not exist yet."""
    all: bool = False
    """Describe every setting, not only those that most runs set."""


def init(arguments: Sequence[str]) -> None:
    """Runs `groupax init`."""
    command = parsed(Init, "init", arguments, Init(**vars(train_defaults(arguments))))
    text = run_yaml(command)
    try:
        with command.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ValueError(f"{command.file} exists; name another file: groupax init FILE") from error
    except OSError as error:
        raise ValueError(f"{command.file} cannot be written: {error}") from error
    path = shlex.quote(os.fspath(command.file))
    print(printable(f"written: {command.file}\n  groupax train --config {path}"))


def run_yaml(command: Init) -> str:
    """Returns the settings of a run as YAML, with comments."""
    train = Train(**{each.name: getattr(command, each.name) for each in fields(Train)})
    usual = vars(GRPOConfig())
    changed = {name for name, value in vars(train.args).items() if value != usual[name]}
    topics = common_options(train)
    topics["Task"] = [option for option in topics["Task"] if option.name != "config"]
    written = {option.name for each in topics.values() for option in each}
    rest = {title(part): [o for o in options(part()) if o.name not in written] for part in parts(GRPOConfig)}
    own = [option for option in options(train.args) if option.name in changed and option.name not in written]
    if own:
        topics["Other settings that are not the defaults"] = own
    lines = ["# Settings of a run: groupax train --config FILE. Flags of the command line take precedence."]
    for topic, each in topics.items():
        lines += ["", f"# ---- {topic} ----", *_entries(each, is_recipe=command.recipe is not None)]
    if command.all:
        lines += ["", "# ==== All other settings, with their defaults ===="]
        for topic, each in rest.items():
            commented = [option for option in each if option.name not in changed]
            if commented:
                lines += ["", f"# ---- {topic} ----", *_defaults(commented)]
    return "\n".join(lines) + "\n"


def _entries(found: Iterable[Option], is_recipe: bool) -> Iterator[str]:
    """Yields the lines of options: those that have a value, and the others as comments."""
    for option in found:
        yield from _comment(option)
        if option.value is not None and option.value != ():
            yield f"{option.name}: {_yaml(option.value)}"
        elif option.name in REQUIRED and not is_recipe:
            yield f"{option.name}: {_yaml(EXAMPLES[option.name])}"
        else:
            yield f"# {option.name}: {_yaml(EXAMPLES.get(option.name, option.value))}".rstrip()


def _defaults(found: Iterable[Option]) -> Iterator[str]:
    for option in found:
        yield from _comment(option)
        yield f"# {option.name}: {_yaml(option.value)}"


def _comment(option: Option) -> list[str]:
    """Returns an empty line and the description of an option."""
    return ["", *textwrap.wrap(option.text, WIDTH, initial_indent="# ", subsequent_indent="# ")]


def _yaml(value: Any) -> str:
    """Returns a value in YAML's flow style, on one line."""
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
