"""The commands that train: `groupax train`, `sft` and `resume`, their options from recipes, files and flags."""

import glob
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupax import __version__
from groupax.core.config import NAMES_ELSEWHERE, GRPOConfig, SFTConfig, config_class, hint_for
from groupax.core.errors import RewardError
from groupax.core.settings.command_line import parsed
from groupax.core.settings.fields import as_given, as_read, check_type, nearest
from groupax.events import Message, PhaseStarted
from groupax.parallel import processes
from groupax.parallel.preemption import stoppable
from groupax.recipes import RECIPES, load_recipe
from groupax.recipes.recipe import Recipe
from groupax.runs.diagnostics import reward_diagnostics
from groupax.runs.files import complete_run
from groupax.runs.model_card import shown_name
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import progress_named

LISTS = ("reward_funcs", "eval_dataset", "tools", "environments")  # options of the command that are lists of texts


@dataclass(frozen=True)
class Agents:
    """References of the tools and environments of a command."""

    tools: Sequence[str] = ()  # references of the tools
    environments: Sequence[str] = ()  # references of the environments

    def load(self) -> tuple[list[Any], Any]:
        """Returns the tools and the environments, as `GRPOTrainer` takes them."""
        from groupax.episodes.rules import load_environments, load_tools

        return load_tools(self.tools), load_environments(self.environments)

    @property
    def flags(self) -> str:
        """The options that name them, for a command that is shown to the user."""
        given = {"--tools": self.tools, "--environments": self.environments}
        return "".join(f" {flag} {shlex.join(references)}" for flag, references in given.items() if references)


def chosen_agents(tools: Sequence[str] | None, environments: Sequence[str] | None, recipe: Recipe | None) -> Agents:
    """Returns what the options of a command name; an option that is None takes what the recipe has."""
    own = Agents(recipe.tools, recipe.environments) if recipe else Agents()
    return Agents(own.tools if tools is None else tools, own.environments if environments is None else environments)


def check_flags(arguments: Sequence[str], config: type[GRPOConfig] | type[SFTConfig]) -> None:
    """Raises a ValueError if a flag has the name that it has in another library."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in NAMES_ELSEWHERE:
            raise ValueError(f"there is no flag {flag}{hint_for(name, (), config)}")


def overlaid(command: Any, file: Mapping[str, Any], path: str) -> Any:
    """Returns a command, whose field `args` has settings, with those of a --config file in place of its own."""
    own = {item.name for item in fields(command)} - {"args", "config"}
    settings = {item.name for item in fields(command.args)}
    for key in file:
        if key not in own | settings:
            raise ValueError(f"{path} has an unknown key {key!r}{nearest(str(key), own | settings)}")
    config = type(command.args).from_mapping(vars(command.args) | {key: file[key] for key in file if key in settings})
    return replace(
        command, args=config, **{key: option_value(command, key, file[key], path) for key in file if key in own}
    )


def option_value(command: Any, key: str, value: Any, path: str) -> Any:
    """Returns the value of one of the command's own options, as a flag would give it."""
    if key == "eval_dataset" and isinstance(value, dict):
        value = tuple(f"{name}={source}" for name, source in value.items())
    kind = next(item.type for item in fields(command) if item.name == key)
    value = as_read(as_given(value, kind), kind)
    check_type(f"{path}: {key}", value, kind)
    return value


def flag_value(arguments: Sequence[str], name: str) -> str | None:
    """Returns the last value of a flag on which the defaults of the others depend."""
    found = None
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == name and (equals or index + 1 < len(arguments)):
            found = value if equals else arguments[index + 1]
    return found


def recorded(command: Any) -> dict[str, Any]:
    """Returns the options of the command without its settings, such that it can be repeated from any folder."""
    recorded = {name: value for name, value in vars(command).items() if name not in ("args", "config")}
    for name in ("model", "dataset"):
        recorded[name] = _absolute(recorded[name])
    if command.eval_dataset:
        parts = [text.rpartition("=") for text in command.eval_dataset]
        recorded["eval_dataset"] = [f"{name}{equals}{_absolute(source)}" for name, equals, source in parts]
    return recorded


def _absolute(source: str | None) -> str | None:
    is_local = source and (Path(source).exists() or glob.has_magic(source))
    return str(Path(source).resolve()) if source and is_local else source


