"""Questions about an SQLite database, on which the embedded model of agents is pretrained.

Every episode has a database of its own, in memory, with a table `fruits(name, colour, price)`. The model writes queries
through a tool, which may read for a limited time.
"""

import random
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from groupax.tools.tool import Step, tool

QUERY_S = 1.0  # time limit of a query
PROGRESS_STEPS = 1000  # instructions of SQLite's virtual machine between looks at the clock
MAX_ROWS = 10  # of a result
MAX_BYTES = 10**5  # of a text or blob that a query makes
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
TABLE_ROWS = 8

NAMES = ("apple", "pear", "plum", "cherry", "lemon", "orange", "grape", "melon", "peach", "fig", "kiwi", "mango")
COLOURS = ("red", "green", "yellow", "blue")
QUESTIONS = (
    ("What does {name} cost?", "SELECT price FROM fruits WHERE name='{name}'"),
    ("How many are {colour}?", "SELECT COUNT(*) FROM fruits WHERE colour='{colour}'"),
    ("What is the highest price of {colour}?", "SELECT MAX(price) FROM fruits WHERE colour='{colour}'"),
    ("What is the lowest price of {colour}?", "SELECT MIN(price) FROM fruits WHERE colour='{colour}'"),
)


class FruitDatabase:
    """An environment with a database that the model may query, and a question that it is to answer."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Fills the table and runs the row's own query, if it has one."""
        self._database = connect(fruits(row.get("seed", seed)))
        self._gold = self._query(row["query"]) if "query" in row else None

    @tool(timeout_s=5)
    def query(self, sql: str) -> str:
        """Queries fruits(name, colour, price).

        Args:
            sql: One SELECT.
        """
        return self._query(sql)

    def act(self, message: Mapping[str, Any]) -> Step:
        """Judges the answer, a message without a call."""
        return Step(reward=float(message["content"].strip() == self._gold), done=True)

    def close(self) -> None:
        """Frees the database."""
        self._database.close()

    def _query(self, sql: str) -> str:
        end_s = time.monotonic() + QUERY_S
        self._database.set_progress_handler(lambda: time.monotonic() > end_s, PROGRESS_STEPS)
        try:
            rows = self._database.execute(sql).fetchmany(MAX_ROWS)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ValueError(f"{error}") from error
        return "\n".join(", ".join(map(str, row)) for row in rows)


def connect(rows: list[tuple[str, str, int]]) -> sqlite3.Connection:
    """Returns a database in memory with the table `fruits`, which can then only be read."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("CREATE TABLE fruits(name TEXT, colour TEXT, price INTEGER)")
    database.executemany("INSERT INTO fruits VALUES (?, ?, ?)", rows)
    database.commit()
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
    return database


def fruits(seed: int) -> list[tuple[str, str, int]]:
    """Returns the rows of a table, of which every colour has at least one."""
    rng = random.Random(seed)
    colours = [*COLOURS, *rng.choices(COLOURS, k=TABLE_ROWS - len(COLOURS))]
    rng.shuffle(colours)
    return [
        (name, colour, rng.randint(10, 99)) for name, colour in zip(rng.sample(NAMES, TABLE_ROWS), colours, strict=True)
    ]


def problems(num: int, seed: int) -> list[dict[str, Any]]:
    """Generates questions, each with a query that answers it and the seed of its table."""
    rng = random.Random(f"sql {seed}")
    rows = []
    for _ in range(num):
        table = rng.randrange(2**31)
        question, query = rng.choice(QUESTIONS)
        words = {"name": rng.choice(fruits(table))[0], "colour": rng.choice(COLOURS)}
        prompt = [{"role": "user", "content": question.format(**words)}]
        rows.append({"prompt": prompt, "query": query.format(**words), "seed": table})
    return rows
