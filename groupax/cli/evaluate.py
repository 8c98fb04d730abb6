"""The commands `groupax eval` and `groupax compare`. Imports heavy modules lazily."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupax.cli.train import chosen_agents, flag_value
from groupax.core.config import GRPOConfig
from groupax.core.settings.command_line import Positional, parsed
from groupax.core.settings.compute import DecodingWeights
from groupax.core.settings.rollouts import EpisodeSettings, PromptOverflow, RewardSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.events import Emit, Message, PhaseStarted
from groupax.parallel import processes
from groupax.parallel.preemption import stoppable
from groupax.recipes import RECIPES, load_recipe
from groupax.recipes.recipe import Recipe
from groupax.runs.diagnostics import reward_diagnostics
from groupax.runs.files import check_unlocked
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import primary_only, progress_named

if TYPE_CHECKING:
    from groupax.data.examples import Examples
    from groupax.evaluation.evaluate import SetEvaluation

Results = Mapping[str, Mapping[str, "SetEvaluation"]]  # by set, then by way of sampling: greedy, sampled

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluate a model on held-out prompts: pass@1 of greedy completions, with --n above 1 and a --temperature also
    pass@k and maj@n of sampled ones, and the mean of every reward, all with 95 % intervals. The default of --max_tokens
    becomes half of the model's positions if these are too few for it."""

    model: str | None = None
    """Folder or Hugging Face hub id of a model or an adapter; by default the recipe's."""
    recipe: str | None = None
    """Recipe that turns rows into prompts and has rewards, e.g. gsm8k or numinamath."""
    dataset: tuple[str, ...] | None = None
    """Held-out prompts, one or several sets, each SOURCE or NAME=SOURCE: a .jsonl, .json, .csv or .parquet file, a
    folder or hub id with a test split. By default the recipe's."""
    reward_funcs: tuple[str, ...] | None = None
    """Reward functions: names of built-in ones, or module:function; by default the recipe's."""
    tools: tuple[str, ...] | None = None
    """Functions that the model may call, as module:function; by default the recipe's, without any value none."""
    environments: tuple[str, ...] | None = None
    """Environment, as module:Class, or several, each as name=module:Class; by default the recipe's."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward function; by default the recipe's, or 1."""
    correctness_reward: str | None = None
    """Reward whose 1 means that a completion is correct; by default the recipe's, or the first such built-in one."""
    output_dir: Path = Path("runs/eval")
    """Folder for result.json and a .jsonl file per set with completions and rewards. An earlier one is moved aside."""
    limit: int | None = None
    """Number of prompts to evaluate of each set, from its start; by default all."""
    greedy: bool = True
    """With --n above 1, also evaluate one greedy completion of each prompt."""
    max_prompt_length: int | None = None
    """Longest prompt in tokens; by default the longest that the model's positions allow."""
    prompt_overflow: PromptOverflow | None = None
    """Handling of longer prompts; None takes the recipe's, or stops with an error."""
    chat_template: str | None = None
    """Chat template for a tokenizer without one: chatml, plain, or a file."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template, as JSON, e.g. '{"enable_thinking": false}'; by default the recipe's."""
    weights: DecodingWeights = "same"
    """Format of the weights for decoding: as in the model, or with fewer bits."""
    tp: int = 1
    """Number of devices that the weights are sharded over (tensor parallelism); with 1 each device has all weights."""
    max_concurrent_rows: int = 256
    """Largest number of completions that are decoded at once."""
    kv_cache_gb: float | None = None
    """Largest KV cache per device in GB; by default 80 % of the free memory."""
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.0, max_tokens=DEFAULT_MAX_TOKENS)
    )
    """Sampling parameters. --temperature 0 is greedy. With tools or environments --max_tokens counts all tokens after
    the prompt."""
    episodes: EpisodeSettings = field(default_factory=EpisodeSettings)
    """Limits of episodes with tools or environments."""


def evaluate(arguments: Sequence[str]) -> None:
    """Runs `groupax eval`."""
    if any(each.partition("=")[0] == "--config" for each in arguments):
        raise ValueError("there is no --config here: give what it has of --model, --dataset and --reward_funcs")
    command = parsed(Eval, "eval", arguments, _eval_defaults(arguments))
    _check(command)
    with progress_named("rich") as progress:
        progress(PhaseStarted("loading libraries"))
        result = run_eval(command, progress)
    if processes.is_primary():
        _show(command, result)


