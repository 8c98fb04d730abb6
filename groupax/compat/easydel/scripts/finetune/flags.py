"""The flags that all training programs share, and the run of a recipe with them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from groupax.cli.train import Train, start
from groupax.compat.fields import native_attention
from groupax.config import GRPOConfig
from groupax.recipes import load_recipe

AttentionMechanism = Literal[
    "auto", "vanilla", "flash_attn2", "cuda_flash_attn2", "ring", "splash", "cudnn", "blockwise", "sdpa"
]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Train a model with GRPO. Flags that are not given keep the recipe's values."""

    repo_id: str
    """Model to train: a folder or a Hugging Face hub id."""
    dataset: str | None = None
    """Training examples: a file, a folder or a hub id; by default the recipe's dataset."""
    output_dir: str | None = None
    """Folder of the run."""
    attn_mechanism: AttentionMechanism = "auto"
    """Attention in training: vanilla and blockwise use plain XLA attention, all others the device's fused kernel if it
    has one."""
    max_prompt_length: int | None = None
    """Maximum prompt length in tokens."""
    max_completion_length: int | None = None
    """Maximum completion length in tokens."""
    beta: float | None = None
    """Coefficient of the KL divergence from the reference model."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Probability mass of nucleus sampling: the likeliest tokens that hold it are kept."""
    top_k: int | None = None
    """Number of likeliest tokens to sample from."""
    num_return_sequences: int | None = None
    """Number of completions per prompt."""
    total_batch_size: int | None = None
    """Number of prompts per optimizer step."""
    learning_rate: float | None = None
    """Peak learning rate."""
    num_train_epochs: float | None = None
    """Number of passes over the dataset."""
    max_steps: int | None = None
    """Number of optimizer steps; overrides num_train_epochs."""
    use_wandb: bool = False
    """Log to Weights & Biases; WANDB_MODE=offline only writes files."""


# Settings for flags of another name.
RENAMED = {"num_return_sequences": "num_generations", "total_batch_size": "prompts_per_step"}
NOT_SETTINGS = ("repo_id", "dataset", "attn_mechanism", "use_wandb")


def run(recipe: str, flags: Flags, weights: dict[str, float] | None = None, not_settings: tuple[str, ...] = ()) -> None:
    """Trains with a recipe, whose settings the flags override.

    Args:
        recipe: Name of the recipe.
        flags: Flags of the program.
        weights: Weights that override those of the recipe's reward functions, by function name.
        not_settings: Further flags of the program that are not settings.
    """
    known = load_recipe(recipe)
    given = {name: value for name, value in vars(flags).items() if value is not None}
    settings: dict[str, Any] = {
        RENAMED.get(name, name): value for name, value in given.items() if name not in (*NOT_SETTINGS, *not_settings)
    }
    settings["attn_implementation"] = native_attention(flags.attn_mechanism)
    report_to = {"report_to": ("wandb",)} if flags.use_wandb else {}
    args = GRPOConfig.from_mapping({**known.config, **settings, **report_to})
    if weights:
        names = [reference.partition("(")[0].rpartition(":")[2] for reference in known.reward_funcs]
        own = dict(zip(names, known.config["reward_weights"], strict=True))
        args = replace(args, reward_weights=tuple((own | weights).values()))
    start(Train(recipe=recipe, model=flags.repo_id, dataset=flags.dataset, args=args))
