"""Settings of prompts: their length and their chat template. Imports no jax."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from groupax.settings.fields import ranged, setting
from groupax.settings.template_kwargs import check_template_kwargs

PromptOverflow = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Length limits of prompts and completions, and the chat template."""

    max_prompt_length: int | None = ranged(None, 10**9, low=1, resume="fixed")
    """Longest prompt in tokens; None takes the model's context minus max_completion_length."""
    prompt_overflow: PromptOverflow = setting("error", resume="fixed")
    """Handling of longer prompts: stop with an error, drop them, or keep their ends."""
    max_completion_length: int = ranged(256, 10**9, low=1)
    """Longest completion in tokens."""
    chat_template: str | None = setting(None, resume="fixed")
    """Chat template for a tokenizer without one: a built-in name (chatml, plain) or a file."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"resume": "fixed"})
    """Arguments of the chat template as JSON, e.g. {"enable_thinking": false} for Qwen3. A column of this name in the
    dataset holds arguments of single rows, which take precedence."""

    def check(self) -> None:
        """Raises a ValueError for arguments that no chat template can take."""
        check_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