def read_yaml(path: str) -> Mapping[str, Any]:
    """Returns the content of a --config file."""
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


if TYPE_CHECKING:
    from groupax.evaluation.evaluate import Evaluation
    from groupax.trainer import GRPOTrainer


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
    dry_run: bool = False
    """Read and check everything but the weights, show a prompt, try the rewards, plan the memory, and end."""
    args: GRPOConfig = field(default_factory=GRPOConfig)
    """Settings of the run."""


def train(arguments: Sequence[str]) -> None:
    """Runs `groupax train`."""
    check_flags(arguments, GRPOConfig)
    start(parsed(Train, "train", arguments, train_defaults(arguments)))


def start(command: Train) -> None:
    """Trains a model, and evaluates it before and after if there are held-out prompts."""
    inputs = inputs_of(command)
    with progress_named(command.args.progress_bar) as progress:
        closing = _train(command, inputs, progress)
    if command.args.progress_bar == "json":
        for text in closing:
            if isinstance(text, str):
                progress(Message(text.strip()))
    elif closing:
        from groupax.cli.summary import show

        show(closing)


@dataclass(frozen=True)
class Inputs:
    """The parts of a command that a trainer is made of."""

    recipe: Recipe | None  # known task, if any
    model: str  # folder or hub id
    rewards: list[str] | None  # names of reward functions; None if environments have them
    agents: Agents  # tools and environments

    def dataset(self, command: Train) -> Any:
        """Returns the training prompts."""
        return self.recipe.train_dataset(command.dataset) if self.recipe else command.dataset

    def data_name(self, command: Train) -> str:
        """Returns the source of the training prompts for people; it is not a path of a recipe's file."""
        if self.recipe is None:
            return str(command.dataset)
        source = command.dataset or self.recipe.source
        return f"{shown_name(source)}, recipe {command.recipe}" if source else f"recipe {command.recipe}"

    def fitted(self, command: Train, dataset: Any) -> tuple[GRPOConfig, Sequence[str]]:
        """Returns the settings, made to fit the model where a recipe does so, and notes about that."""
        args = command.args
        if self.recipe is None:
            return args, ()
        from groupax.recipes.recipe import fit_config, fitting_template, max_positions_of

        args, notes = fit_config(args, self.recipe, max_positions_of(self.model))
        template, template_notes = fitting_template(self.model, args.chat_template, [dataset])
        return replace(args, chat_template=template), (*notes, *template_notes)


def inputs_of(command: Train) -> Inputs:
    """Returns the parts of a command that a trainer is made of."""
    recipe = load_recipe(command.recipe) if command.recipe else None
    model: Any = command.model or (recipe and recipe.model)
    rewards: Any = command.reward_funcs or (recipe.reward_funcs if recipe else ())
    agents = chosen_agents(command.tools, command.environments, recipe)
    required = {"model": model, "dataset": command.dataset or recipe, "reward_funcs": rewards or agents.environments}
    for name, value in required.items():
        if not value:
            raise ValueError(f"--{name} is missing; give it, or a --recipe that has it ({', '.join(RECIPES)})")
    return Inputs(recipe, model, list(rewards) or None, agents)


def _train(command: Train, inputs: Inputs, progress: Progress) -> list[Any]:
    """Returns what to show at the end (see `summary.show`), in the primary process."""
    recipe, agents = inputs.recipe, inputs.agents
    progress(PhaseStarted("loading libraries"))
    tools, environments = agents.load()

    from groupax.evaluation.items import ONLY_SET, sources_by_name
    from groupax.parallel.runtime import configure_jax
    from groupax.trainer import GRPOTrainer

    trainer_class = GRPOTrainer
    if command.dry_run:
        from groupax.cli import dry_run

        trainer_class = dry_run.DryRun
        command = replace(command, args=dry_run.use_devices_for(command.args))
    configure_jax()
    progress(PhaseStarted("loading the data"))
    dataset, sets = inputs.dataset(command), None
    if command.eval_dataset:
        sources = sources_by_name(command.eval_dataset, only=ONLY_SET)
        sets = {name: recipe.examples(source) if recipe else source for name, source in sources.items()}
    elif recipe:
        sets = recipe.eval_dataset(command.dataset)
    args, notes = inputs.fitted(command, dataset)
    for note in notes:
        progress(Message(note))
    with stoppable():
        trainer = trainer_class(
            inputs.model, inputs.rewards, args, dataset, sets, progress=progress, tools=tools, environments=environments
        )
    trainer.dataset_name = inputs.data_name(command)
    if command.dry_run:
        assert isinstance(trainer, dry_run.DryRun), "it was made so"
        return [trainer.report()] if processes.is_primary() else []
    if recipe and not command.dataset:  # the recipe's own data is public
        trainer.public_prompt = trainer.prompts.examples[0]["prompt"]
    trainer.run_folder.command = recorded(command)
    progress(Message(f"groupax {__version__}: the run is in {command.args.output_dir}"))
    with trainer.run.holding_folder():
        return _train_and_report(trainer, agents, is_evaluated=sets is not None)


