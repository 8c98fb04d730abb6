"""OpenAI's completions and chats: responses in full or streamed. Imports no jax."""

import itertools
import time
import uuid
from typing import Any

from groupax.serve.exchange import Completion, Delta, Exchange
from groupax.serve.turns import Call, Turn


class ResponseBuilder:
    """Builds the JSON objects of the response to one request."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.request, self.n = exchange, exchange.request, exchange.request.n
        self.prompts = exchange.prompts
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        response_id = f"{'chatcmpl' if self.request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": response_id, "object": kind, "created": int(time.time()), "model": exchange.model}
        self._num_calls: dict[int, int] = {}  # streamed so far, by completion

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole response as one object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        response = {**self._head, "choices": choices, "usage": self.usage(completions)}
        if self.request.is_chat and self.request.return_token_ids:
            response["prompt_token_ids"] = self.prompts[0]
        return response

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the first chunks of a streamed response: the role of each completion of a chat."""
        if not self.request.is_chat:
            return []
        empty = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": index, **empty}) for index in range(self.n)]

    def events(self, delta: Delta, piece: Turn, completion: Completion) -> list[dict[str, Any]]:
        """Returns the chunk of new tokens (see `exchange.Writer`)."""
        index = delta.index
        if self.request.is_chat:
            choice: dict[str, Any] = {"index": index, "delta": self._delta(index, piece)}
        else:
            choice = self._text_choice(index, piece.content)
        choice["finish_reason"] = piece.finish_reason
        new = Completion()
        new.add(delta)
        choice |= self._details(index, new, is_first=not completion.tokens)
        return [self._chunk(choice)]

    def last_events(self, completions: list[Completion]) -> list[dict[str, Any]]:
        """Returns the last chunk of a streamed response, with the numbers of tokens, if it is requested."""
        if not self.request.stream_options.get("include_usage"):
            return []
        return [{**self._chunk(None), "usage": self.usage(completions)}]

    def usage(self, completions: list[Completion]) -> dict[str, int]:
        """Returns the numbers of tokens; each prompt counts once."""
        num_prompt, num = self._exchange.usage(completions)
        return {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [choice]}

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        turn = self._exchange.turn(index, completion)
        if self.request.is_chat:
            choice: dict[str, Any] = {"index": index, "message": self._message(turn)}
        else:
            choice = self._text_choice(index, turn.content)
        choice["finish_reason"] = turn.finish_reason
        return choice | self._details(index, completion, is_first=True)

    def _message(self, turn: Turn) -> dict[str, Any]:
        content = turn.content or (None if turn.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        return message

    def _delta(self, index: int, piece: Turn) -> dict[str, Any]:
        """Returns what is new of a streamed message."""
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            first = self._num_calls.get(index, 0)
            delta["tool_calls"] = [{"index": number, **_call(call)} for number, call in enumerate(piece.calls, first)]
            self._num_calls[index] = first + len(piece.calls)
        return {**delta, "content": piece.content} if piece.content or not delta else delta

    def _details(self, index: int, completion: Completion, is_first: bool) -> dict[str, Any]:
        runs = [[version, len(list(run))] for version, run in itertools.groupby(completion.versions)]
        details: dict[str, Any] = {"logprobs": None, "weight_versions": runs}
        if self.request.logprobs is not None:
            if self.request.is_chat:
                details["logprobs"] = {"content": self._exchange.logprob_entries(completion), "refusal": None}
            else:
                details["logprobs"] = self._logprobs(completion)
        if self.request.return_token_ids:
            details["token_ids"] = completion.tokens
            details["policy_logps"], details["sampler_logps"] = completion.policy_logps, completion.sampler_logps
            if is_first and not self.request.is_chat:
                details["prompt_token_ids"] = self.prompts[index // self.n]
        return details

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        return {
            "tokens": [self._exchange.token_texts.text(token) for token in completion.tokens],
            "token_logprobs": completion.policy_logps,
            "top_logprobs": self._top_logprobs(completion) if self.request.logprobs else None,
        }

    def _top_logprobs(self, completion: Completion) -> list[dict[str, float]]:
        """Returns the likeliest alternatives of each token, and the token itself."""
        tops = []
        tokens, logps = completion.tokens, completion.policy_logps
        for token, logp, pairs in zip(tokens, logps, completion.alternatives, strict=True):
            is_included = any(token == other for other, _ in pairs)
            top: dict[str, float] = {}
            for other, value in pairs if is_included else [*pairs, (token, logp)]:
                # several tokens may have one text; the token itself has the same log-prob in both places
                top.setdefault(self._exchange.token_texts.text(other), logp if other == token else value)
            tops.append(top)
        return tops


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
