"""Options of the commands that train, from files and flags, and their record in the run folder."""

import argparse
import glob
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from groupax.config import NAMES_ELSEWHERE, GRPOConfig, SFTConfig, hint_for
from groupax.settings.fields import nearest

LISTS = ("reward_funcs", "eval_dataset", "tools", "environments")  # options of the command that are lists of texts


def check_flags(arguments: Sequence[str], config: type[GRPOConfig] | type[SFTConfig]) -> None:
    """Checks that no flag has the name that it has in another library.

    Args:
        arguments: Arguments of the command.
        config: Class of its settings.

    Raises:
        ValueError: A flag has the name that TRL gives it; says what to write.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in NAMES_ELSEWHERE:
            raise ValueError(f"there is no flag {flag}{hint_for(name, (), config)}")


def overlaid(command: Any, file: Mapping[str, Any], path: str) -> Any:
    """Returns a command with the settings of a --config file in place of its own.

    Args:
        command: The command, a dataclass whose field `args` has the settings.
        file: Content of the file.
        path: Path of the file, for errors.

    Raises:
        ValueError: a key is no setting, or a value has the wrong type.
    """
    own = {item.name for item in fields(command)} - {"args", "config"}
    settings = {item.name for item in fields(command.args)}
    for key in file:
        if key not in own | settings:
            raise ValueError(f"{path} has an unknown key {key!r}{nearest(str(key), own | settings)}")
    config = type(command.args).from_mapping(vars(command.args) | {key: file[key] for key in file if key in settings})
    return replace(command, args=config, **{key: option_value(key, file[key], path) for key in file if key in own})


def option_value(key: str, value: Any, path: str) -> Any:
    """Returns the value of one of the command's own options, as a flag would give it."""
    is_list = key in LISTS
    if key == "eval_dataset" and isinstance(value, dict):
        value = [f"{name}={source}" for name, source in value.items()]
    if value is None or (isinstance(value, str) and not is_list):
        return value
    texts = [value] if isinstance(value, str) else value
    if not is_list or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path}: {key} must be {'a text or a list of texts' if is_list else 'a text'}, got {value!r}")
    return tuple(texts)


def flag_value(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of a flag on which the defaults of the others depend."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value")
    return parser.parse_known_args(list(arguments))[0].value


def recorded(command: Any) -> dict[str, Any]:
    """Returns the options of the command without its settings, such that it can be repeated from any folder."""
    recorded = {
        item.name: getattr(command, item.name) for item in fields(command) if item.name not in ("args", "config")
    }
    for name in ("model", "dataset"):
        recorded[name] = _absolute(recorded[name])
    if command.eval_dataset:
        parts = [text.rpartition("=") for text in command.eval_dataset]
        recorded["eval_dataset"] = [f"{name}{equals}{_absolute(source)}" for name, equals, source in parts]
    return recorded


def _absolute(source: str | None) -> str | None:
    is_local = source and (Path(source).exists() or glob.has_magic(source))
    return str(Path(source).resolve()) if source and is_local else source


def read_yaml(path: str) -> Mapping[str, Any]:
    """Returns the content of a --config file.

    Raises:
        ValueError: it is no YAML mapping.
    """
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
