"""A recorded run: what its folder has of each step. It is only read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from groupax.core.settings.run import UNSEEN
from groupax.core.storage.buckets import is_remote
from groupax.core.storage.folders import read_json
from groupax.core.types import Rollout
from groupax.runs.checkpoints.choose import Saved, readable_checkpoints, split_path, store_of
from groupax.runs.checkpoints.store import LocalStore
from groupax.runs.files import parsed_record
from groupax.runs.rollout_log import RolloutLog, rollout_of
from groupax.runs.step_record import NAME, StepRecord, parsed_records

# Columns that every file of the rollout log has, without a null.
ALWAYS = (
    *("prompt_index", "sample_index", "prompt", "completion", "finish_reason", "policy_version", "advantage"),
    *("prompt_ids", "completion_ids", "policy_logps", "sampler_logps"),
)
# Of a process, all that rounding depends on.
MACHINE = ("platform", "num_devices", "mesh", "processor", "versions")


@dataclass(frozen=True)
class RecordedRun:
    """A run folder that is replayed.

    Attributes:
        folder: The run folder.
    """

    folder: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The settings of the run's last process."""
        return self._content("config.json")

    @cached_property
    def records(self) -> dict[int, StepRecord]:
        """The digests of each step."""
        path = self.folder / NAME
        return parsed_records(path.read_bytes()) if path.is_file() else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        path = self.folder / "metrics.jsonl"
        lines = map(parsed_record, path.read_bytes().splitlines() if path.is_file() else ())
        return [dict(line) for line in lines if isinstance(line.get("step"), (int, float))]

    @cached_property
    def processes(self) -> list[Mapping[str, Any]]:
        """The records of the processes that worked on the run, in their order."""
        processes = self._content("run.json").get("processes", [])
        if not isinstance(processes, list) or not all(map(_is_process, processes)):
            raise ValueError(f"{self.folder / 'run.json'} is damaged: {processes!r:.80} are not processes of a run")
        return processes

    def process(self, step: int) -> Mapping[str, Any]:
        """Returns the record of the process that took a step, the last one of those that did."""
        return next((each for each in reversed(self.processes) if each.get("step", 0) < step), {})

    def settings(self, step: int) -> Mapping[str, Any]:
        """Returns the settings of the process that took a step."""
        return self.process(step).get("settings", self.config)

    def command(self, step: int) -> Mapping[str, Any] | None:
        """Returns the command of the process that took a step; None if the run was started from Python."""
        return self.process(step).get("command") or self._content("command.json") or None

    @cached_property
    def changes(self) -> Mapping[int, Mapping[str, tuple[Any, Any]]]:
        """Settings and options before and after each step after which a process continued the run with other ones."""
        found = {}
        for step in sorted({each.get("step", 0) for each in self.processes} - {0}):
            before, after = ({**(self.command(each) or {}), **self.settings(each)} for each in (step, step + 1))
            names = (name for name in after if name not in UNSEEN and before.get(name) != after[name])
            if changed := {name: (before.get(name), after[name]) for name in names}:
                found[step] = changed
        return found

    def machine_changes(self, step: int, now: Mapping[str, Any]) -> list[str]:
        """Returns how the machine and the libraries with which a step was taken differ from those of this process."""
        then = self.process(step)
        changed = [name for name in MACHINE if then.get(name, now[name]) != now[name]]
        found = [f"{name} {then[name]} in the run, {now[name]} now" for name in changed]
        if "num_devices" in changed and now["platform"] == then.get("platform") == "cpu":
            found[changed.index("num_devices")] += f" (JAX_NUM_CPU_DEVICES={then['num_devices']} sets it)"
        return found

    def _content(self, name: str) -> Mapping[str, Any]:
        """Returns the content of a file of the run; empty if it is not there."""
        path = self.folder / name
        return read_json(path) if path.is_file() else {}

    def checkpoint(self, step: int) -> Saved | None:
        """Returns the newest intact checkpoint at this step or before it; None if the run's own start is nearer.

        Raises:
            ValueError: There is none, and the run did not start from the beginning.
        """
        found = readable_checkpoints(LocalStore(self.folder / "checkpoints"), {})
        return next((saved for saved in found if saved.step <= step), None) or self._origin()

    def _origin(self) -> Saved | None:
        """Returns the checkpoint of another run that this one started from; None if it started from the beginning."""
        first = self.processes[0] if self.processes else {}
        if not first.get("step"):
            return None
        run, step = split_path(first["checkpoint"])
        found = () if is_remote(run) else readable_checkpoints(store_of(run, Path(run)), {})
        origin = next((saved for saved in found if saved.step == step), None)
        if origin is None:
            raise ValueError(
                f"{self.folder} has no checkpoint to start from, and it started from {first['checkpoint']}, which "
                f"{'is in a bucket' if is_remote(run) else 'is not there'}"
            )
        return origin

    def calls(self, number: int) -> list[Path]:
        """Returns the files with what tools and environments answered in a rollout."""
        return sorted((self.folder / "calls").glob(f"rollout_{number:06d}.*.jsonl"))

    def keeps(self, steps: Sequence[int]) -> bool:
        """Returns whether the completions of one of these steps were kept."""
        return any(RolloutLog(self.folder / "rollouts").path(step).is_file() for step in steps)

    def table(self, step: int) -> dict[str, list[Any]] | None:
        """Returns the columns of the step's completions; None if they were not kept.

        Raises:
            ValueError: Their file is damaged.
        """
        path = RolloutLog(self.folder / "rollouts").path(step)
        return read_completions(path) if path.is_file() else None

    def groups(self, steps: Sequence[int], examples: Any) -> list[list[Rollout]] | None:
        """Returns the scored completions of a rollout by group; None if they were not kept.

        Args:
            steps: The steps that trained on the rollout, each of whose files has all of it.
            examples: Function that returns the dataset's rows of this many prompts.

        Raises:
            ValueError: They are damaged.
        """
        columns = next((table for step in steps if (table := self.table(step)) is not None), None)
        if columns is None:
            return None
        rows = examples(len(set(columns["prompt_index"])))
        groups: dict[int, list[Rollout]] = {}
        for index, prompt in enumerate(columns["prompt_index"]):
            try:
                rollout = _rollout({name: column[index] for name, column in columns.items()}, rows[prompt])
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"row {index} of the completions that {self.folder} has of step {steps[0]} is damaged: {error}"
                ) from error
            groups.setdefault(prompt, []).append(rollout)
        return [*groups.values()]


