"""The command `groupax`. Each subcommand imports what it needs when it runs."""

import argparse
import glob
import io
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from groupax import __version__
from groupax.cli import evaluate as evaluation_commands
from groupax.cli import models as model_commands
from groupax.cli import results as result_commands
from groupax.cli.launch import launch
from groupax.cli.plan import plan
from groupax.cli.serve import serve
from groupax.cli.view import view
from groupax.config import NAMES_ELSEWHERE, GRPOConfig, hint_for
from groupax.errors import PREEMPTED, PreemptedError, RunError
from groupax.events import Message, PhaseStarted
from groupax.parallel import processes
from groupax.parallel.preemption import before_training
from groupax.recipes import RECIPES, Recipe, load_recipe
from groupax.runs.diagnostics import reward_diagnostics
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import progress_named
from groupax.runs.progress.rich import Rich
from groupax.settings.command_line import parsed
from groupax.settings.compute import DecodingWeights
from groupax.settings.fields import nearest
from groupax.settings.sampling import SamplingParams
from groupax.terminal.printable import printable

if TYPE_CHECKING:
    from groupax.trainer import GRPOTrainer

_python_format = warnings.formatwarning
USAGE = f"""usage: groupax COMMAND [options]      (groupax COMMAND --help lists them)

       groupax --version

commands:
  train      train a model with --model, --dataset and --reward_funcs, or with --recipe ({", ".join(RECIPES)})
  eval       evaluate a model: groupax eval --model MODEL --recipe gsm8k --dataset FILE_OR_FOLDER
  compare    compare two evaluations on the same prompts: groupax compare BEFORE AFTER
  report     write an HTML and Markdown report of a run: groupax report RUN_DIR
  generate   sample completions from a model
  serve      serve a model with OpenAI's API: groupax serve --model MODEL --port 8000
  resume     resume a run that was stopped: groupax resume RUN_DIR [options of train that should differ]
  checkpoints   manage the checkpoints of a run: groupax checkpoints RUN_DIR list | verify | delete STEP |
             export [STEP] --to FOLDER
  launch     start one program as several processes: groupax launch local | slurm | ray [options] -- train ...
  plan       estimate memory and step time on other hardware: groupax plan --model MODEL --devices v4-64
  view       show runs on a live local web page: groupax view RUN_DIR [RUN_DIR ...]
  inspect    describe a model and its memory, or what an adapter trains
  merge      merge an adapter into its base
  convert    convert a model to another dtype
  quantize   quantize a model to 4 bits
  push       upload a model or an adapter to the Hugging Face hub
"""


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
    """Reward functions: names of built-in ones, or module:function."""
    args: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=GRPOConfig)
    """Settings of the run."""


@dataclass(frozen=True, kw_only=True)
class Resume(Train):
    """Continue a run that was stopped, with the command that started it. Options given here take precedence."""

    run_dir: tyro.conf.Positional[str]
    """Run folder or URL, or one of its checkpoints."""


