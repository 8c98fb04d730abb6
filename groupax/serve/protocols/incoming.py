"""Parts of all protocols that are translated to chats. Imports no jax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupax.serve.chat_fields import is_text, short
from groupax.serve.errors import ApiError
from groupax.serve.exchange import Completion
from groupax.serve.requests import SETTINGS, Request
from groupax.serve.turns import Call, Turn

# Fields of chats that other protocols take too, with their meaning there; these have their own for constraints.
EXTENSIONS = SETTINGS - {"n", "regex", "json_schema"} | {
    *("row_keys", "weights_state", "chat_template_kwargs", "return_token_ids"),
}


@dataclass(frozen=True)
class Incoming:
    """A request, whatever its protocol.

    Attributes:
        request: What is asked.
        wire: Further fields that the client has sent and the response repeats.
        hints: Arguments for the chat template that only count if the template reads them.
    """

    request: Request
    wire: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)


def text_of(content: Any, kinds: tuple[str, ...], where: str, between: str = "") -> str:
    """Returns the text of a content: a text or a list of parts with texts.

    Args:
        content: The content.
        kinds: Types of parts that are texts.
        where: Its name in an error.
        between: Text between two parts.

    Raises:
        ApiError: It is something else.
    """
    if is_text(content):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of parts, got {short(content)}", where.partition(".")[0])
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in kinds or not is_text(part.get("text")):
            message = f"{where} may have parts of type {' or '.join(kinds)} with a text, got {short(part)}"
            raise ApiError(400, message, where.partition(".")[0])
        texts.append(part["text"])
    return between.join(texts)


def parts_of(turn: Turn) -> Iterator[tuple[str, str | Call]]:
    """Yields what a turn has, in order: ("reasoning", text), ("content", text), then ("call", call) for each."""
    if turn.reasoning:
        yield "reasoning", turn.reasoning
    if turn.content:
        yield "content", turn.content
    for call in turn.calls:
        yield "call", call


def token_details(request: Request, prompt: list[int], completion: Completion) -> dict[str, Any]:
    """Returns the token ids and log-probs of a completion, if the request wants them."""
    if not request.return_token_ids:
        return {}
    return {
        "prompt_token_ids": prompt,
        "token_ids": completion.tokens,
        "policy_logps": completion.policy_logps,
        "sampler_logps": completion.sampler_logps,
    }