def read_completions(path: Path) -> dict[str, list[Any]]:
    """Returns the columns of a file of the rollout log.

    Raises:
        ValueError: It is damaged, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    lacking = [name for name in ALWAYS if name not in table.column_names or table[name].null_count]
    if lacking:
        raise ValueError(f"{path} is damaged: {lacking[0]} is missing, or has no value in some row")
    return table.to_pydict()


def _is_process(record: Any) -> bool:
    """Returns whether a record of a process has the entries that are read here, or none, as those of older versions."""
    kinds = {"step": int, "settings": dict, "command": dict, "checkpoint": str, "versions": dict}
    return isinstance(record, dict) and all(isinstance(record.get(name, kind()), kind) for name, kind in kinds.items())


def recorded_run(path: str | Path) -> RecordedRun:
    """Returns the recorded run in a folder.

    Raises:
        ValueError: There is none, or it has no record.
    """
    if is_remote(str(path)):
        raise ValueError(f"{path} is in a bucket; copy the run to a local folder to replay it")
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")
    run = RecordedRun(folder)
    if not run.records:
        raise ValueError(f"{folder} has no step in {NAME}: no optimizer step of GRPO was recorded there")
    return run


def _rollout(row: Mapping[str, Any], example: Mapping[str, Any]) -> Rollout:
    """Returns the completion of a row of the log.

    Raises:
        ValueError: It is damaged.
    """
    lengths = {len(row[name]) for name in ("completion_ids", "policy_logps", "sampler_logps")}
    if len(lengths) > 1:
        raise ValueError(f"its tokens and log-probs have the lengths {sorted(lengths)}")
    return rollout_of({**row, "text": row["completion"]}, example)
