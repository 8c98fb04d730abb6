"""Common parts of the training programs: their flags, and the run of a recipe with them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from groupax.cli.main import Train, start
from groupax.compat.fields import attention_setting
from groupax.config import GRPOConfig
from groupax.recipes import load_recipe

AttentionMechanism = Literal[
    "auto", "vanilla", "flash_attn2", "cuda_flash_attn2", "ring", "splash", "cudnn", "blockwise", "sdpa"
]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Train a model with GRPO. What is not given comes from the recipe."""

    repo_id: str
    """A folder or a Hugging Face hub id."""
    dataset: str | None = None
    """Training rows: a file, a folder or a hub id; by default the recipe's."""
    output_dir: str | None = None
    """The run's folder."""
    attn_mechanism: AttentionMechanism = "auto"
    """Attention in updates: plain for vanilla and blockwise; for all others the device's kernel where there is one."""
    max_prompt_length: int | None = None
    """Longest prompt in tokens."""
    max_completion_length: int | None = None
    """Longest completion in tokens."""
    beta: float | None = None
    """Weight of the KL to the starting model."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this probability."""
    top_k: int | None = None
    """Draw from the likeliest tokens only."""
    num_return_sequences: int | None = None
    """Completions per prompt."""
    total_batch_size: int | None = None
    """Prompts per optimizer step."""
    learning_rate: float | None = None
    """Peak learning rate."""
    num_train_epochs: float | None = None
    """Passes over the dataset."""
    max_steps: int | None = None
    """Optimizer steps, in place of num_train_epochs."""
    use_wandb: bool = False
    """Report to Weights & Biases; WANDB_MODE=offline writes files only."""


# Flags whose setting has another name.
RENAMED = {"num_return_sequences": "num_generations", "total_batch_size": "prompts_per_step"}
NOT_SETTINGS = ("repo_id", "dataset", "attn_mechanism", "use_wandb")


def run(recipe: str, flags: Flags, weights: dict[str, float] | None = None, not_settings: tuple[str, ...] = ()) -> None:
    """Trains on a recipe, with the flags in place of its settings.

    Args:
        recipe: Name of the recipe.
        flags: Flags of the program.
        weights: Weights of rewards that differ from those of the recipe, by name.
        not_settings: Flags of this program that are no settings.
    """
    known = load_recipe(recipe)
    given = {name: value for name, value in vars(flags).items() if value is not None}
    settings: dict[str, Any] = {
        RENAMED.get(name, name): value for name, value in given.items() if name not in (*NOT_SETTINGS, *not_settings)
    }
    settings["attn_implementation"] = attention_setting(flags.attn_mechanism)
    report_to = {"report_to": ("wandb",)} if flags.use_wandb else {}
    args = GRPOConfig.from_mapping({**known.config, **settings, **report_to})
    if weights:
        names = [reference.partition("(")[0].rpartition(":")[2] for reference in known.reward_funcs]
        own = dict(zip(names, known.config["reward_weights"], strict=True))
        args = replace(args, reward_weights=tuple((own | weights).values()))
    start(Train(recipe=recipe, model=flags.repo_id, dataset=flags.dataset, args=args))
