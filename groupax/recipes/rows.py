"""What recipes read from the columns of a row. Imports no jax."""

from typing import Any

from groupax.data.examples import Example

QUESTIONS = ("question", "problem", "prompt")


def chat(system: str, row: Example, user: str) -> dict[str, Any]:
    """The prompt of a row: a system message, then the user's; or the conversation that the row has already."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return {"prompt": prompt}
    return {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def question(row: Example) -> str:
    """The problem of a row: its column `question`, `problem` or `prompt`; the user's last message of a conversation.

    Raises:
        ValueError: there is none.
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
    r"""The gold answer: what stands behind `####` in the column `answer`, or else all of it; or else the column
    `solution`, whose answer stands in `\boxed{}`.

    Raises:
        ValueError: there is neither.
    """
    answer = row.get("answer")
    if answer is None or not str(answer).strip():
        answer = row.get("solution")
    if answer is None or not str(answer).strip():
        raise ValueError(f"it has neither a column answer nor solution; it has {', '.join(row)}")
    return str(answer).rpartition("####")[2].strip()
