"""Log-probs of tokens as entries of OpenAI's chats and responses. Imports no jax."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from groupax.serve.exchange import Completion, Exchange


def token_name(exchange: Exchange, token: int) -> str:
    """Returns a token's text, or its id as "token_id:7" if the request wants that."""
    return f"token_id:{token}" if exchange.request.return_tokens_as_token_ids else exchange.token_texts.text(token)


def logprob_entries(exchange: Exchange, completion: Completion) -> list[dict[str, Any]]:
    """Returns the log-prob of each token of a completion, with its alternatives.

    Args:
        exchange: The request.
        completion: The tokens with their log-probs.
    """
    entries = []
    alternatives = completion.alternatives if exchange.request.logprobs else [[] for _ in completion.tokens]
    for token, logp, others in zip(completion.tokens, completion.policy_logps, alternatives, strict=True):
        top = [_entry(exchange, other, value) for other, value in others]
        entries.append({**_entry(exchange, token, logp), "top_logprobs": top})
    return entries


def tokens_of_text(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], text: str, before: str = "") -> range:
    """Returns the positions of the tokens that a part of a turn is made of; none if the turn does not have the part.

    Args:
        decode: Returns the text of tokens.
        tokens: All tokens of the turn.
        text: The part.
        before: Another part, which comes earlier in the turn.
    """
    whole = decode(tokens)
    at = whole.find(before)
    first = whole.find(text, at + len(before) if at >= 0 else 0) if text else -1
    if first < 0:
        return range(0)
    num = range(len(tokens) + 1)
    begin = bisect_right(num, first, key=lambda n: len(decode(tokens[:n]))) - 1
    end = bisect_left(num, first + len(text), key=lambda n: len(decode(tokens[:n])))
    return range(max(begin, 0), end)


def _entry(exchange: Exchange, token: int, logp: float) -> dict[str, Any]:
    text = exchange.token_texts.text(token)
    data = None if "\ufffd" in text else [*text.encode()]
    return {"token": token_name(exchange, token), "logprob": logp, "bytes": data}
