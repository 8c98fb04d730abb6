"""`groupax train` and `groupax resume`: their options, from recipes, files and flags, and what they do."""

import argparse
import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from groupax import __version__
from groupax.cli.agents import Agents, chosen_agents
from groupax.cli.plan import plan
from groupax.config import NAMES_ELSEWHERE, GRPOConfig, hint_for
from groupax.events import Message, PhaseStarted
from groupax.parallel import processes
from groupax.parallel.preemption import before_training
from groupax.recipes import RECIPES, Recipe, load_recipe
from groupax.runs.diagnostics import reward_diagnostics
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import progress_named
from groupax.settings.command_line import parsed
from groupax.settings.fields import nearest

if TYPE_CHECKING:
    from groupax.trainer import GRPOTrainer


LISTS = ("reward_funcs", "eval_dataset", "tools", "environments")  # options of the command that are lists of texts


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model with GRPO. Settings come from the recipe, then from --config, then from the flags."""

    recipe: str | None = None
    """Known task that supplies data, rewards, default settings and model."""
    config: Path | None = None
    """A YAML file with any of these settings."""
    model: str | None = None
    """A folder or a Hugging Face hub id."""
    dataset: str | None = None
    """Training prompts: a .jsonl, .json, .csv or .parquet file, a pattern of such files, a folder or a hub id. A recipe
    turns its rows into prompts."""
    eval_dataset: tuple[str, ...] | None = None
    """Held-out prompts to evaluate before and after training: one or several sets, each SOURCE or NAME=SOURCE. With a
    recipe the default is the test split of its dataset."""
    reward_funcs: tuple[str, ...] | None = None
    """Reward functions: names of built-in ones, or module:function. Environments have rewards of their own."""
    tools: tuple[str, ...] | None = None
    """Functions that the model may call, as module:function, or module:maker(option=1) for what a function returns.
    With a recipe the default is its own; without any value there are none."""
    environments: tuple[str, ...] | None = None
    """Environment of the episodes, as module:Class or module:maker(option=1); of several, each as name=module:Class,
    with the name in the dataset's column environment. The default is as for the tools."""
    args: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=GRPOConfig)
    """Settings of the run."""


@dataclass(frozen=True, kw_only=True)
class Resume(Train):
    """Continue a run that was stopped, with the command that started it. Options given here take precedence."""

    run_dir: tyro.conf.Positional[str]
    """Run folder or URL, or one of its checkpoints."""


def train(arguments: Sequence[str]) -> None:
    """Runs `groupax train`."""
    check_flags(arguments)
    start(parsed(Train, "train", arguments, train_defaults(arguments)))


def resume(arguments: Sequence[str]) -> None:
    """Runs `groupax resume`: the command that started the run, with `resume` set to it."""
    asks_help = bool({"-h", "--help"} & set(arguments))
    if not asks_help and (not arguments or arguments[0].startswith("-")):
        raise ValueError("which run? groupax resume RUN_DIR [options of groupax train that should differ]")
    if asks_help:
        parsed(Resume, "resume", ["--help"])
    options = list(arguments[1:])
    check_flags(options)
    path = _flag(options, "--config")
    default = resumed_command(arguments[0].rstrip("/"))
    default = overlaid(default, _read_yaml(path), path) if path else default
    start(parsed(Train, "resume RUN_DIR", options, default))


def check_flags(arguments: Sequence[str]) -> None:
    """Checks that no flag is written as in another library.

    Raises:
        ValueError: a switch is given a value, or a flag has the name that TRL gives it; says what to write.
    """
    switches = {item.name for item in fields(GRPOConfig) if item.type is bool}
    for argument, after in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in NAMES_ELSEWHERE:
            raise ValueError(f"there is no option {flag}{hint_for(name, ())}")
        given = value if equals else after
        if flag.startswith("--") and name in switches and given.lower() in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError(f"--{name} takes no value: write --{name} to switch it on, --no_{name} to switch it off")


