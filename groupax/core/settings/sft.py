"""Settings of supervised fine-tuning: examples, their packing, and the loss. Imports no jax."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from groupax.core.settings.fields import like, ranged, setting
from groupax.core.settings.objective import LossSettings
from groupax.core.settings.rollouts import PromptSettings, check_template_kwargs
from groupax.core.settings.run import PromptOrder

SFTLossType = Literal["nll", "dft"]
PackingStrategy = Literal["bfd", "bfd_split", "wrapped"]


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """Examples of supervised fine-tuning as tokens, and those of them that are learned."""

    max_length: int | None = ranged(1024, 10**9, low=2, resume="fixed")
    """Longest example in tokens, at most the model's context, which None takes; of longer ones the end is cut off."""
    dataset_text_field: str = setting("text", resume="fixed")
    """Column of examples that are texts."""
    completion_only_loss: bool | None = setting(None, resume="fixed")
    """Learn completions only, not their prompts; None does so where there are prompts."""
    assistant_only_loss: bool = setting(False, resume="fixed")
    """Learn the assistant's messages of conversations only: the tokens that the chat template marks as generated, or
    else what the assistant adds to the conversation before it."""
    packing: bool = setting(False, resume="fixed")
    """Count sequences of max_length tokens in batch_size, each with as many examples as fit, instead of examples. The
    devices compute no padding in either case."""
    packing_strategy: PackingStrategy = setting("bfd", resume="fixed")
    """Packing of examples: "bfd" (best fit decreasing) cuts those longer than max_length off, "bfd_split" splits them
    into several, and "wrapped" cuts the whole dataset into pieces of max_length tokens, which see each other's."""
    chat_template: str | None = like(PromptSettings, "chat_template")
    """Chat template for a tokenizer without one: a built-in name (chatml, plain) or a file."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"resume": "fixed"})
    """Arguments of the chat template as JSON. A column of this name in the dataset holds arguments of single rows,
    which take precedence."""

    def check(self) -> None:
        """Raises a ValueError for arguments that no chat template can take, and for packing without a length."""
        check_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
        if self.packing and self.max_length is None:
            raise ValueError("packing fills sequences of max_length tokens, and it is None; set it, e.g. to 1024")


@dataclass(frozen=True, kw_only=True)
class SFTSettings(ExampleSettings):
    """Batches, order and loss of supervised fine-tuning."""

    batch_size: int = ranged(32, 10**7, low=1)
    """Examples of an optimizer step, on all devices together; with packing, sequences of max_length tokens."""
    example_order: PromptOrder = setting("shuffled", resume="fixed")
    """Order of the examples in an epoch: a new permutation each epoch, one that PyTorch's generator draws, in one
    sequence for the seed ("shuffled_by_torch") or for seed + epoch ("seeded_by_epoch"), or that of the dataset."""
    drop_last: bool = setting(False, resume="fixed")
    """Drop the last incomplete batch of each epoch; otherwise that step has fewer examples."""
    loss_type: SFTLossType | str | Callable[..., Any] = "nll"
    """Loss of a token: "nll" is -log p, "dft" weights that by p (arXiv:2508.05629), or your own as for GRPO. See
    docs/sft.md."""
    router_aux_loss_coef: float | None = like(LossSettings, "router_aux_loss_coef")
    """Weight of the load-balancing loss of a mixture of experts; None takes that of the model's config.json."""