def run_eval(command: Eval, progress: Progress) -> Results:
    """Evaluates a model, and has the primary process write the output folder.

    Args:
        command: Parsed command line.
        progress: Display of the progress, used by the primary process only.
    """
    from groupax.core.storage.folders import resolve_folder
    from groupax.data.prompts import encode_examples, prompt_limit
    from groupax.engine.core import FEATURE_BYTES
    from groupax.engine.engine import Engine
    from groupax.episodes.environment import environment_rewards
    from groupax.episodes.rules import make_rules
    from groupax.evaluation.evaluate import evaluate as evaluate_set
    from groupax.evaluation.evaluate import find_correctness_reward
    from groupax.models.vision.processing import prompt_encoder
    from groupax.parallel.runtime import compilation, configure_jax
    from groupax.recipes.recipe import fitting_length, fitting_template, max_positions_of
    from groupax.rewards.resolve import check_columns, resolve_rewards, resolve_weights
    from groupax.rewards.runner import RewardRunner
    from groupax.rollouts.collector import Episodes, Scoring

    command = replace(command, output_dir=command.output_dir.absolute())  # a reward may change the working directory
    configure_jax()  # joins the other processes, so that it is known which one is the primary process
    progress = primary_only(progress)
    progress.is_compiling = lambda: compilation().is_under_way
    results: dict[str, dict[str, SetEvaluation]] = {}
    with stoppable("before the evaluation was complete; nothing was saved"):
        recipe = load_recipe(command.recipe) if command.recipe else None
        tools, environments = chosen_agents(command.tools, command.environments, recipe).load()
        model, own_rewards = command.model or (recipe and recipe.model), environment_rewards(environments)
        functions = command.reward_funcs or (recipe.reward_funcs if recipe else ())
        if model is None or not (functions or own_rewards):
            name = "model" if model is None else "reward_funcs"
            raise ValueError(f"--{name} is missing; give it, or a --recipe that has it ({', '.join(RECIPES)})")
        datasets = _load_sets(command, recipe)
        columns = [name for name in next(iter(datasets.values()))[0] if name != "prompt"]
        rewards = [*(resolve_rewards(list(functions), columns) if functions else ()), *own_rewards]
        for name, rows in datasets.items():
            check_columns(rewards, columns, rows[0], f"dataset {name!r}")
        own = recipe.config if recipe and command.reward_funcs is None else {}
        weights = own.get("reward_weights") if command.reward_weights is None else command.reward_weights
        weights = resolve_weights(weights, rewards)
        correctness = find_correctness_reward(command.correctness_reward or own.get("correctness_reward"), rewards)
        sampling, notes = command.sampling, []
        default = recipe.config["max_completion_length"] if recipe else DEFAULT_MAX_TOKENS
        if sampling.max_tokens == default:
            longest, notes = fitting_length(max_positions_of(model), default, command.max_prompt_length)
            sampling = replace(sampling, max_tokens=longest, min_tokens=min(sampling.min_tokens, longest))
        template, more = fitting_template(model, command.chat_template, list(datasets.values()))
        overflow = command.prompt_overflow or (recipe.config.get("prompt_overflow") if recipe else None) or "error"
        for note in (*notes, *more):
            progress(Message(note))

        progress(PhaseStarted("loading the model"))
        engine = Engine.load(
            model,
            chat_template=template,
            weights=command.weights,
            tp=command.tp,
            max_slots=command.max_concurrent_rows,
            kv_bytes=None if command.kv_cache_gb is None else int(command.kv_cache_gb * 1e9),
        )
        started_s, tokenizer, kwargs = time.perf_counter(), engine.tokenizer, command.chat_template_kwargs
        limit = prompt_limit(engine.config.max_positions, sampling.max_tokens, command.max_prompt_length, "max_tokens")
        rules = make_rules(tokenizer, command.episodes, tools, environments, kwargs, engine.eos_ids)
        rules = replace(rules, max_prompt_tokens=limit)
        source = None if engine.config.vision is None else resolve_folder(model)
        encoder = prompt_encoder(engine.config.vision, source, tokenizer, FEATURE_BYTES)
        with RewardRunner(rewards, RewardSettings()) as runner:
            for name, rows in datasets.items():
                where, schemas = f"dataset {name!r}", rules.schemas_of(rows)
                prompts = encode_examples(rows, tokenizer, limit, overflow, kwargs, where, schemas, encoder=encoder)
                results[name] = {
                    way: evaluate_set(
                        engine,
                        Episodes(tokenizer, rules),
                        Scoring(runner, weights, correctness),
                        prompts,
                        params,
                        progress,
                        f"evaluating {name}, {way}",
                    )
                    for way, params in _ways(sampling, command.greedy).items()
                }
    command = replace(command, model=model, sampling=sampling)
    errors = {name: text for ways in results.values() for way in ways.values() for name, text in way.errors.items()}
    for text in reward_diagnostics(errors).values():
        progress(Message(text, warning=True))
    seconds = round(time.perf_counter() - started_s, 2)
    processes.run_on_primary(lambda: _write(command, correctness, results, seconds, progress))
    return results


