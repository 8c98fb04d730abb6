"""Builds responses in OpenAI's format, in full or streamed."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from groupax.serve.loop import Delta
from groupax.serve.requests import Request


class TokenTexts:
    """The texts of single tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Returns a token's text with its leading space; special tokens have theirs too."""
        if token not in self._texts:
            text = self._tokenizer.decode([token])
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(piece, str) and piece.startswith("\u2581"):  # decoding strips the first word's space
                text = self._tokenizer.decode([token, token])[len(text) :]
            self._texts[token] = text
        return self._texts[token]


@dataclass
class Completion:
    """A completion as far as it was reported, accumulated from `loop.Delta`s."""

    tokens: list[int] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    sampler_logps: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    num_characters: int = 0  # of the texts of its tokens, as `text_offset` counts them

    def add(self, delta: Delta) -> None:
        """Adds new tokens, which replace earlier ones if the completion was restarted."""
        for name in ("tokens", "policy_logps", "sampler_logps", "alternatives", "versions"):
            getattr(self, name)[delta.start :] = getattr(delta, name)
        self.finish_reason, self.text = delta.finish_reason, delta.text


class ResponseBuilder:
    """Builds the JSON objects of the response to one request.

    Args:
        request: The request.
        model: The model's name for the client.
        response_id: Id of the response.
        prompts: Token ids of each prompt.
        prompt_texts: Texts of the prompts, if they are echoed.
        token_texts: Texts of the model's tokens, for log-probs.
    """

    def __init__(
        self,
        request: Request,
        model: str,
        response_id: str,
        prompts: list[list[int]],
        prompt_texts: list[str],
        token_texts: TokenTexts,
    ) -> None:
        self.request, self.prompts, self.prompt_texts, self.n = request, prompts, prompt_texts, request.n
        self.token_texts = token_texts
        kind = "chat.completion" if request.is_chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole response as one object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        response = {**self._head, "choices": choices, "usage": self.usage(completions)}
        if self.request.is_chat and self.request.return_token_ids:
            response["prompt_token_ids"] = self.prompts[0]
        return response

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the first chunks of a streamed response: the role, or the echoed prompt, of each completion."""
        indices = range(len(self.prompts) * self.n)
        if self.request.is_chat:
            delta = {"role": "assistant", "content": ""}
            empty = {"delta": delta, "logprobs": None, "finish_reason": None}
            return [self._chunk({"index": index, **empty}) for index in indices]
        if self.prompt_texts:
            return [self._chunk(self._text_choice(index, self.prompt_texts[index // self.n])) for index in indices]
        return []

    def chunk(self, delta: Delta, text: str, completion: Completion) -> dict[str, Any]:
        """Returns a chunk of a streamed response.

        Args:
            delta: The new tokens.
            text: New text that later tokens cannot change.
            completion: The completion before these tokens.
        """
        index = delta.index
        if self.request.is_chat:
            choice: dict[str, Any] = {"index": index, "delta": {"content": text}}
        else:
            choice = self._text_choice(index, text)
        choice["finish_reason"] = delta.finish_reason
        new = Completion(num_characters=completion.num_characters)
        new.add(delta)
        choice |= self._details(index, new, is_first=not completion.tokens)
        completion.num_characters = new.num_characters
        return self._chunk(choice)

    def usage_chunk(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the last chunk of a streamed response, with the numbers of tokens."""
        return {**self._chunk(None), "usage": self.usage(completions)}

    def usage(self, completions: list[Completion]) -> dict[str, int]:
        """Returns the numbers of tokens; each prompt counts once."""
        num_prompt = sum(map(len, self.prompts))
        num = sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [choice]}

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        if self.request.is_chat:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            choice: dict[str, Any] = {"index": index, "message": message}
        else:
            echoed = self.prompt_texts[index // self.n] if self.prompt_texts else ""
            choice = self._text_choice(index, echoed + completion.text)
        choice["finish_reason"] = completion.finish_reason
        return choice | self._details(index, completion, is_first=True)

    def _details(self, index: int, completion: Completion, is_first: bool) -> dict[str, Any]:
        runs = [[version, len(list(run))] for version, run in itertools.groupby(completion.versions)]
        details: dict[str, Any] = {"logprobs": None, "weight_versions": runs}
        if self.request.logprobs is not None:
            build = self._chat_logprobs if self.request.is_chat else self._logprobs
            details["logprobs"] = build(completion)
        if self.request.return_token_ids:
            details["token_ids"] = completion.tokens
            details["policy_logps"], details["sampler_logps"] = completion.policy_logps, completion.sampler_logps
            if is_first and not self.request.is_chat:
                details["prompt_token_ids"] = self.prompts[index // self.n]
        return details

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        offsets = []
        for token in completion.tokens:
            offsets.append(completion.num_characters)
            completion.num_characters += len(self.token_texts.text(token))
        return {
            "tokens": [self._name(token) for token in completion.tokens],
            "token_logprobs": completion.policy_logps,
            "top_logprobs": self._top_logprobs(completion) if self.request.logprobs else None,
            "text_offset": offsets,
        }

    def _top_logprobs(self, completion: Completion) -> list[dict[str, float]]:
        """Returns the likeliest alternatives of each token, and the token itself."""
        tops = []
        tokens, logps = completion.tokens, completion.policy_logps
        for token, logp, pairs in zip(tokens, logps, completion.alternatives, strict=True):
            is_included = any(token == other for other, _ in pairs)
            top: dict[str, float] = {}
            for other, value in pairs if is_included else [*pairs, (token, logp)]:
                top.setdefault(self._name(other), value)  # several tokens may have one text
            tops.append(top)
        return tops

    def _chat_logprobs(self, completion: Completion) -> dict[str, Any]:
        content = []
        alternatives = completion.alternatives if self.request.logprobs else [[] for _ in completion.tokens]
        for token, logp, others in zip(completion.tokens, completion.policy_logps, alternatives, strict=True):
            entry = self._entry(token, logp)
            content.append({**entry, "top_logprobs": [self._entry(other, value) for other, value in others]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logp: float) -> dict[str, Any]:
        text = self.token_texts.text(token)
        return {"token": self._name(token), "logprob": logp, "bytes": None if "\ufffd" in text else [*text.encode()]}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.request.return_tokens_as_token_ids else self.token_texts.text(token)
