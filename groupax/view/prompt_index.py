"""An index of the prompts of all steps of a run, built in the background."""

import threading
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from groupax.view.rollouts import Step, read_step
from groupax.view.runs import NotFoundError, Run
from groupax.view.texts import prompt_key, shown_prompt

MAX_ENTRIES = 2_000_000  # groups; 40 bytes each
MAX_TEXTS = 50_000
TEXT_CHARACTERS = 160
ORDERS = ("frequent", "unsolved", "gained", "lost")
TYPECODES = {  # of the columns, for `array`
    "key": "Q",
    "step": "q",
    "prompt_index": "i",
    "size": "i",
    "truncated": "i",
    "mean": "f",
    "low": "f",
    "high": "f",
}


class PromptIndex:
    """The groups of all steps by prompt. Memory is bounded: of a larger run only the first `MAX_ENTRIES` groups are
    indexed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._forget()

    def update(self) -> dict[str, Any]:
        """Continues indexing in the background if there are new steps, and returns the progress."""
        with self._lock:
            if self._generation != self._run.generation:
                self._forget()
            todo = [step for step in self._run.rollout_steps() if step not in self._done]
            if todo and not self._is_full() and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._read, args=(todo,), daemon=True)
                self._thread.start()
            return {
                "num_done": len(self._done),
                "num_steps": len(self._done) + len(todo),
                "num_unreadable": self._num_unreadable,
                "is_full": self._is_full(),
            }

    def close(self) -> None:
        """Stops indexing."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def history(self, key: str) -> dict[str, Any]:
        """Returns the groups of a prompt in the order of steps; none if it is not in the steps indexed so far.

        Raises:
            NotFoundError: The key is malformed.
        """
        columns = self._arrays()
        rows = np.flatnonzero(columns["key"] == np.uint64(_number(key)))
        rows = rows[np.argsort(columns["step"][rows], kind="stable")]
        found = {name: column[rows].tolist() for name, column in columns.items() if name != "key"}
        return {"text": self._texts.get(_number(key), ""), **found}

    def prompts(self, query: str, limit: int, order: str = "frequent") -> list[dict[str, Any]]:
        """Returns prompts that contain a text, with their mean reward the first and the last time, and their best one.

        Args:
            query: Text that a prompt must contain.
            limit: Maximum number of prompts.
            order: `frequent`, `unsolved` (lowest best reward first), `gained` or `lost` (largest change first).

        Raises:
            ValueError: The order is unknown.
        """
        if order not in ORDERS:
            raise ValueError(f"order={order!r} is none of {', '.join(ORDERS)}")
        columns = self._arrays()
        by_step = np.argsort(columns["step"], kind="stable")
        keys, first, group_of, counts = np.unique(
            columns["key"][by_step], return_index=True, return_inverse=True, return_counts=True
        )
        last = len(by_step) - 1 - np.unique(columns["key"][by_step][::-1], return_index=True)[1]
        means = columns["mean"][by_step].astype(np.float64)
        best = np.full(len(keys), np.nan)
        np.fmax.at(best, group_of, columns["high"][by_step])
        found = {"first": means[first], "last": means[last], "best": best}
        wanted = {
            "frequent": np.zeros(len(keys)),
            "unsolved": best,
            "gained": found["first"] - found["last"],
            "lost": found["last"] - found["first"],
        }[order]
        query = query.casefold()
        rows: list[dict[str, Any]] = []
        for index in np.lexsort((-counts, np.nan_to_num(wanted, nan=np.inf))).tolist():
            text = self._texts.get(int(keys[index]), "")
            if query in text.casefold():
                values = {name: float(column[index]) for name, column in found.items()}
                rows.append({"key": f"{int(keys[index]):016x}", "text": text, "count": int(counts[index]), **values})
            if len(rows) == limit:
                break
        return rows

    def _forget(self) -> None:
        self._generation = self._run.generation
        self._columns = {name: array(typecode) for name, typecode in TYPECODES.items()}
        self._texts: dict[int, str] = {}
        self._done: set[int] = set()
        self._num_unreadable = 0

    def _is_full(self) -> bool:
        return len(self._columns["key"]) >= MAX_ENTRIES

    def _read(self, steps: Iterable[int]) -> None:
        generation, weights = self._generation, self._run.reward_weights()
        for number in steps:
            if self._closed.is_set() or self._generation != generation or self._is_full():
                return
            try:
                step = read_step(self._run.rollout_file(number), weights)
            except ValueError:  # damaged, or removed in the meantime
                step = None
            with self._lock:
                if self._generation != generation:
                    return
                self._done.add(number)
                if step is None:
                    self._num_unreadable += 1
                else:
                    self._add(number, step)

    def _add(self, number: int, step: Step) -> None:
        for prompt_index in dict.fromkeys(step.prompt_index.tolist()):
            rows = step.rows_of(prompt_index)
            scalar = step.table.column("prompt")[int(rows[0])]
            key = _number(prompt_key(scalar))
            totals = step.total[rows]
            totals = totals[~np.isnan(totals)]
            low, mean, high = (totals.min(), totals.mean(), totals.max()) if totals.size else (np.nan,) * 3
            values = (key, number, prompt_index, len(rows), int(step.truncated[rows].sum()), mean, low, high)
            for name, value in zip(TYPECODES, values, strict=True):
                self._columns[name].append(value)
            if key not in self._texts and len(self._texts) < MAX_TEXTS:
                self._texts[key] = shown_prompt(step.text("prompt", int(rows[0]))[0])[:TEXT_CHARACTERS]

    def _arrays(self) -> dict[str, np.ndarray]:
        with self._lock:
            return {name: np.array(column) for name, column in self._columns.items()}


def _number(key: str) -> int:
    try:
        return int(key, 16) & (2**64 - 1)
    except ValueError:
        raise NotFoundError(f"{key!r} is not a prompt key") from None