def _show(command: Eval, results: Results) -> None:
    from groupax.cli.summary import estimate_table
    from groupax.core.terminal.tables import output_console
    from groupax.evaluation.items import binary_rewards

    console = output_console()
    for name, ways in results.items():
        for way, evaluation in ways.items():
            counts = evaluation.metrics
            title = f"{name}, {way}: {len(evaluation.items):,} prompts"
            console.print(estimate_table(title, evaluation.estimates))
            unscorable = counts["prompts_unscorable"]
            longest = evaluation.params.max_tokens
            fitted = "" if longest == command.sampling.max_tokens else " (half of the model's positions)"
            console.print(
                f"prompts too long: {counts['prompts_dropped']:,.0f} dropped, {counts['prompts_truncated']:,.0f} cut; "
                + (f"without a gold answer: {unscorable:,.0f}; " if unscorable else "")
                + f"completions cut off at {longest} tokens{fitted}: "
                f"{100 * counts['completions/clipped_ratio']:.1f} %\n",
                soft_wrap=True,
            )
    every = [evaluation for ways in results.values() for evaluation in ways.values()]
    names = binary_rewards(item for evaluation in every for item in evaluation.items)
    if names and not any("pass@1" in evaluation.estimates for evaluation in every):
        console.print(
            "pass@1 needs the name of a reward whose 1 means a correct completion: --correctness_reward "
            f"{' or '.join(names)}\n",
            soft_wrap=True,
            markup=False,
        )
    console.print(f"result: {command.output_dir / 'result.json'}, items: {command.output_dir}/*.jsonl", soft_wrap=True)


def _eval_defaults(arguments: Sequence[str]) -> Eval:
    """Returns the defaults of the flags: a recipe's longest completion, stop texts and template arguments."""
    recipe = flag_value(arguments, "--recipe")
    if not recipe:
        return Eval()
    config = load_recipe(recipe).config
    sampling = SamplingParams(temperature=0.0, max_tokens=config["max_completion_length"], stop=config.get("stop", ()))
    episodes = GRPOConfig.from_mapping(config).part(EpisodeSettings)
    kwargs = config.get("chat_template_kwargs", {})
    return Eval(recipe=recipe, chat_template_kwargs=kwargs, sampling=sampling, episodes=episodes)


def _check(command: Eval) -> None:
    if command.sampling.n > 1 and command.sampling.temperature == 0:
        raise ValueError(
            f"--n is {command.sampling.n}, but at --temperature 0 all completions of a prompt are the same; set "
            "--temperature, e.g. to 0.8"
        )
    if command.limit is not None and command.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {command.limit}")
    check_unlocked(command.output_dir)
    if (command.output_dir / "metrics.jsonl").exists():
        raise ValueError(
            f"--output_dir {command.output_dir} is the folder of a training run, which has a result.json of its own; "
            f"choose another, e.g. {command.output_dir}-eval"
        )


def _ways(sampling: SamplingParams, greedy: bool) -> dict[str, SamplingParams]:
    """Returns the sampling parameters by name: greedy, sampled."""
    if sampling.temperature == 0:
        return {"greedy": sampling}
    once = {"greedy": replace(sampling, n=1, temperature=0.0)} if greedy and sampling.n > 1 else {}
    return {**once, "sampled": sampling}


