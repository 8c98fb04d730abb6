"""Access to the columns of a row for recipes. Imports no jax."""

from typing import Any

from groupax.data.examples import Example

QUESTIONS = ("question", "problem", "prompt")


def chat(system: str, row: Example, user: str) -> dict[str, Any]:
    """Returns the prompt of a row: its conversation if it has one, else a system message and the user's message."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return {"prompt": prompt}
    return {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def question(row: Example) -> str:
    """Returns the problem of a row, from `question`, `problem` or `prompt`; of a conversation the last message.

    Raises:
        ValueError: There is none.
    """
    for name in QUESTIONS:
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = value[-1].get("content")
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise ValueError(
        f"it has no text in a column {', '.join(QUESTIONS[:-1])} or {QUESTIONS[-1]}; it has {', '.join(row)}"
    )


def gold(row: Example) -> str:
    r"""Returns the gold answer: the column `answer` after any `####`, else `solution`, with the answer in `\boxed{}`.

    Raises:
        ValueError: The row has neither column.
    """
    answer = row.get("answer")
    if answer is None or not str(answer).strip():
        answer = row.get("solution")
    if answer is None or not str(answer).strip():
        raise ValueError(f"it has neither a column answer nor a column solution; it has {', '.join(row)}")
    return str(answer).rpartition("####")[2].strip()
