"""TRL's `TrlParser`: arguments from the command line and from a YAML file."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from transformers.hf_argparser import HfArgumentParser


class TrlParser(HfArgumentParser):
    """transformers' parser of dataclasses, which also reads the YAML file that `--config` names.

    The file's values are the defaults of the command line. Its mapping `env` becomes environment variables.

    Args:
        dataclass_types: The dataclasses to fill.
        kwargs: Arguments of `argparse.ArgumentParser`.

    Raises:
        ValueError: A dataclass has a field `config`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        given = [] if dataclass_types is None else dataclass_types
        kinds = list(given) if isinstance(given, Iterable) else [given]
        for kind in kinds:
            if "config" in kind.__dataclass_fields__:
                raise ValueError(f"{kind.__name__} has a field config, which is the flag of the YAML file; rename it")
        super().__init__(kinds, **kwargs)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Returns an instance of each dataclass, and the unknown arguments if they are requested.

        Args:
            args: The command line; by default that of the process.
            return_remaining_strings: Whether unknown arguments are returned, as the last item.
            fail_with_unknown_args: Whether an unknown key of the file is refused, if it is not returned.
            separate_remaining_strings: Whether those of the file and of the command line are two items.

        Raises:
            ValueError: The file is not a mapping, or has an unknown key.
        """
        given = list(sys.argv[1:] if args is None else args)
        unknown = self.set_defaults_with_config(**_config(given))
        parsed = self.parse_args_into_dataclasses(given, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            *records, rest = parsed
            return (*records, unknown, rest) if separate_remaining_strings else (*records, unknown + rest)
        if unknown and fail_with_unknown_args:
            raise ValueError(
                f"the config file has settings that are no fields of {self._names()}: {' '.join(unknown)}; remove them"
            )
        return parsed

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Makes values the defaults of the flags of their names; returns those without a flag as arguments."""
        used = _set_defaults(self, kwargs)
        return [text for name, value in kwargs.items() if name not in used for text in (f"--{name}", str(value))]

    def _names(self) -> str:
        return ", ".join(kind.__name__ for kind in self.dataclass_types)


def _config(args: list[str]) -> dict[str, Any]:
    """Removes `--config FILE` from the arguments; returns the file's settings and sets its environment variables."""
    if "--config" not in args:
        return {}
    flag = args.index("--config")
    if flag + 1 == len(args):
        raise ValueError("--config needs a YAML file")
    path = Path(args[flag + 1])
    del args[flag : flag + 2]
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must contain settings as a YAML mapping, it contains {type(settings).__name__}")
    variables = settings.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ValueError(f"env in {path} must be a mapping of environment variables, got {variables!r:.80}")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return settings


def _set_defaults(parser: Any, values: dict[str, Any]) -> set[str]:
    """Sets the defaults of a parser and of its commands; returns the names that were used."""
    used: set[str] = set()
    for action in parser._actions:
        if isinstance(action.choices, dict):  # commands
            for command in action.choices.values():
                used |= _set_defaults(command, values)
        elif action.dest in values:
            action.default, action.required = values[action.dest], False
            used.add(action.dest)
    return used
