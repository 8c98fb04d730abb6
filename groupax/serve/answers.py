"""Answers in OpenAI's form, whole or in pieces."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from groupax.serve.loop import Growth
from groupax.serve.requests import Request


class Vocabulary:
    """The texts of single tokens.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Of one token, with the space before it; special ones as they are written."""
        if token not in self._texts:
            text = self._tokenizer.decode([token])
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(piece, str) and piece.startswith("\u2581"):  # a first word's space may have been left out
                text = self._tokenizer.decode([token, token])[len(text) :]
            self._texts[token] = text
        return self._texts[token]


@dataclass
class Completion:
    """One completion as it was told so far, as `loop.Growth` adds to it."""

    tokens: list[int] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    sampler_logps: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    num_characters: int = 0  # of the texts of its tokens, as `text_offset` counts them

    def add(self, growth: Growth) -> None:
        """What is new; what was there before is replaced if it had to begin again."""
        for name in ("tokens", "policy_logps", "sampler_logps", "alternatives", "versions"):
            getattr(self, name)[growth.first :] = getattr(growth, name)
        self.finish_reason, self.text = growth.finish_reason, growth.text


class Answers:
    """The JSON objects of one request's answer.

    Args:
        request: what was asked.
        model: the name to answer with.
        id: of the answer.
        prompts: token ids of each prompt.
        prompt_texts: the texts of the prompts, if they are to be echoed.
        n: completions per prompt.
        vocabulary: for log-probs.
    """

    def __init__(
        self,
        request: Request,
        model: str,
        id: str,  # noqa: A002 (OpenAI's name)
        prompts: list[list[int]],
        prompt_texts: list[str],
        n: int,
        vocabulary: Vocabulary,
    ) -> None:
        self.request, self.prompts, self.prompt_texts, self.n = request, prompts, prompt_texts, n
        self.vocabulary = vocabulary
        kind = "chat.completion" if request.is_chat else "text_completion"
        self._head = {"id": id, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The answer in one object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        answer = {**self._head, "choices": choices, "usage": self.usage(completions)}
        if self.request.is_chat and self.request.return_token_ids:
            answer["prompt_token_ids"] = self.prompts[0]
        return answer

    def first_pieces(self) -> list[dict[str, Any]]:
        """What a streamed answer begins with: the role, or the echoed prompt, of each completion."""
        indices = range(len(self.prompts) * self.n)
        if self.request.is_chat:
            nothing = {"logprobs": None, "finish_reason": None}
            delta = {"role": "assistant", "content": ""}
            return [self._piece({"index": index, "delta": delta, **nothing}) for index in indices]
        if self.request.echo:
            return [self._piece(self._text_choice(index, self.prompt_texts[index // self.n])) for index in indices]
        return []

    def piece(self, growth: Growth, text: str, completion: Completion) -> dict[str, Any]:
        """A part of a streamed answer.

        Args:
            growth: what is new.
            text: that of it which is certain.
            completion: what was told before.
        """
        index = growth.index
        if self.request.is_chat:
            choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "finish_reason": None}
        else:
            choice = self._text_choice(index, text)
        choice["finish_reason"] = growth.finish_reason
        new = Completion()
        new.add(Growth(**{**vars(growth), "first": 0}))
        new.num_characters = completion.num_characters
        choice |= self._details(index, new, is_first=not completion.tokens)
        completion.num_characters = new.num_characters
        return self._piece(choice)

    def last_piece(self, completions: list[Completion]) -> dict[str, Any]:
        """The numbers of tokens, at the end of a streamed answer."""
        return {**self._piece(None), "usage": self.usage(completions)}

    def usage(self, completions: list[Completion]) -> dict[str, int]:
        """The numbers of tokens; each prompt counts once."""
        num_prompt = sum(map(len, self.prompts))
        num = sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}

    def _piece(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [choice]}

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        if self.request.is_chat:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            choice: dict[str, Any] = {"index": index, "message": message}
        else:
            echoed = self.prompt_texts[index // self.n] if self.request.echo else ""
            choice = self._text_choice(index, echoed + completion.text)
        choice["finish_reason"] = completion.finish_reason
        return choice | self._details(index, completion, is_first=True)

    def _details(self, index: int, completion: Completion, is_first: bool) -> dict[str, Any]:
        """Log-probs, token ids if wanted, and how many tokens which weights made."""
        runs = [[version, len(list(run))] for version, run in itertools.groupby(completion.versions)]
        details: dict[str, Any] = {"logprobs": None, "weight_versions": runs}
        if self.request.logprobs is not None:
            make = self._chat_logprobs if self.request.is_chat else self._logprobs
            details["logprobs"] = make(completion)
        if self.request.return_token_ids:
            details["token_ids"] = completion.tokens
            details["policy_logps"], details["sampler_logps"] = completion.policy_logps, completion.sampler_logps
            if is_first and not self.request.is_chat:
                details["prompt_token_ids"] = self.prompts[index // self.n]
        return details

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        tokens = [self._name(token) for token in completion.tokens]
        offsets = []
        for token in completion.tokens:
            offsets.append(completion.num_characters)
            completion.num_characters += len(self.vocabulary.text(token))
        return {
            "tokens": tokens,
            "token_logprobs": completion.policy_logps,
            "top_logprobs": self._top_logprobs(completion) if self.request.logprobs else None,
            "text_offset": offsets,
        }

    def _top_logprobs(self, completion: Completion) -> list[dict[str, float]]:
        """For each token the likeliest ones, and itself if it is none of these."""
        tops = []
        tokens, logps = completion.tokens, completion.policy_logps
        for token, logp, pairs in zip(tokens, logps, completion.alternatives, strict=True):
            is_one_of_them = any(token == other for other, _ in pairs)
            top: dict[str, float] = {}
            for other, value in pairs if is_one_of_them else [*pairs, (token, logp)]:
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
        text = self.vocabulary.text(token)
        return {"token": self._name(token), "logprob": logp, "bytes": None if "\ufffd" in text else [*text.encode()]}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.request.ids_for_tokens else self.vocabulary.text(token)
