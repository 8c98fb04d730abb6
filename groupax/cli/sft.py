"""`groupax sft`: its options, from a file and flags, and what it does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from groupax import __version__
from groupax.cli.options import check_flags, flag_value, overlaid, read_yaml, recorded
from groupax.config import SFTConfig
from groupax.events import Message, PhaseStarted
from groupax.parallel import processes
from groupax.parallel.preemption import stoppable
from groupax.runs.progress.named import progress_named
from groupax.settings.command_line import parsed


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
    """Trains a model on examples.

    Raises:
        ValueError: a required option is missing, or a value is invalid.
    """
    for name in ("model", "dataset"):
        if not getattr(command, name):
            raise ValueError(f"--{name} is missing; give it")
    args = command.args
    with progress_named(args.progress_bar) as progress:
        progress(Message(f"groupax {__version__}: the run is in {args.output_dir}"))
        progress(PhaseStarted("loading libraries"))

        from groupax.evaluation.sets import ONLY_SET, sources_by_name
        from groupax.sft import SFTTrainer

        sets = sources_by_name(command.eval_dataset, only=ONLY_SET) if command.eval_dataset else None
        with stoppable():
            trainer = SFTTrainer(str(command.model), args, command.dataset, sets, progress=progress)
        trainer.run_folder.command = recorded(command)
        result = trainer.train()
    if processes.is_primary() and args.progress_bar != "json":
        from groupax.cli.summary import next_commands, show

        show(next_commands(trainer.run_folder.uri, trainer.first_prompt, result))
