"""The commands about how well models and runs do: eval, compare, report. Each imports what it needs."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from groupax.events import Message, PhaseStarted
from groupax.parallel import processes
from groupax.recipes import RECIPES, load_recipe
from groupax.runs.diagnostics import reward_diagnostics
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import primary_only, progress_named
from groupax.settings.command_line import parsed
from groupax.settings.compute import DecodingWeights
from groupax.settings.prompts import PromptOverflow
from groupax.settings.sampling import SamplingParams
from groupax.storage.lock import check_unlocked

DEFAULT_MAX_TOKENS = 512
Given = tyro.conf.Positional


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Sample completions of held-out prompts and score them: pass@1 of greedy completions, and with --n above 1 and a
    --temperature also pass@k, maj@k of sampled ones; means of every reward; all with 95 % intervals."""

    model: str | None = None
    """A folder or a Hugging Face hub id, of a model or an adapter; by default the recipe's."""
    recipe: str | None = None
    """Makes prompts of the rows, and has rewards, e.g. gsm8k or numinamath."""
    dataset: tuple[str, ...] | None = None
    """Held-out prompts, one or several sets, each SOURCE or NAME=SOURCE: a .jsonl, .json, .csv or .parquet file, a
    folder or hub id with a test split. By default the recipe's."""
    reward_funcs: tuple[str, ...] | None = None
    """Rewards: names of built-in ones, or module:function; by default the recipe's."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward function; by default the recipe's, or 1."""
    correctness_reward: str | None = None
    """The reward whose 1 means that a completion is right; by default the recipe's, or the first built-in one of that
    kind."""
    output_dir: Path = Path("runs/eval")
    """For result.json and a .jsonl per set with each item's completions and rewards. An earlier one is moved aside."""
    limit: int | None = None
    """Evaluate the first prompts of each set only."""
    greedy: bool = True
    """With --n above 1: also one greedy completion of each prompt."""
    max_prompt_length: int | None = None
    """Longest prompt in tokens; by default what the model's positions allow."""
    prompt_overflow: PromptOverflow | None = None
    """What to do with longer prompts; by default the recipe's way, or an error."""
    chat_template: str | None = None
    """A template for a tokenizer without one: chatml, plain, or a file."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template, as JSON, e.g. '{"enable_thinking": false}'; by default the recipe's."""
    weights: DecodingWeights = "same"
    """Weights to decode with: as the model has them, or with fewer bits."""
    tp: int = 1
    """So many devices share the weights, each with some of the heads; with 1 each device has all of them."""
    max_concurrent_rows: int = 256
    """Most completions decoded at once."""
    kv_cache_gb: float | None = None
    """Most memory of a device for keys and values, in GB; by default 80 % of what is free."""
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(
        default_factory=lambda: SamplingParams(temperature=0.0, max_tokens=DEFAULT_MAX_TOKENS)
    )
    """How to sample. --temperature 0 is greedy."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two evaluations on the items that both have: differences with 95 % intervals, and tests."""

    before: Annotated[Path, Given]
    """A folder of `groupax eval`, or a .jsonl file with items of one set, also of a run's evaluations/."""
    after: Annotated[Path, Given]
    """Another, of the same prompts."""
    to: Path | None = None
    """Write the comparison as JSON here too."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report, to be attached to a pull request: report.html, which needs nothing else, and report.md."""

    run_dir: Annotated[Path, Given]
    """The run's folder."""
    to: Path | None = None
    """Folder for the two files; by default the run's."""
    price_per_hour: float | None = None
    """Of a device, or of the machine if it trains on CPU: adds what the run has cost."""


def report(arguments: Sequence[str]) -> None:
    """`groupax report`."""
    command = parsed(Report, "report", arguments)

    from groupax.runs.report.write import write_run_report

    if command.price_per_hour is not None and not command.price_per_hour >= 0:
        raise ValueError(f"--price_per_hour must be at least 0, got {command.price_per_hour}")
    page, markdown = write_run_report(command.run_dir, command.to, command.price_per_hour)
    print(f"report: {page} and {markdown}")


def evaluate(arguments: Sequence[str]) -> None:
    """`groupax eval`."""
    command = parsed(Eval, "eval", arguments, _eval_defaults(arguments))
    _check(command)

    from rich.console import Console

    from groupax.cli.summary import estimate_table

    console = Console(highlight=False)

    with progress_named("rich") as progress:
        progress(PhaseStarted("loading libraries"))
        result = run_eval(command, progress)
    if not processes.is_primary():
        return
    for name, each in result.items():
        for way, evaluation in each.items():
            counts = evaluation.metrics
            title = f"{name}, {way}: {len(evaluation.items):,} prompts"
            console.print(estimate_table(title, evaluation.estimates))
            console.print(
                f"prompts too long: {counts['prompts_dropped']:,.0f} dropped, {counts['prompts_truncated']:,.0f} cut; "
                f"without a gold answer: {counts['prompts_unscorable']:,.0f}; completions cut off at "
                f"{evaluation.params.max_tokens} tokens: {100 * counts['completions/clipped_ratio']:.1f} %\n",
                soft_wrap=True,
            )
    console.print(f"result: {command.output_dir / 'result.json'}, items: {command.output_dir}/*.jsonl", soft_wrap=True)