def _load_sets(command: Eval, recipe: Recipe | None) -> "dict[str, Examples]":
    """Loads the rows of each set, with prompts."""
    from groupax.data.examples import load_examples
    from groupax.data.files import EVAL_SPLITS
    from groupax.evaluation.items import sources_by_name

    if command.dataset:
        loaded = {
            name: recipe.examples(source)
            if recipe
            else load_examples(source, f"dataset {name!r}", EVAL_SPLITS, may_have_images=True)
            for name, source in sources_by_name(command.dataset).items()
        }
    else:
        rows = recipe.eval_dataset() if recipe else None
        if rows is None:
            raise ValueError("--dataset is missing; pass held-out prompts, or a --recipe that has some")
        loaded = dict(rows) if isinstance(rows, Mapping) else {command.recipe or "eval": rows}
    for name, rows in loaded.items():
        if len(rows) == 0:
            raise ValueError(f"dataset {name!r} is empty")
    if command.limit is None:
        return loaded
    return {name: [rows[index] for index in range(min(command.limit, len(rows)))] for name, rows in loaded.items()}


def _write(command: Eval, correctness_reward: str | None, results: Results, seconds: float, emit: Emit) -> None:
    """Writes `result.json` and the items of each set."""
    from groupax.cli.summary import plain_estimates
    from groupax.evaluation.items import write_items
    from groupax.runs.files import free_name

    folder = command.output_dir
    if (folder / "result.json").exists():
        aside = free_name(folder)
        folder.rename(aside)
        emit(Message(f"the earlier evaluation in {folder} was moved to {aside}"))
    folder.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Any] = {}
    for name, ways in results.items():
        for way, each in ways.items():
            write_items(folder / f"{name}.{way}.jsonl", each.items)
            others = {key: value for key, value in each.metrics.items() if key.startswith(("prompts", "completions/"))}
            sets.setdefault(name, {})[way] = {
                "sampling": asdict(each.params),
                "estimates": plain_estimates(each.estimates),
                "metrics": others,
            }
    record = {
        "model": command.model,
        "recipe": command.recipe,
        "dataset": command.dataset,
        "correctness_reward": correctness_reward,
        "seconds": seconds,
        "sets": sets,
    }
    (folder / "result.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two evaluations on their common items: differences with 95 % intervals, and statistical tests."""

    before: Positional[Path]
    """An output folder of `groupax eval`, or a .jsonl file with items of one set, also from a run's evaluations/."""
    after: Positional[Path]
    """Another one, on the same prompts."""
    to: Path | None = None
    """File for the comparison as JSON. By default none is written."""


def compare(arguments: Sequence[str]) -> None:
    """Runs `groupax compare`."""
    command = parsed(Compare, "compare", arguments)

    from groupax.cli.summary import difference_table, plain_differences
    from groupax.core.terminal.tables import output_console
    from groupax.evaluation.items import compare as compare_items
    from groupax.evaluation.items import read_items

    console = output_console()
    written = {}
    pairs = _common_files(command.before, command.after)
    for side in (command.before, command.after):
        if alone := sorted({each.stem for each in side.glob("*.jsonl")} - pairs.keys()):
            console.print(f"evaluated only in {side}: {', '.join(alone)}", soft_wrap=True, markup=False)
    for name, (before, after) in pairs.items():
        comparison = compare_items(read_items(before), read_items(after))
        console.print(difference_table(f"{name}: {comparison.num_items:,} common items", comparison, {}, {}))
        if comparison.num_only_before or comparison.num_only_after:
            console.print(
                f"omitted: {comparison.num_only_before:,} items only in {command.before}, "
                f"{comparison.num_only_after:,} only in {command.after}",
                soft_wrap=True,
                markup=False,
            )
        for side, names in ((command.before, comparison.metrics_before), (command.after, comparison.metrics_after)):
            if names:
                console.print(f"only in {side}: {', '.join(names)}", soft_wrap=True, markup=False)
        if comparison.has_other_rewards:
            console.print("their rewards are of different functions, so the totals are not compared", soft_wrap=True)
        console.print()
        written[name] = plain_differences(comparison)
    if command.to is not None:
        command.to.parent.mkdir(parents=True, exist_ok=True)
        command.to.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _common_files(before: Path, after: Path) -> dict[str, tuple[Path, Path]]:
    """Returns the pairs of files to compare, by name."""
    if before.is_file() and after.is_file():
        return {after.stem: (before, after)}
    for path in (before, after):
        if not path.is_dir():
            raise ValueError(f"{path} is {'a file and the other a folder' if path.is_file() else 'missing'}")
    names = sorted({path.name for path in before.glob("*.jsonl")} & {path.name for path in after.glob("*.jsonl")})
    if not names:
        raise ValueError(f"{before} and {after} have no .jsonl file of the same name: no set was evaluated in both")
    return {Path(name).stem: (before / name, after / name) for name in names}
