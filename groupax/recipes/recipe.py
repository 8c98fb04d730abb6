"""The making of recipes from YAML files and rows of data, and the adaptation of their defaults to a model."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from groupax.core.config import GRPOConfig
from groupax.core.storage.folders import resolve_folder
from groupax.data.examples import Example, Examples, check_text_only
from groupax.data.files import EVAL_SPLITS, TRAIN_SPLITS, MissingSplitError, file_kind, read_rows


@dataclass(frozen=True)
class Recipe:
    """A task that a model can be trained on with one command."""

    model: str  # folder or hub id of the default model
    reward_funcs: Sequence[str]  # names or references of the reward functions
    tools: Sequence[str]  # references of the tools that the model may call
    environments: Sequence[str]  # references of the environments
    source: str | None  # hub id of its data; None if it generates them or takes them from files
    config: Mapping[str, Any]  # settings of `GRPOConfig` that differ from its defaults
    expected: str  # measured result of a run, or a note that there is none
    # loads the training prompts from the recipe's own source, or from a file, a folder or a hub id
    train_dataset: Callable[..., Examples]
    # loads the held-out prompts likewise, of several sets by name; returns None if the source has none
    eval_dataset: Callable[..., Examples | Mapping[str, Examples] | None]
    # loads the prompts of all rows of a file, or of the test split of a folder or hub id
    examples: Callable[[str], Examples]


def make_recipe(
    settings_file: Path,
    example: Callable[[Example], dict[str, Any]],
    generated: Mapping[str, Callable[[], Any]] | None = None,
) -> Recipe:
    """Creates the recipe of a module from its YAML file.

    The file has `model`, `reward_funcs`, `expected`, settings of `GRPOConfig`, and the source of the data: `dataset`, a
    hub id, and `subset`, its configuration. It may have `tools` and `environments`.

    Args:
        settings_file: The YAML file.
        example: Turns a row of the data into a row with a `prompt`; raises ValueError if it cannot.
        generated: Functions that generate "train" and "eval" data, instead of `dataset`; the latter may be several
            sets by name.
    """
    import yaml

    settings = yaml.safe_load(settings_file.read_text(encoding="utf-8"))
    model, rewards, expected = (settings.pop(name) for name in ("model", "reward_funcs", "expected"))
    tools, environments = (settings.pop(name, ()) for name in ("tools", "environments"))
    dataset, subset = settings.pop("dataset", None), settings.pop("subset", None)

    def read(source: str, splits: Sequence[str], name: str) -> Examples:
        rows = read_rows(source, name, splits, subset if source == dataset or Path(source).is_dir() else None)
        check_text_only(rows, f"{name} ({source})", may_have_images=True)
        return [_example(example, rows[index], index, source) for index in range(len(rows))]

    def train_dataset(source: str | None = None) -> Examples:
        if source is None and generated:
            return generated["train"]()
        return read(source or dataset, TRAIN_SPLITS, "train_dataset")

    def eval_dataset(source: str | None = None) -> Examples | Mapping[str, Examples] | None:
        if source is None and generated:
            return generated["eval"]()
        if source is not None and (file_kind(Path(source)) is not None or (Path(source) / "state.json").is_file()):
            return None  # a file, or a single dataset as saved by `datasets`, has no splits
        try:
            return read(source or dataset, EVAL_SPLITS, "eval_dataset")
        except MissingSplitError:
            return None

    model = str(settings_file.parent / model) if model.startswith("./") else model
    config = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    references = tuple(rewards), tuple(tools), tuple(environments)
    read_all = partial(read, splits=EVAL_SPLITS, name="eval_dataset")
    return Recipe(model, *references, dataset, config, expected.strip(), train_dataset, eval_dataset, read_all)


def _example(example: Callable[[Example], dict[str, Any]], row: Any, index: int, source: str) -> dict[str, Any]:
    try:
        return example(row)
    except ValueError as error:
        raise ValueError(f"row {index} of {source} does not fit the recipe: {error}") from error


QUESTIONS = ("question", "problem", "prompt")


def chat(system: str, row: Example, user: str) -> dict[str, Any]:
    """Returns the prompt of a row: its conversation if it has one, else a system message and the user's message."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return {"prompt": prompt}
    return {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def question(row: Example) -> str:
    """Returns the problem of a row, from `question`, `problem` or `prompt`; of a conversation the last message."""
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
    r"""Returns the gold answer: the column `answer` after any `####`, else `solution`, which has it in `\boxed{}`."""
    found = (row[name] for name in ("answer", "solution") if row.get(name) is not None)
    answer = next((value for value in found if str(value).strip()), None)
    if answer is None:
        raise ValueError(f"it has neither a column answer nor a column solution; it has {', '.join(row)}")
    return str(answer).rpartition("####")[2].strip()


Split = Literal["train", "held_out"]
Problem = TypeVar("Problem")


def draw_split(
    draw: Callable[[random.Random], Problem], is_held_out: Callable[[Problem], bool], seed: int, split: Split
) -> Iterator[Problem]:
    """Yields random problems of a split, without end; they depend on the seed and the split alone."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split must be 'train' or 'held_out', got {split!r}")
    rng = random.Random(f"{split} {seed}")
    while True:
        problem = draw(rng)
        if is_held_out(problem) == (split == "held_out"):
            yield problem


FALLBACK_TEMPLATE = "plain"


def max_positions_of(model: str) -> int:
    """Returns the number of positions of the model in a folder or with a hub id."""
    from groupax.models.families import read_config
    from groupax.models.flops import find_config
    from groupax.models.weights.nf4 import without_nf4

    return read_config(without_nf4(find_config(str(resolve_folder(model)))[0])).max_positions


def fit_config(args: GRPOConfig, recipe: Recipe, positions: int) -> tuple[GRPOConfig, list[str]]:
    """Returns the settings, with defaults changed that do not fit a model of so few positions, and messages."""
    default = recipe.config["max_completion_length"]
    if args.max_completion_length != default:
        return args, []
    longest, notes = fitting_length(positions, default, args.max_prompt_length)
    return replace(args, max_completion_length=longest), notes


def fitting_length(positions: int, max_completion_length: int, max_prompt_length: int | None) -> tuple[int, list[str]]:
    """Returns a default for the longest completion that leaves room for prompts: at most half of the positions.

    A message for the user comes with it if it differs from `max_completion_length`.
    """
    half = positions // 2
    if max_completion_length + (max_prompt_length or 1) <= positions or max_completion_length <= half:
        return max_completion_length, []
    return half, [
        f"the model has {positions} positions: completions have at most {half} tokens instead of the default "
        f"{max_completion_length}, and prompts have the rest"
    ]


def fitting_template(
    model: str, chat_template: str | None, datasets: Sequence[Examples]
) -> tuple[str | None, list[str]]:
    """Returns the chat template for a model, None for its own, and a message for the user if it is a fallback.

    There is one if prompts are conversations and the model has no template, as base models, and the user gave none.
    """
    from groupax.data.tokenizer import is_conversational, load_tokenizer

    if chat_template is not None or not any(is_conversational(rows[0]["prompt"]) for rows in datasets if len(rows)):
        return chat_template, []
    folder = resolve_folder(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return None, []  # the tokenizer of the base model is loaded with it
    if load_tokenizer(folder).chat_template:
        return None, []
    return FALLBACK_TEMPLATE, [
        f"the tokenizer has no chat template (a base model?): prompts are written with chat_template "
        f"'{FALLBACK_TEMPLATE}'"
    ]