@dataclass(frozen=True)
class Checkpoints:
    """List a run's checkpoints, check their files, delete one, or export one as a Hugging Face folder."""

    run_dir: tyro.conf.Positional[str]
    """Run folder or URL, or one of its checkpoints."""
    action: tyro.conf.Positional[Literal["list", "verify", "delete", "export"]] = "list"
    """Action."""
    step: tyro.conf.Positional[int | None] = None
    """Step of the checkpoint to delete or export; the default for export is the newest."""
    to: Path | None = None
    """Folder to export the model to."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample completions of prompts and print them with the throughput."""

    model: str
    """A folder, a Hugging Face hub id, or the name of a recipe, which stands for its model."""
    prompt: tuple[str, ...]
    """Prompts to complete."""
    chat: bool = False
    """Format each prompt with the model's chat template."""
    chat_template: str | None = None
    """Chat template for a tokenizer without one: chatml, plain, or a file."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template with --chat, as JSON, e.g. '{"enable_thinking": false}'."""
    weights: DecodingWeights = "same"
    """Precision of the weights for decoding: as stored, or in fewer bits."""
    tp: int = 1
    """Tensor-parallel size: devices that share the weights, with some heads each; 1 replicates the weights."""
    kv_cache_gb: float | None = None
    """Memory for the KV cache on each device in GB; the default is 80 % of what is free."""
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)
    """Sampling parameters."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Mistakes of the user are reported without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"groupax {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        hint = nearest(arguments[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        print(f"groupax: there is no command {arguments[0]!r}{hint} (groupax --help explains them)", file=sys.stderr)
        return 2
    return exit_status(f"groupax {arguments[0]}", lambda: COMMANDS[arguments[0]](arguments[1:]))


def exit_status(name: str, command: Callable[[], object]) -> int:
    """Runs a command and returns its exit status, or the number that it returns; reports errors in one line."""
    try:
        status = command()
    except PreemptedError as stopped:  # already reported, with what to do
        return PREEMPTED if stopped.code == PREEMPTED else 1
    except (ValueError, TypeError) as error:
        _report_to_other_processes(error)
        if error.__traceback__ and _raised_outside(error):
            raise
        print(printable(f"{name}: {error}"), file=sys.stderr)
        return 2
    except RunError as error:
        _report_to_other_processes(error)
        print(printable(f"{name}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else 0


def _report_to_other_processes(error: Exception) -> None:
    with suppress(RunError):
        processes.fail(error)


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
    lists = {name: tuple(command[name]) for name in ("reward_funcs", "eval_dataset") if command[name]}
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


def checkpoints(arguments: Sequence[str]) -> None:
    """Runs `groupax checkpoints`."""
    command = parsed(Checkpoints, "checkpoints", arguments)

    from groupax.runs.checkpoints.choose import split_path, store_of

    run, step = split_path(command.run_dir)
    with tempfile.TemporaryDirectory() as scratch:
        store = store_of(run, Path(scratch))
        steps = store.steps()
        if not steps:
            raise ValueError(f"{run} has no checkpoints")
        chosen = command.step if command.step is not None else step
        if chosen is not None and chosen not in steps:
            raise ValueError(f"{run} has no checkpoint of step {chosen}; it has {', '.join(map(str, steps))}")
        CHECKPOINT_ACTIONS[command.action](store, chosen, command)


def _list_checkpoints(store: Any, _: int | None, command: Checkpoints) -> None:
    from groupax.runs.checkpoints.inspect import listed

    for each in listed(store):
        shown = {name: each.metrics[name] for name in ("reward", "eval_reward", "loss", "kl") if name in each.metrics}
        values = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        where = "within the updates on a rollout" if each.rollout else ""
        line = f"step {each.step:6d}  {each.saved_at or 'state.json cannot be read'}  {values}  {where}"
        print(printable(line.rstrip()))
    print(f"\nto check their files: groupax checkpoints {command.run_dir} verify")


def _verify_checkpoints(store: Any, _: int | None, command: Checkpoints) -> None:
    from groupax.runs.checkpoints.inspect import damages

    found = damages(store)
    for step, fault in found.items():
        print(printable(f"step {step:6d}  {'whole' if fault is None else f'DAMAGED: {fault}'}"))
    num_damaged = sum(fault is not None for fault in found.values())
    if num_damaged:
        raise ValueError(f"{num_damaged} of {len(found)} checkpoints in {command.run_dir} are damaged")


def _delete_checkpoint(store: Any, step: int | None, command: Checkpoints) -> None:
    if step is None:
        raise ValueError(f"which one? groupax checkpoints {command.run_dir} delete STEP")
    store.delete(step)
    print(f"deleted {store.where(step)}")


def _export_checkpoint(store: Any, step: int | None, command: Checkpoints) -> None:
    from groupax.runs.checkpoints.inspect import export, tokenizer_of

    if command.to is None:
        raise ValueError("where to? give --to FOLDER")
    chosen = store.steps()[-1] if step is None else step
    folder = export(store, chosen, command.to, tokenizer_of(store))
    print(f"the model of {store.where(chosen)} is in {folder}")


# The actions of `groupax checkpoints` by name.
CHECKPOINT_ACTIONS = {
    "list": _list_checkpoints,
    "verify": _verify_checkpoints,
    "delete": _delete_checkpoint,
    "export": _export_checkpoint,
}


def start(command: Train) -> None:
    """Trains a model, and evaluates it before and after if there are held-out prompts.

    Raises:
        ValueError: a required option is missing, or a value is invalid.
    """
    recipe = load_recipe(command.recipe) if command.recipe else None
    model: Any = command.model or (recipe and recipe.model)
    rewards: Any = command.reward_funcs or (recipe and recipe.reward_funcs)
    for name, value in (("model", model), ("dataset", command.dataset or recipe), ("reward_funcs", rewards)):
        if not value:
            raise ValueError(f"--{name} is missing; give it, or a --recipe that has it ({', '.join(RECIPES)})")

    with progress_named(command.args.progress_bar) as progress:
        closing = _train(command, recipe, model, list(rewards), progress)
    if command.args.progress_bar == "json":
        for text in closing:
            if isinstance(text, str):
                progress(Message(text.strip()))
    elif closing:
        from groupax.cli.summary import show

        show(closing)


def _train(command: Train, recipe: Recipe | None, model: str, rewards: list[str], progress: Progress) -> list[Any]:
    """Returns what to show at the end (see `summary.show`), in the primary process."""
    args = command.args
    progress(Message(f"groupax {__version__}: the run is in {args.output_dir}"))
    progress(PhaseStarted("loading libraries"))

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
        trainer = GRPOTrainer(model, list(rewards), args, dataset, sets, progress=progress)
    trainer.run_folder.command = _recorded(command)
    with trainer.holding_folder():
        return _train_and_report(trainer, is_evaluated=sets is not None)


def _train_and_report(trainer: "GRPOTrainer", is_evaluated: bool) -> list[Any]:
    """Returns what to show at the end, in the primary process."""
    if not is_evaluated:
        result = trainer.train()
        return _next_commands(trainer, result)

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
    return [*closing, *_next_commands(trainer, result)]


def _next_commands(trainer: "GRPOTrainer", result: Any) -> list[Any]:
    if not processes.is_primary():
        return []

    from groupax.cli.summary import next_commands

    return next_commands(trainer.run_folder.uri, trainer.prompts.examples[0]["prompt"], result)


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
    is_list = key in ("reward_funcs", "eval_dataset")
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


def generate(arguments: Sequence[str]) -> None:
    """Runs `groupax generate`."""
    import time

    command = parsed(Generate, "generate", arguments)

    with Rich() if sys.stdout.isatty() else Progress() as progress:
        progress(PhaseStarted("loading libraries"))

        from groupax.data.tokenizer import encode_prompts
        from groupax.engine.engine import Engine
        from groupax.parallel.compilation import compilation

        progress.is_compiling = lambda: compilation().is_under_way
        progress(PhaseStarted("loading the model"))
        name = load_recipe(command.model).model if command.model in RECIPES else command.model
        kv_bytes = None if command.kv_cache_gb is None else int(command.kv_cache_gb * 1e9)
        engine = Engine.load(
            name, chat_template=command.chat_template, weights=command.weights, tp=command.tp, kv_bytes=kv_bytes
        )
        prompts = [[{"role": "user", "content": text}] if command.chat else text for text in command.prompt]
        ids = encode_prompts(engine.tokenizer, prompts, [command.chat_template_kwargs] * len(prompts))
        progress(PhaseStarted("generating"))
        compiled_before_s, started_s = compilation().seconds, time.perf_counter()
        groups = engine.generate(ids, command.sampling)
        seconds, compile_s = time.perf_counter() - started_s, compilation().seconds - compiled_before_s
    for text, group in zip(command.prompt, groups, strict=True):
        for sequence in group:
            about = f"{len(sequence.tokens)} tokens, {sequence.finish_reason}"
            print(f"--- {text!r} ({about})\n{printable(sequence.text)}")
    num_tokens = sum(len(sequence.tokens) for group in groups for sequence in group)
    print(f"\n{throughput(num_tokens, seconds, compile_s)}")


def throughput(num_tokens: int, seconds: float, compile_s: float) -> str:
    """Returns a line about the speed of a generation, which separates decoding from compilation.

    Args:
        num_tokens: Number of generated tokens.
        seconds: Duration of the generation.
        compile_s: Seconds of it that were spent compiling programs or reading them from the cache.
    """
    decode_s = max(seconds - compile_s, 1e-9)
    return (
        f"{num_tokens:,} tokens in {decode_s:.2f} s, {num_tokens / decode_s:,.0f} tokens/s; compiling the programs, "
        f"which are kept for the next time, took {compile_s:.2f} s more"
    )


def plan_run(arguments: Sequence[str]) -> int:
    """Runs `groupax plan` with the defaults of `groupax train`."""
    defaults = train_defaults(arguments)
    recipe = load_recipe(defaults.recipe) if defaults.recipe else None
    return plan(arguments, defaults.model or (recipe and recipe.model), defaults.args, recipe)


COMMANDS = {
    "train": train,
    "eval": evaluation_commands.evaluate,
    "compare": result_commands.compare,
    "report": result_commands.report,
    "generate": generate,
    "serve": serve,
    "resume": resume,
    "checkpoints": checkpoints,
    "launch": launch,
    "view": view,
    "plan": plan_run,
    "inspect": model_commands.inspect,
    "merge": model_commands.merge,
    "convert": model_commands.convert,
    "quantize": model_commands.quantize,
    "push": model_commands.push,
}


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


def _raised_outside(error: BaseException) -> bool:
    """Returns whether an error comes from other code than ours, so that its traceback helps."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and not frame.tb_frame.f_globals.get("__name__", "").startswith("groupax")


def entry_point() -> None:
    """Runs the console script, which finds modules in the current folder too, after installed ones."""
    sys.path.append("")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escapes for characters that an old terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_traceback
    warnings.formatwarning = _formatted_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    sys.exit(main())


class _Visible(logging.Formatter):
    """A formatter for loggers without a handler; it escapes what a model may have written."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _formatted_warning(*warning: Any, **more: Any) -> str:
    return printable(_python_format(*warning, **more))


def _print_traceback(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Prints an uncaught exception as Python does, but escapes what a model may have written."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, frames))))
