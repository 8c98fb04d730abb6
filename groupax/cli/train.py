"""`groupax train`: its options, from recipes, files and flags, and what it does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from groupax import __version__
from groupax.cli.agents import Agents, chosen_agents
from groupax.cli.options import check_flags, flag_value, option_value, overlaid, read_yaml, recorded
from groupax.cli.plan import plan
from groupax.config import GRPOConfig
from groupax.errors import RewardError
from groupax.events import Message, PhaseStarted
from groupax.parallel import processes
from groupax.parallel.preemption import stoppable
from groupax.recipes import RECIPES, Recipe, load_recipe
from groupax.runs.diagnostics import reward_diagnostics
from groupax.runs.model_card import shown_name
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import progress_named
from groupax.settings.command_line import parsed

if TYPE_CHECKING:
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
    args: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=GRPOConfig)
    """Settings of the run."""


def train(arguments: Sequence[str]) -> None:
    """Runs `groupax train`."""
    check_flags(arguments, GRPOConfig)
    start(parsed(Train, "train", arguments, train_defaults(arguments)))


def start(command: Train) -> None:
    """Trains a model, and evaluates it before and after if there are held-out prompts.

    Raises:
        ValueError: a required option is missing, or a value is invalid.
    """
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
    """The parts of a command that a trainer is made of.

    Attributes:
        recipe: Known task, if any.
        model: Folder or hub id.
        rewards: Names of reward functions; None if environments have them.
        agents: Tools and environments.
    """

    recipe: Recipe | None
    model: str
    rewards: list[str] | None
    agents: Agents

    def dataset(self, command: Train) -> Any:
        """Returns the training prompts."""
        return self.recipe.train_dataset(command.dataset) if self.recipe else command.dataset

    def data_name(self, command: Train) -> str:
        """Returns the source of the training prompts for people; it is no path of a recipe's file."""
        if self.recipe is None:
            return str(command.dataset)
        source = command.dataset or self.recipe.source
        return f"{shown_name(source)}, recipe {command.recipe}" if source else f"recipe {command.recipe}"

    def fitted(self, command: Train, dataset: Any) -> tuple[GRPOConfig, Sequence[str]]:
        """Returns the settings, made to fit the model where a recipe does so, and notes about that."""
        args = command.args
        if self.recipe is None:
            return args, ()
        from groupax.recipes.fit import fit_config, fitting_template, max_positions_of

        args, notes = fit_config(args, self.recipe, max_positions_of(self.model))
        template, template_notes = fitting_template(self.model, args.chat_template, [dataset])
        return replace(args, chat_template=template), (*notes, *template_notes)


def inputs_of(command: Train) -> Inputs:
    """Returns the parts of a command that a trainer is made of.

    Raises:
        ValueError: A required option is missing.
    """
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

    from groupax.evaluation.sets import ONLY_SET, sources_by_name
    from groupax.parallel.runtime import configure_jax
    from groupax.trainer import GRPOTrainer

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
    given = inputs.model, inputs.rewards, args, dataset, sets
    with stoppable():
        trainer = GRPOTrainer(*given, progress=progress, tools=tools, environments=environments)
    trainer.dataset_name = inputs.data_name(command)
    if recipe and not command.dataset:  # the recipe's own data is public
        trainer.public_prompt = trainer.prompts.examples[0]["prompt"]
    trainer.run_folder.command = recorded(command)
    progress(Message(f"groupax {__version__}: the run is in {command.args.output_dir}"))
    with trainer.run.holding_folder():
        return _train_and_report(trainer, agents, is_evaluated=sets is not None)


def _train_and_report(trainer: "GRPOTrainer", agents: Agents, is_evaluated: bool) -> list[Any]:
    """Returns what to show at the end, in the primary process."""
    if not is_evaluated:
        result = trainer.train()
        return _next_commands(trainer, agents, result)

    from groupax.cli.summary import BeforeAfter, write_report

    with stoppable():
        before = trainer.evaluate()
    if broken := before.broken_rewards:
        raise RewardError(
            f"the reward function {broken[0]!r} failed for every completion of the evaluation before training:\n"
            f"{before.errors[broken[0]]}"
        )
    for text in reward_diagnostics(before.errors).values():
        trainer.emit(Message(text, warning=True))
    result = trainer.train()
    prompts = trainer.prompts
    counts = {"used": len(prompts), "dropped": prompts.num_dropped, "truncated": prompts.num_truncated}
    with stoppable("in the evaluation after training; the model and the run's state are saved"):
        after = trainer.evaluate()
    closing = []
    if processes.is_primary():
        trainer.emit(PhaseStarted("writing the report"))
        trainer.run_folder.flush()
        closing = write_report(BeforeAfter(before, after, result, counts), trainer.run_folder.path)
    trainer.write_card()
    if not processes.is_primary():
        return []
    trainer.run_folder.sync()
    return [*closing, *_next_commands(trainer, agents, result)]


def _next_commands(trainer: "GRPOTrainer", agents: Agents, result: Any) -> list[Any]:
    if not processes.is_primary():
        return []

    from groupax.cli.summary import next_commands

    return next_commands(trainer.run_folder.uri, trainer.prompts.examples[0]["prompt"], result, agents.flags)


def train_defaults(arguments: Sequence[str]) -> Train:
    """Returns the defaults of the flags: the recipe's settings, overlaid with those of the --config file.

    Raises:
        ValueError: the file is no YAML mapping, or has a key that is no setting.
    """
    path = flag_value(arguments, "--config")
    file = read_yaml(path) if path else {}
    recipe = flag_value(arguments, "--recipe") or option_value("recipe", file.get("recipe"), path or "")
    base = GRPOConfig.from_mapping(load_recipe(recipe).config if recipe else {})
    return replace(overlaid(Train(args=base), file, path or ""), recipe=recipe)


def plan_run(arguments: Sequence[str]) -> int:
    """Runs `groupax plan` with the defaults of `groupax train`."""
    defaults = train_defaults(arguments)
    recipe = load_recipe(defaults.recipe) if defaults.recipe else None
    return plan(arguments, defaults.model or (recipe and recipe.model), defaults.args, recipe)