def _train_and_report(trainer: "GRPOTrainer", agents: Agents, is_evaluated: bool) -> list[Any]:
    """Returns what to show at the end, in the primary process."""
    from groupax.cli.summary import next_commands, write_report

    closing, before, prompts = [], None, trainer.prompts
    if is_evaluated:
        with stoppable():
            before = trainer.evaluate()
        if broken := before.broken_rewards:
            raise RewardError(
                f"the reward function {broken[0]!r} failed for every completion of the evaluation before training:\n"
                f"{before.errors[broken[0]]}"
            )
        for text in reward_diagnostics(before.errors).values():
            trainer.emit(Message(text, warning=True))
        _write_items(trainer, "before", before)
    result = trainer.train()
    if before is not None:
        counts = {"used": len(prompts), "dropped": prompts.num_dropped, "truncated": prompts.num_truncated}
        try:
            with stoppable("in the evaluation after training; the model and the run's state are saved"):
                after = trainer.evaluate()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            trainer.run_folder.write_end(f"failed in the evaluation after training; the model is saved: {why}")
            raise
        _write_items(trainer, "after", after)
        if processes.is_primary():
            trainer.emit(PhaseStarted("writing the report"))
            closing = write_report(before, after, result, counts, trainer.run_folder.path)
        trainer.write_card()
    if not processes.is_primary():
        return []
    trainer.run_folder.sync()
    return [*closing, *next_commands(trainer.run_folder.uri, prompts.examples[0]["prompt"], result, agents.flags)]


def _write_items(trainer: "GRPOTrainer", when: str, evaluation: "Evaluation") -> None:
    if processes.is_primary():
        for name, each in evaluation.sets.items():
            trainer.run_folder.write_items(f"{when}.{name}", each.items)