def resumed_command(run: str) -> Train:
    """Returns the command that started a run, changed to resume it.

    Raises:
        ValueError: there is no run, or it was not started by `groupax train`.
    """
    config = _run_file(run, "config.json")
    if config is None:
        raise ValueError(f"{run} is no run folder: it has no config.json")
    command = _run_file(run, "command.json")
    if command is None:
        raise ValueError(
            f"the run in {run} was started from Python; start that program again, which resumes it (resume='auto')"
        )
    args = GRPOConfig.from_mapping({**config, "output_dir": run, "resume": run})
    lists = {name: tuple(command[name]) for name in LISTS if command.get(name) is not None}
    return Train(**{**command, **lists}, args=args)


def _run_file(run: str, name: str) -> dict[str, Any] | None:
    from groupax.storage.buckets import RemoteFolder, is_remote

    try:
        text = RemoteFolder(run).read(name) if is_remote(run) else (Path(run) / name).read_bytes()
        return json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{run}/{name} cannot be read: {error}") from error


def start(command: Train) -> None:
    """Trains a model, and evaluates it before and after if there are held-out prompts.

    Raises:
        ValueError: a required option is missing, or a value is invalid.
    """
    recipe = load_recipe(command.recipe) if command.recipe else None
    model: Any = command.model or (recipe and recipe.model)
    rewards: Any = command.reward_funcs or (recipe.reward_funcs if recipe else ())
    agents = chosen_agents(command.tools, command.environments, recipe)
    required = {"model": model, "dataset": command.dataset or recipe, "reward_funcs": rewards or agents.environments}
    for name, value in required.items():
        if not value:
            raise ValueError(f"--{name} is missing; give it, or a --recipe that has it ({', '.join(RECIPES)})")

    with progress_named(command.args.progress_bar) as progress:
        closing = _train(command, recipe, model, list(rewards) or None, agents, progress)
    if command.args.progress_bar == "json":
        for text in closing:
            if isinstance(text, str):
                progress(Message(text.strip()))
    elif closing:
        from groupax.cli.summary import show

        show(closing)


def _train(
    command: Train,
    recipe: Recipe | None,
    model: str,
    rewards: list[str] | None,
    agents: Agents,
    progress: Progress,
) -> list[Any]:
    """Returns what to show at the end (see `summary.show`), in the primary process."""
    args = command.args
    progress(Message(f"groupax {__version__}: the run is in {args.output_dir}"))
    progress(PhaseStarted("loading libraries"))
    tools, environments = agents.load()

    from groupax.evaluation.sets import ONLY_SET, sources_by_name
    from groupax.trainer import GRPOTrainer

    progress(PhaseStarted("loading the data"))
    dataset: Any = recipe.train_dataset(command.dataset) if recipe else command.dataset
    sets: Any = None
    if command.eval_dataset:
        sources = sources_by_name(command.eval_dataset, only=ONLY_SET)
        sets = {name: recipe.examples(source) if recipe else source for name, source in sources.items()}
    elif recipe:
        sets = recipe.eval_dataset(command.dataset)
    if recipe:
        from groupax.recipes.fit import fit_config, fitting_template, max_positions_of

        args, notes = fit_config(args, recipe, max_positions_of(model))
        template, template_notes = fitting_template(model, args.chat_template, [dataset])
        args = replace(args, chat_template=template)
        for note in (*notes, *template_notes):
            progress(Message(note))
    with before_training():
        trainer = GRPOTrainer(
            model, rewards, args, dataset, sets, progress=progress, tools=tools, environments=environments
        )
    trainer.run_folder.command = _recorded(command)
    with trainer.holding_folder():
        return _train_and_report(trainer, agents, is_evaluated=sets is not None)


