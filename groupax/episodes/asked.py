"""A program's request for turns, in the form that all protocols are converted to. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request for turns, which can be written as JSON.

    Attributes:
        prompt: Messages, a text, or token ids.
        tools: Schemas of functions in OpenAI's format.
        template_kwargs: Arguments for the chat template.
        n: Number of turns to sample.
        max_tokens: Most tokens of a turn; None for the limit of the run.
        stop: Texts that end a turn, in addition to those of the run.
        tool_choice: "auto", "required", or the name of the function to call as {"name": ...}.
        parallel: Whether a turn may have several calls.
        regex, json_schema: Constraint of the turn; None for none.
        adapter: Name of the adapter that answers, in a run that trains several; None for the policy, or the base.
    """

    prompt: Any
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    tool_choice: Any = "auto"
    parallel: bool = True
    regex: str | None = None
    json_schema: str | None = None
    adapter: str | None = None

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a list of messages."""
        return not isinstance(self.prompt, str) and bool(self.prompt) and not isinstance(self.prompt[0], int)