def run_eval(command: Eval, progress: Progress) -> dict[str, dict[str, Any]]:
    """Evaluate, and have the first process write the output folder.

    Args:
        command: what to evaluate and how.
        progress: shows what it is doing; of several processes that of the first one.

    Returns:
        Of each set, by name, its `SetEvaluation` for each way of sampling: greedy, sampled.
    """
    from groupax.data.prompts import encode_examples, prompt_limit
    from groupax.engine.engine import Engine
    from groupax.evaluation.evaluate import evaluate as evaluate_set
    from groupax.evaluation.evaluate import find_correctness_reward
    from groupax.parallel.compilation import compilation
    from groupax.parallel.runtime import configure_jax
    from groupax.recipes.fit import fitting_length, fitting_template, positions_of
    from groupax.rewards.resolve import check_columns, resolve_rewards, resolve_weights
    from groupax.rewards.runner import RewardRunner
    from groupax.settings.rewards import RewardSettings

    recipe = load_recipe(command.recipe) if command.recipe else None
    model = command.model or (recipe and recipe.model)
    functions = command.reward_funcs or (recipe and recipe.reward_funcs)
    if model is None or functions is None:
        name = "model" if model is None else "reward_funcs"
        raise ValueError(f"--{name} is missing; give it, or a --recipe that has it ({', '.join(RECIPES)})")
    datasets = _load_sets(command, recipe)
    first = next(iter(datasets.values()))[0]
    columns = [name for name in first if name != "prompt"]
    rewards = resolve_rewards(list(functions), columns)
    for name, rows in datasets.items():
        check_columns(rewards, columns, rows[0], f"dataset {name!r}")
    own = recipe.config if recipe and command.reward_funcs is None else {}
    weights = resolve_weights(command.reward_weights or own.get("reward_weights"), rewards)
    correctness_reward = find_correctness_reward(command.correctness_reward or own.get("correctness_reward"), rewards)

    sampling, notes = command.sampling, []
    default = recipe.config["max_completion_length"] if recipe else DEFAULT_MAX_TOKENS
    if sampling.max_tokens == default:
        longest, notes = fitting_length(positions_of(model), default, command.max_prompt_length)
        sampling = replace(sampling, max_tokens=longest, min_tokens=min(sampling.min_tokens, longest))
    template, told = fitting_template(model, command.chat_template, list(datasets.values()))
    configure_jax()  # joins the other processes: from here on one is the first, which shows
    progress = primary_only(progress)
    progress.is_compiling = lambda: compilation().is_under_way
    for note in (*notes, *told):
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
    limit = prompt_limit(engine.config.max_positions, sampling.max_tokens, command.max_prompt_length, "max_tokens")
    overflow = command.prompt_overflow or (recipe.config.get("prompt_overflow") if recipe else None) or "error"
    ways = _ways(sampling, command.greedy)
    started_s = time.perf_counter()
    result: dict[str, dict[str, Any]] = {}
    with RewardRunner(rewards, RewardSettings()) as runner:
        for name, rows in datasets.items():
            prompts = encode_examples(
                rows, engine.tokenizer, limit, overflow, command.chat_template_kwargs, f"dataset {name!r}"
            )
            result[name] = {
                way: evaluate_set(
                    engine,
                    engine.tokenizer,
                    runner,
                    weights,
                    prompts,
                    params,
                    correctness_reward,
                    progress,
                    f"evaluating {name}, {way}",
                )
                for way, params in ways.items()
            }
    errors = {name: text for ways in result.values() for way in ways.values() for name, text in way.errors.items()}
    for text in reward_diagnostics(errors).values():
        progress(Message(text, warning=True))
    seconds = time.perf_counter() - started_s
    processes.run_on_primary(lambda: _write(command, model, correctness_reward, result, seconds, progress))
    return result


