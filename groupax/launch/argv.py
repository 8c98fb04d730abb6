"""The words behind `--`: a command of groupax, or any other program."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from groupax.settings.fields import nearest

# Commands of groupax that may run as several processes.
LAUNCHED = ("train", "resume", "eval")


def program_of(words: Sequence[str]) -> list[str]:
    """The program and its arguments.

    Raises:
        ValueError: there are no words, or the first is neither a command nor a program.
    """
    if not words:
        raise ValueError(
            "what is to be started? put it behind --, as in: groupax launch local -n 2 -- train --model ..."
        )
    if words[0] in LAUNCHED:
        return [sys.executable, "-m", "groupax", *words]
    if shutil.which(words[0]) is None:
        raise ValueError(
            f"{words[0]!r} is neither {', '.join(LAUNCHED)} nor a program that is found{nearest(words[0], LAUNCHED)}"
        )
    return list(words)


def split_words(arguments: Sequence[str], usage: str) -> tuple[list[str], list[str]]:
    """The launcher's own arguments, and those behind the first `--`, where `groupax train` is `train`.

    Raises:
        ValueError: there is no `--`.
    """
    own = list(arguments)
    if "--" in own:
        where = own.index("--")
        return own[:where], _as_command(own[where + 1 :])
    if {"-h", "--help"} & set(own):
        return own, []
    raise ValueError(f"what is to be started stands behind --: {usage}")


def _as_command(words: list[str]) -> list[str]:
    """`train ...` for `groupax train ...` and for `python -m groupax train ...` with this Python."""
    python = shutil.which(words[0]) if words else None
    is_own_python = python is not None and Path(python).parent == Path(sys.executable).parent
    first = 1 if words[:1] == ["groupax"] else 3 if is_own_python and words[1:3] == ["-m", "groupax"] else 0
    return words[first:] if words[first : first + 1] and words[first] in LAUNCHED else words


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option among words, as --name VALUE or --name=VALUE; None if it is not there."""
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return None


def options_of(text: str) -> list[str]:
    """Words as a shell splits them.

    Raises:
        ValueError: a quotation does not end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into words: {error}") from error