def train_defaults(arguments: Sequence[str]) -> Train:
    """Returns the defaults of the flags: the recipe's settings, overlaid with those of the --config file."""
    path = flag_value(arguments, "--config")
    file = read_yaml(path) if path else {}
    recipe = flag_value(arguments, "--recipe") or option_value(Train(), "recipe", file.get("recipe"), path or "")
    base = GRPOConfig.from_mapping(load_recipe(recipe).config if recipe else {})
    return replace(overlaid(Train(args=base), file, path or ""), recipe=recipe)


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Train a model on given examples. Settings come from --config, then from the flags."""

    config: Path | None = None
    """A YAML file with any of these settings."""
    model: str | None = None
    """A folder or a Hugging Face hub id."""
    dataset: str | None = None
    """Examples: a .jsonl, .json, .csv or .parquet file, a pattern of such files, a folder or a hub id, with a column
    messages, with prompt and completion, or with text."""
    eval_dataset: tuple[str, ...] | None = None
    """Held-out examples, whose loss is computed every eval_steps: one or several sets, each SOURCE or NAME=SOURCE."""
    args: SFTConfig = field(default_factory=SFTConfig)
    """Settings of the run."""


def sft(arguments: Sequence[str]) -> None:
    """Runs `groupax sft`."""
    check_flags(arguments, SFTConfig)
    path, default = flag_value(arguments, "--config"), SFT()
    start_sft(parsed(SFT, "sft", arguments, overlaid(default, read_yaml(path), path) if path else default))


def start_sft(command: SFT) -> None:
    """Trains a model on examples."""
    for name in ("model", "dataset"):
        if not getattr(command, name):
            raise ValueError(f"--{name} is missing; give it")
    args = command.args
    with progress_named(args.progress_bar) as progress:
        progress(Message(f"groupax {__version__}: the run is in {args.output_dir}"))
        progress(PhaseStarted("loading libraries"))

        from groupax.evaluation.items import ONLY_SET, sources_by_name
        from groupax.sft import SFTTrainer

        sets = sources_by_name(command.eval_dataset, only=ONLY_SET) if command.eval_dataset else None
        with stoppable():
            trainer = SFTTrainer(str(command.model), args, command.dataset, sets, progress=progress)
        trainer.run_folder.command = recorded(command)
        result = trainer.train()
    if processes.is_primary() and args.progress_bar != "json":
        from groupax.cli.summary import next_commands, show

        show(next_commands(trainer.run_folder.uri, trainer.first_prompt, result))


@dataclass(frozen=True, kw_only=True)
class Resume(Train):
    """Continue a run that was stopped, with the command that started it. RUN_DIR is a run folder or URL, or one of its
    checkpoints. Options given here take precedence."""


def resume(arguments: Sequence[str]) -> None:
    """Runs `groupax resume`: the command that started the run, with `resume` set to it."""
    asks_help = bool({"-h", "--help"} & set(arguments))
    if not asks_help and (not arguments or arguments[0].startswith("-")):
        raise ValueError("which run? groupax resume RUN_DIR [options to override]")
    if asks_help:
        parsed(Resume, "resume RUN_DIR", arguments)
    options = list(arguments[1:])
    path = flag_value(options, "--config")
    default = resumed_command(arguments[0].rstrip("/"))
    check_flags(options, type(default.args))
    default = overlaid(default, read_yaml(path), path) if path else default
    command = parsed(type(default), "resume RUN_DIR", options, default)
    num_steps = num_steps_if_complete(command, default)
    if num_steps is not None:
        with progress_named(command.args.progress_bar) as progress:
            progress(Message(complete_run(command.args.output_dir, num_steps)))
        return
    start_sft(command) if isinstance(command, SFT) else start(command)


def resumed_command(run: str) -> Train | SFT:
    """Returns the command that started a run, changed to resume it."""
    config = _run_file(run, "config.json")
    if config is None:
        raise ValueError(f"{run} is not a run folder: it has no config.json")
    command = _run_file(run, "command.json")
    if command is None:
        raise ValueError(
            f"the run in {run} was started from Python; start that program again, which resumes it (resume='auto')"
        )
    return command_of(command, config, run)


def command_of(command: Mapping[str, Any], settings: Mapping[str, Any], run: str) -> Train | SFT:
    """Returns the command of a run's `command.json`, with the settings of its `config.json`, changed to resume it."""
    kind = config_class(settings)
    args: Any = kind.from_mapping({**settings, "output_dir": run, "resume": run})
    lists = {name: tuple(command[name]) for name in LISTS if command.get(name) is not None}
    return (SFT if kind is SFTConfig else Train)(**{**command, **lists}, args=args)


def num_steps_if_complete(command: Train | SFT, recorded: Train | SFT) -> int | None:
    """Returns the number of steps of a run that has taken them all and has its results, else None.

    It is also None if the number of steps is not known before the model and the data are loaded, which is so where
    the options differ from those recorded and `max_steps` is not set, and for a run in a bucket.
    """
    from groupax.core.storage.buckets import is_remote
    from groupax.runs.checkpoints.choose import split_path
    from groupax.runs.checkpoints.store import LocalStore

    run, step = split_path(command.args.resume)
    if is_remote(run) or step is not None or not isinstance(about := _run_file(run, "run.json"), dict):
        return None
    processes = about.get("processes") or [{}]
    planned = processes[-1].get("num_steps") if command == recorded else None
    planned = command.args.max_steps if command.args.max_steps > 0 else planned
    steps = LocalStore(Path(run) / "checkpoints").steps()
    is_evaluated = isinstance(command, Train) and bool(command.eval_dataset or command.recipe)
    results = ("model", "result.json") if is_evaluated else ("model",)
    has_results = all((Path(run) / name).exists() for name in results)
    is_complete = isinstance(planned, int) and steps and steps[-1] >= planned and has_results
    return planned if is_complete else None


def _run_file(run: str, name: str) -> dict[str, Any] | None:
    from groupax.core.storage.buckets import RemoteFolder, is_remote
    from groupax.core.storage.folders import read_file

    try:
        text = RemoteFolder(run).read(name) if is_remote(run) else read_file(Path(run) / name)
        return json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{run}/{name} cannot be read: {error}") from error
