"""Model cards: the `README.md` of a model's folder, which the hub shows. Imports no jax.

Names of models, datasets and functions are untrusted. Cards contain them as inline code of one line and as JSON
strings, so that they are neither markup nor metadata.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupax.core.config import RunConfig
from groupax.core.storage.folders import split_revision
from groupax.core.terminal.printable import one_line
from groupax.core.types import Metrics, Prompt
from groupax.parallel.kernels import versions_of

CARD_NAME = "README.md"
_PACKAGES = ("groupax", "jax", "transformers")
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_FRONT = re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,59}")
_MAX_CARD_BYTES, _MAX_CHARS = 1 << 20, 200
ESTIMATES = ("pass@1", "reward")  # of held-out prompts


@dataclass(frozen=True)
class Method:
    """A method of training as a card describes it."""

    title: str  # of the card
    name: str  # in Markdown
    tag: str  # of the model on the hub
    data: str  # label of the training data
    settings: Sequence[str]  # that the card lists
    metrics: Sequence[str]  # that the card lists
    measured_on: str  # what the metrics are of


_LEARNING = ("optimizer", "learning_rate", "lr_scheduler_type", "base_weights", "seed")
GRPO = Method(
    "GRPO run",
    "Group Relative Policy Optimization ([GRPO](https://arxiv.org/abs/2402.03300))",
    "grpo",
    "prompts",
    ("loss_type", "beta", "prompts_per_step", "num_generations", "max_completion_length", "temperature", *_LEARNING),
    ("reward", "pass@1", "completions/mean_length", "entropy", "kl"),
    "training samples of the last step",
)
SFT = Method(
    "SFT run",
    "supervised fine-tuning",
    "sft",
    "examples",
    ("loss_type", "batch_size", "max_length", "packing", *_LEARNING),
    ("loss", "entropy"),
    "last step",
)

FULL_USAGE = """\
```python
from transformers import pipeline

generator = pipeline("text-generation", model=".")  # this folder, or its id on the hub
prompt = {prompt}
print(generator(prompt, max_new_tokens=64)[0]["generated_text"])
```
"""
ADAPTER_USAGE = """\
```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

folder = "."  # this folder, or its id on the hub
model = AutoPeftModelForCausalLM.from_pretrained(folder)  # with its base
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = {prompt}
input_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
print(tokenizer.decode(model.generate(input_ids=input_ids, max_new_tokens=64)[0], skip_special_tokens=True))
```
"""


@dataclass(frozen=True, eq=False)
class Trained:
    """A model that a run has trained, as its card describes it."""

    args: RunConfig  # the run's settings
    base: str | None  # the starting model; None for one that was created in memory
    adapter: Mapping[str, Any] | None  # settings of the trained adapter; None if all weights were trained
    dataset: str  # source of the prompts: a file, a hub id, or a description
    rewards: Sequence[str]  # names of the reward functions, if there are any
    num_steps: int  # optimizer steps so far
    metrics: Metrics  # of the last logged step
    is_chat: bool = False  # prompts are formatted with the tokenizer's chat template
    license_id: str | None = None  # of the starting model
    of_episodes: Mapping[str, str] = field(default_factory=dict)  # names of tools and environments by label
    # estimates on held-out prompts, by the step after which they were measured, the set and the metric
    held_out: Mapping[int, Mapping[str, Mapping[str, Any]]] | None = None
    outcome: Sequence[str] = ()  # sentences on the evaluations of held-out prompts
    recipe: str | None = None  # name of the recipe, if there is one
    prompt: Prompt | None = None  # one of the training that may be published, since prompts may be private


def run_card(model: Trained, method: Method = GRPO) -> str:
    """Returns the card of a model that a run has trained by a method."""
    settings, base, adapter, metrics = model.args.to_dict(), model.base, model.adapter, model.metrics
    kind = "A fine-tune of" if adapter is None else "A LoRA adapter for"
    rows = [(method.data, shown_name(model.dataset))]
    rows += [("recipe", model.recipe)] if model.recipe else []
    rows += [("rewards", weighted(model.rewards, settings.get("reward_weights")))] if model.rewards else []
    rows += [*model.of_episodes.items(), ("optimizer steps", str(model.num_steps))]
    rows += [(name, str(settings[name])) for name in method.settings]
    rows += [(f"adapter: {name}", str(value)) for name, value in (adapter or {}).items()]
    rows += [(f"{name} ({method.measured_on})", f"{metrics[name]:.4g}") for name in method.metrics if name in metrics]
    rows += [(f"version of {name}", number) for name, number in versions_of(_PACKAGES).items()]
    parts = [
        f"{kind} {code(shown_name(base))}, trained with {method.name} by [groupax](https://pypi.org/project/groupax).",
        *model.outcome,
        f"## Use\n\n{_usage(adapter is not None, model.is_chat, model.prompt)}",
        f"## Training\n\n{_table(('', ''), rows)}",
        _held_out(model.held_out) if model.held_out else "",
    ]
    text = "\n\n".join(filter(None, parts))
    return card(method.title, text, base, adapter is not None, model.license_id, method.tag)


def derived_card(how: str, base: str | None, of_source: str | None, is_chat: bool = False) -> str:
    """Returns the card of a model that was derived from a base, with a sentence of Markdown on how, and its card."""
    body = "" if of_source is None else f"\n\n## Its source\n\n{_FRONT.sub('', of_source).strip()}"
    text = f"{how}\n\n## Use\n\n{_usage(False, is_chat)}{body}"
    return card("Model", text, base, license_id=license_of(of_source))


def card(
    title: str,
    text: str,
    base: str | None,
    is_adapter: bool = False,
    license_id: str | None = None,
    tag: str = "grpo",
) -> str:
    """Returns a card with the metadata that the hub reads."""
    from huggingface_hub import ModelCardData

    is_on_hub = base and shown_name(base) == base and _HUB_ID.fullmatch(split_revision(base)[0])
    front = ModelCardData(
        tags=["groupax", tag],
        library_name="peft" if is_adapter else "transformers",
        base_model=split_revision(base)[0] if base and is_on_hub else None,
        license=license_id,
        pipeline_tag="text-generation",
    )
    return f"---\n{front.to_yaml()}\n---\n\n# {title}\n\n{text}\n"


def shown_name(model: str | None) -> str:
    """Returns a hub id unchanged, and only the name of a folder, because its path is private.

    The folder `model` of a run has the run's name before it.
    """
    if model is None:
        return "a model created in memory"
    if not Path(model).is_absolute() and not os.path.exists(model):  # noqa: PTH110 - of any text
        return model
    return "/".join(Path(model).absolute().parts[-2:]) if Path(model).name == "model" else Path(model).name


def read_card(folder: Path | None) -> str | None:
    """Returns the `README.md` of a folder; None if there is none."""
    path = None if folder is None else folder / CARD_NAME
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(_MAX_CARD_BYTES).decode("utf-8", errors="replace")


def license_of(text: str | None) -> str | None:
    """Returns the license in a card's metadata, if it is one of the hub's identifiers."""
    if not (text or "").startswith("---"):
        return None
    from huggingface_hub import ModelCard

    try:
        named = ModelCard(text or "", ignore_metadata_errors=True).data.get("license")
    except Exception:  # noqa: BLE001 - an untrusted card
        return None
    return named if isinstance(named, str) and _LICENSE.fullmatch(named) else None


def code(text: str) -> str:
    """Returns a text as inline code of one line without markup, also for table cells."""
    return f"`{one_line(text, _MAX_CHARS).replace('`', chr(39)).replace('|', '/').strip() or ' '}`"


def _usage(is_adapter: bool, is_chat: bool, prompt: Prompt | None = None) -> str:
    """Returns a program that runs the model on a prompt, by default on a placeholder for one."""
    text = prompt if isinstance(prompt, str) else "..."
    shown: Prompt = [{"role": "user", "content": text}] if is_chat else text
    if isinstance(prompt, list) and all(isinstance(each.get("content"), str) for each in prompt):  # else with images
        shown = prompt
    given = json.dumps(shown).replace("`", "\\u0060")  # which would end the block of code
    if is_chat and is_adapter:
        given = f"tokenizer.apply_chat_template({given}, tokenize=False, add_generation_prompt=True)"
    return (ADAPTER_USAGE if is_adapter else FULL_USAGE).format(prompt=given)


def _held_out(estimates: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns a section with a table of the first and the last estimates."""
    steps = sorted({min(estimates), max(estimates)})
    rows = [
        (f"{name}: {key} ({last[key].num_items} prompts)", *(str(estimates[step][name].get(key, "")) for step in steps))
        for name, last in estimates[steps[-1]].items()
        for key in ESTIMATES
        if key in last
    ]
    head = ("means with 95 % intervals", *(f"after step {step}" for step in steps))
    return f"## Held-out prompts\n\n{_table(head, rows)}"


def weighted(rewards: Sequence[str], weights: Sequence[float] | None) -> str:
    """Returns the names of reward functions, with the weights that are not 1."""
    if weights is None or len(weights) != len(rewards):
        return ", ".join(rewards)
    pairs = zip(rewards, weights, strict=True)
    return ", ".join(name if weight == 1 else f"{name} x {weight:g}" for name, weight in pairs)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(code, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines])