def compare(arguments: Sequence[str]) -> None:
    """`groupax compare`."""
    command = parsed(Compare, "compare", arguments)

    from rich.console import Console

    from groupax.cli.summary import difference_table, plain_differences
    from groupax.evaluation.items import compare as compare_items
    from groupax.evaluation.items import read_items

    console = Console(highlight=False)
    written = {}
    for name, (before, after) in _common_files(command.before, command.after).items():
        comparison = compare_items(read_items(before), read_items(after))
        console.print(difference_table(f"{name}: {comparison.num_items:,} items of both", comparison, {}, {}))
        if comparison.num_only_before or comparison.num_only_after:
            console.print(
                f"left out: {comparison.num_only_before:,} items only in {command.before}, "
                f"{comparison.num_only_after:,} only in {command.after}",
                soft_wrap=True,
            )
        tests = dict.fromkeys(f"{pair.difference.method}; {pair.test}" for pair in comparison.differences.values())
        console.print(f"intervals and tests: {', '.join(tests)}\n", soft_wrap=True)
        written[name] = plain_differences(comparison)
    if command.to is not None:
        command.to.parent.mkdir(parents=True, exist_ok=True)
        command.to.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _eval_defaults(arguments: Sequence[str]) -> Eval:
    """Returns the defaults of the flags: a recipe's longest completion, stop texts and template arguments."""
    import argparse

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    known, _ = parser.parse_known_args(list(arguments))
    if not known.recipe:
        return Eval()
    config = load_recipe(known.recipe).config
    sampling = SamplingParams(temperature=0.0, max_tokens=config["max_completion_length"], stop=config.get("stop", ()))
    return Eval(recipe=known.recipe, chat_template_kwargs=config.get("chat_template_kwargs", {}), sampling=sampling)


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
    """The ways to sample, by name."""
    if sampling.temperature == 0:
        return {"greedy": sampling}
    once = {"greedy": replace(sampling, n=1, temperature=0.0)} if greedy and sampling.n > 1 else {}
    return {**once, "sampled": sampling}


def _load_sets(command: Eval, recipe: Any) -> dict[str, Any]:
    """The rows of each set, with prompts."""
    from groupax.data.examples import load_examples
    from groupax.data.sources import EVAL_SPLITS
    from groupax.evaluation.sets import sources_by_name

    if command.dataset:
        loaded = {
            name: recipe.examples(source) if recipe else load_examples(source, f"dataset {name!r}", EVAL_SPLITS)
            for name, source in sources_by_name(command.dataset).items()
        }
    else:
        rows = recipe.eval_dataset() if recipe else None
        if rows is None:
            raise ValueError("--dataset is missing; give prompts, or a --recipe that has some")
        loaded = {command.recipe or "eval": rows}
    for name, rows in loaded.items():
        if len(rows) == 0:
            raise ValueError(f"dataset {name!r} is empty")
    if command.limit is None:
        return loaded
    return {name: [rows[index] for index in range(min(command.limit, len(rows)))] for name, rows in loaded.items()}


def _write(
    command: Eval,
    model: str,
    correctness_reward: str | None,
    result: Mapping[str, Mapping[str, Any]],
    seconds: float,
    progress: Progress,
) -> None:
    """`result.json` and the items of each set."""
    from groupax.cli.summary import plain_estimates
    from groupax.evaluation.items import write_items
    from groupax.runs.folder import free_name

    folder = command.output_dir
    if (folder / "result.json").exists():
        aside = free_name(folder)
        folder.rename(aside)
        progress(Message(f"the earlier evaluation in {folder} is now in {aside}"))
    folder.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Any] = {}
    for name, ways in result.items():
        for way, each in ways.items():
            write_items(folder / f"{name}.{way}.jsonl", each.items)
            others = {key: value for key, value in each.metrics.items() if key.startswith(("prompts", "completions/"))}
            sets.setdefault(name, {})[way] = {
                "sampling": asdict(each.params),
                "estimates": plain_estimates(each.estimates),
                "metrics": others,
            }
    record = {
        "model": model,
        "recipe": command.recipe,
        "dataset": command.dataset,
        "correctness_reward": correctness_reward,
        "seconds": round(seconds, 2),
        "sets": sets,
    }
    (folder / "result.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _common_files(before: Path, after: Path) -> dict[str, tuple[Path, Path]]:
    """The files of items to compare, by name.

    Raises:
        ValueError: there are none.
    """
    if before.is_file() and after.is_file():
        return {after.stem: (before, after)}
    for path in (before, after):
        if not path.is_dir():
            raise ValueError(f"{path} is {'a file and the other a folder' if path.is_file() else 'not there'}")
    names = sorted({path.name for path in before.glob("*.jsonl")} & {path.name for path in after.glob("*.jsonl")})
    if not names:
        raise ValueError(f"{before} and {after} have no .jsonl file of the same name: no set was evaluated in both")
    return {Path(name).stem: (before / name, after / name) for name in names}