def _train_and_report(trainer: "GRPOTrainer", agents: Agents, is_evaluated: bool) -> list[Any]:
    """Returns what to show at the end, in the primary process."""
    if not is_evaluated:
        result = trainer.train()
        return _next_commands(trainer, agents, result)

    from groupax.cli.summary import BeforeAfter, write_report

    with before_training():
        before = trainer.evaluate()
    for text in reward_diagnostics(before.errors).values():
        trainer.emit(Message(text, warning=True))
    result = trainer.train()
    prompts = trainer.prompts
    counts = {"used": len(prompts), "dropped": prompts.num_dropped, "truncated": prompts.num_truncated}
    after = trainer.evaluate()
    trainer.write_card()
    if not processes.is_primary():
        return []
    trainer.emit(PhaseStarted("writing the report"))
    trainer.run_folder.flush()
    closing = write_report(BeforeAfter(before, after, result, counts), trainer.run_folder.path)
    trainer.run_folder.sync()
    return [*closing, *_next_commands(trainer, agents, result)]


def _next_commands(trainer: "GRPOTrainer", agents: Agents, result: Any) -> list[Any]:
    if not processes.is_primary():
        return []

    from groupax.cli.summary import next_commands

    return next_commands(trainer.run_folder.uri, trainer.prompts.examples[0]["prompt"], result, agents.flags)


def _recorded(command: Train) -> dict[str, Any]:
    """Returns the options of the command without its settings, such that it can be repeated from any folder."""
    recorded = {item.name: getattr(command, item.name) for item in fields(Train) if item.name not in ("args", "config")}
    for name in ("model", "dataset"):
        recorded[name] = _absolute(recorded[name])
    if command.eval_dataset:
        parts = [text.rpartition("=") for text in command.eval_dataset]
        recorded["eval_dataset"] = [f"{name}{equals}{_absolute(source)}" for name, equals, source in parts]
    return recorded


def _absolute(source: str | None) -> str | None:
    is_local = source and (Path(source).exists() or glob.has_magic(source))
    return str(Path(source).resolve()) if source and is_local else source


def train_defaults(arguments: Sequence[str]) -> Train:
    """Returns the defaults of the flags: the recipe's settings, overlaid with those of the --config file.

    Raises:
        ValueError: the file is no YAML mapping, or has a key that is no setting.
    """
    path = _flag(arguments, "--config")
    file = _read_yaml(path) if path else {}
    recipe = _flag(arguments, "--recipe") or _option("recipe", file.get("recipe"), path or "")
    base = GRPOConfig.from_mapping(load_recipe(recipe).config if recipe else {})
    return replace(overlaid(Train(args=base), file, path or ""), recipe=recipe)


def overlaid(command: Train, file: Mapping[str, Any], path: str) -> Train:
    """Returns a command with the settings of a --config file in place of its own.

    Args:
        command: The command.
        file: Content of the file.
        path: Path of the file, for errors.

    Raises:
        ValueError: a key is no setting, or a value has the wrong type.
    """
    own = {item.name for item in fields(Train)} - {"args", "config"}
    settings = {item.name for item in fields(GRPOConfig)}
    for key in file:
        if key not in own | settings:
            raise ValueError(f"{path} has an unknown key {key!r}{nearest(str(key), own | settings)}")
    config = GRPOConfig.from_mapping(vars(command.args) | {key: file[key] for key in file if key in settings})
    return replace(command, args=config, **{key: _option(key, file[key], path) for key in file if key in own})


def _option(key: str, value: Any, path: str) -> Any:
    """Returns the value of one of the command's own options, as a flag would give it."""
    is_list = key in LISTS
    if key == "eval_dataset" and isinstance(value, dict):
        value = [f"{name}={source}" for name, source in value.items()]
    if value is None or (isinstance(value, str) and not is_list):
        return value
    texts = [value] if isinstance(value, str) else value
    if not is_list or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path}: {key} must be {'a text or a list of texts' if is_list else 'a text'}, got {value!r}")
    return tuple(texts)


def _flag(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of a flag on which the defaults of the others depend."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value")
    return parser.parse_known_args(list(arguments))[0].value


def plan_run(arguments: Sequence[str]) -> int:
    """Runs `groupax plan` with the defaults of `groupax train`."""
    defaults = train_defaults(arguments)
    recipe = load_recipe(defaults.recipe) if defaults.recipe else None
    return plan(arguments, defaults.model or (recipe and recipe.model), defaults.args, recipe)


def _read_yaml(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--config {path} must contain settings as 'key: value', but contains a {type(content).__name__}"
        )
    return content
