"""Items of evaluations, read one page at a time."""

import json
from pathlib import Path
from typing import Any

from groupax.view.episodes import parts_of
from groupax.view.tail import Tail
from groupax.view.texts import SHOWN_CHARACTERS, shown_prompt

PAGE_ITEMS = 25


def item_page(path: Path, first: int, show: str, query: str) -> dict[str, Any]:
    """Returns a page of the matching items of an evaluation.

    Args:
        path: Path of the JSON Lines file.
        first: Number of matching items to skip.
        show: Which items match: `all`, `solved` (by every completion) or `unsolved`.
        query: Text that the prompt or a completion must contain.

    Raises:
        ValueError: The file cannot be read, or `show` is unknown.
    """
    if show not in SHOWN:
        raise ValueError(f"show={show!r} is none of {', '.join(SHOWN)}")
    query = query.casefold()
    items: list[dict[str, Any]] = []
    num_items = num_shown = num_bad = 0
    file = Tail(path)
    try:
        for record in file.new_objects():
            try:
                item = shown_item(record)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                num_bad += 1
                continue
            num_items += 1
            texts = [item["prompt"], *(each["text"] for each in item["completions"])]
            if not SHOWN[show](item) or not any(query in text.casefold() for text in texts):
                continue
            if first <= num_shown < first + PAGE_ITEMS:
                items.append(item)
            num_shown += 1
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    num_bad += file.num_bad_lines
    return {"items": items, "num_items": num_items, "num_shown": num_shown, "num_bad": num_bad, "page": PAGE_ITEMS}


def shown_item(record: dict[str, Any]) -> dict[str, Any]:
    """Returns an item as the page shows it: its prompt, columns and completions, with long texts cut.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: The record is not an item.
    """
    prompt = record["prompt"]
    text = prompt if isinstance(prompt, str) else shown_prompt(json.dumps(prompt))
    completions = [
        {
            "text": str(each["text"])[:SHOWN_CHARACTERS],
            "num_tokens": each.get("num_tokens"),
            "finish_reason": each.get("finish_reason"),
            "rewards": dict(each.get("rewards") or {}),
            "solved": each.get("solved"),
            "episode": parts_of(each.get("turns"), each.get("messages")),
        }
        for each in record["completions"]
    ]
    columns = {name: str(value)[:SHOWN_CHARACTERS] for name, value in dict(record.get("columns") or {}).items()}
    return {"prompt": text[:SHOWN_CHARACTERS], "columns": columns, "completions": completions}


SHOWN = {
    "all": lambda item: True,  # noqa: ARG005
    "solved": lambda item: bool(item["completions"]) and all(each["solved"] for each in item["completions"]),
    "unsolved": lambda item: not all(each["solved"] for each in item["completions"]),
}
