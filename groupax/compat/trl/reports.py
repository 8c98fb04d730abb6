"""Methods of transformers' trainers that print and save the results of a run."""

import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupax.compat.callbacks import State
from groupax.compat.trl.accelerator import Accelerator
from groupax.metrics.completions import json_numbers
from groupax.parallel import processes
from groupax.storage.buckets import is_remote

TRAINER_STATE = "trainer_state.json"


class Reports:
    """The methods of a trainer that print and save its results.

    Attributes:
        args: Settings.
        state: Progress of the run.
    """

    args: Any
    _output_dir: str
    state: State

    @functools.cached_property
    def accelerator(self) -> Accelerator:
        """The processes of the run, with the names of accelerate's class."""
        return Accelerator()

    def is_world_process_zero(self) -> bool:
        """Returns whether this is the process that prints and writes."""
        return processes.is_primary()

    def is_local_process_zero(self) -> bool:
        """Returns whether this is the first process of its machine; groupax has one on each."""
        return True

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Returns metrics as the texts that `log_metrics` prints."""
        return {name: _text_of(name, value) for name, value in metrics.items()}

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Prints metrics as transformers does.

        Args:
            split: What they are about, e.g. "train" or "eval".
            metrics: Values by name.
        """
        if not self.is_world_process_zero():
            return
        texts = self.metrics_format(dict(sorted(metrics.items())))
        name_width, width = (max(map(len, each), default=0) for each in (texts, texts.values()))
        print(f"***** {split} metrics *****")
        for name, text in texts.items():
            print(f"  {name:<{name_width}} = {text:>{width}}")

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Writes metrics to a file in `output_dir`.

        Args:
            split: What they are about; the file is `<split>_results.json`.
            metrics: Values by name.
            combined: Whether to add them to `all_results.json` too.
        """
        if not self.is_world_process_zero():
            return
        folder = self._report_folder()
        _write(folder / f"{split}_results.json", metrics)
        if combined:
            everything = folder / "all_results.json"
            earlier = json.loads(everything.read_text(encoding="utf-8")) if everything.is_file() else {}
            _write(everything, {**earlier, **metrics})

    def save_state(self) -> None:
        """Writes the state with the log's lines to `trainer_state.json` in `output_dir`."""
        if self.is_world_process_zero():
            self.state.save_to_json(self._report_folder() / TRAINER_STATE)

    def end(self) -> None:
        """Waits for the other processes; the trackers have been closed when training ended."""
        self.accelerator.end_training()

    def _report_folder(self) -> Path:
        if is_remote(self._output_dir):
            raise ValueError(f"output_dir is a bucket, {self._output_dir}; these files need a local folder")
        folder = Path(self._output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _text_of(name: str, value: Any) -> str:
    if "_runtime" in name:
        hundredths = round(100 * value)
        return f"{datetime.timedelta(seconds=hundredths // 100)}.{hundredths % 100:02d}"
    return str(round(value, 4) if isinstance(value, float) else value)


def _write(path: Path, metrics: Mapping[str, float]) -> None:
    path.write_text(json.dumps(json_numbers(metrics), indent=4, sort_keys=True) + "\n", encoding="utf-8")
