"""A request with what its response is made of, whatever the protocol. Imports no jax."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from groupax.core.types import FinishReason
from groupax.data.tokenizer import REPLACEMENT, context_tokens, decode
from groupax.engine.sequence import text_before_stop
from groupax.serve.requests import Request
from groupax.serve.turns import Call, Turn, TurnReader, TurnStream
from groupax.serve.web import ApiError


@dataclass(frozen=True, eq=False)
class Delta:
    """New tokens of a completion since the previous report.

    Attributes:
        index: Index of the completion in its request; completions of one prompt are adjacent.
        start: Position of the first new token; 0 if the completion was restarted and new weights changed it.
        tokens, policy_logps, sampler_logps, alternatives, versions: The new ones (see `engine.sequence.Sequence`).
        finish_reason: None while it runs; "abort" if the engine failed, or gave up the completion.
        text: The whole text of a finished completion; of one that was given up, the reason.
    """

    index: int
    start: int
    tokens: list[int]
    policy_logps: list[float]
    sampler_logps: list[float]
    alternatives: list[list[tuple[int, float]]]
    versions: list[int]
    finish_reason: FinishReason | None
    text: str


LISTS = ("tokens", "policy_logps", "sampler_logps", "alternatives", "versions")  # with a value per token


@dataclass
class Completion:
    """A completion, accumulated from its deltas."""

    tokens: list[int] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    sampler_logps: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""

    def add(self, delta: Delta) -> None:
        """Adds new tokens, which replace earlier ones if the completion was restarted."""
        for name in LISTS:
            getattr(self, name)[delta.start :] = getattr(delta, name)
        self.finish_reason, self.text = delta.finish_reason, delta.text


async def arriving_deltas(deltas: "asyncio.Queue[Delta]", num: int) -> AsyncIterator[Delta]:
    """Yields the deltas of a job until all its completions are finished."""
    while num:
        delta = await deltas.get()
        if delta.finish_reason == "abort":
            if delta.text:
                raise ApiError(400, delta.text)
            raise ApiError(503, "the engine gave up this request; try again", code="aborted")
        num -= delta.finish_reason is not None
        yield delta


async def collect(arriving: AsyncIterator[Delta], num: int) -> list[Completion]:
    """Returns the completions when all deltas have arrived."""
    completions = [Completion() for _ in range(num)]
    async for delta in arriving:
        completions[delta.index].add(delta)
    return completions


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


@dataclass(frozen=True, eq=False)
class Exchange:
    """A request and what its response is made of.

    Attributes:
        request: The request.
        wire: Further fields that the client has sent and the response repeats.
        model: The model's name for the client.
        prompts: Token ids of each prompt.
        token_texts: Texts of the model's tokens, for log-probs.
        reader: Reads turns of a chat; None for completions of texts.
    """

    request: Request
    wire: Mapping[str, Any]
    model: str
    prompts: list[list[int]]
    token_texts: TokenTexts
    reader: TurnReader | None = None

    def turn(self, index: int, completion: Completion) -> Turn:
        """Returns the finished completion of this index as a turn."""
        assert completion.finish_reason is not None, "finished"
        if self.reader is None:
            return Turn(completion.text, finish_reason=completion.finish_reason)
        context = context_tokens(self.reader.format.tokenizer, self.prompts[index // self.request.n])
        text, stop_string = self.reader.text(context, completion.tokens)
        return self.reader.read(text, completion.finish_reason, self.seed(index), stop_string)

    def seed(self, index: int) -> list[int]:
        """Returns the numbers from which ids of calls in a completion are made: its prompt and its randomness."""
        request = self.request
        key = [request.seed, index] if request.row_keys is None else request.row_keys[index]
        return [*self.prompts[index // request.n], *key]

    def usage(self, completions: Sequence[Completion]) -> tuple[int, int]:
        """Returns the numbers of tokens of the prompts, each of which counts once, and of the completions."""
        return sum(map(len, self.prompts)), sum(len(completion.tokens) for completion in completions)

    def logprob_entries(self, completion: Completion) -> list[dict[str, Any]]:
        """Returns the log-prob of each token with its alternatives, as entries of OpenAI's chats."""
        alternatives = completion.alternatives if self.request.logprobs else [[] for _ in completion.tokens]
        return [
            {**self._entry(token, logp), "top_logprobs": [self._entry(*other) for other in others]}
            for token, logp, others in zip(completion.tokens, completion.policy_logps, alternatives, strict=True)
        ]

    def _entry(self, token: int, logp: float) -> dict[str, Any]:
        text = self.token_texts.text(token)
        data = None if "\ufffd" in text else [*text.encode()]
        return {"token": text, "logprob": logp, "bytes": data}

    def token_details(self, completion: Completion) -> dict[str, Any]:
        """Returns the token ids and log-probs of the answer to the first prompt, if the request wants them."""
        if not self.request.return_token_ids:
            return {}
        details = {name: getattr(completion, name) for name in ("policy_logps", "sampler_logps")}
        return {"prompt_token_ids": self.prompts[0], "token_ids": completion.tokens, **details}


@runtime_checkable
class Writer(Protocol):
    """Writes the response to a request in a protocol's format."""

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole response as one object."""
        ...

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the first events of a streamed response."""
        ...

    def events(self, delta: Delta, piece: Turn, completion: Completion) -> list[dict[str, Any]]:
        """Returns the events of new tokens: `piece` is what they add to the turn, `completion` what came before."""
        ...

    def last_events(self, completions: list[Completion]) -> list[dict[str, Any]]:
        """Returns the last events of a streamed response."""
        ...


def parts_of(turn: Turn) -> list[tuple[str, str | Call]]:
    """Returns what a turn has, in order: ("reasoning", text), ("content", text), then ("call", call) for each."""
    texts = [("reasoning", turn.reasoning), ("content", turn.content)]
    return [*((kind, text) for kind, text in texts if text), *(("call", call) for call in turn.calls)]


class PieceStream:
    """The completion of an index in an exchange that grows, as text that later tokens cannot change."""

    def __init__(self, exchange: Exchange, index: int, tokenizer: Any) -> None:
        request, self._reader = exchange.request, exchange.reader
        self._context = context_tokens(tokenizer, exchange.prompts[index // request.n])
        self._tokens: list[int] = []
        self._turn = None if self._reader is None else TurnStream(self._reader, exchange.seed(index))
        decode_text = (lambda ids: decode(tokenizer, [ids])[0]) if self._reader is None else self._reader.format.decode
        self._text = TextStream(decode_text, request.stop, self._context, request.min_tokens)

    def add(self, delta: Delta) -> Turn:
        """Returns what new tokens add to the turn."""
        self._tokens += delta.tokens
        text = self._text.add(delta.tokens)
        if self._turn is None or self._reader is None:
            rest = self._text.end(delta.text) if delta.finish_reason else ""
            return Turn(text + rest, finish_reason=delta.finish_reason)
        if delta.finish_reason is None:
            return self._turn.add(text)
        whole, stop_string = self._reader.text(self._context, self._tokens)
        return self._turn.end(whole, delta.finish_reason, stop_string)


class TextStream:
    """Decodes tokens incrementally into text that later tokens cannot change.

    It holds back characters with missing bytes, and what may be the start of a stop string.

    Args:
        decode: Decodes tokens to text.
        stop: Stop strings.
        context: The preceding tokens (see `tokenizer.context_tokens`).
        min_tokens: Number of tokens in which a stop string may not end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decode, self._stop = decode, stop
        self._num_exempt_tokens, self._num_exempt_characters = min_tokens, 0  # the tokens are those still to come
        self._tokens = list(context)
        # A token's text may depend on the last token with a text: tokens from `_start` on are decoded twice.
        self._start, self._num_decoded = 0, len(self._tokens)
        self._text, self._num_returned = "", 0

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that has become final."""
        if self._num_exempt_tokens > 0:
            early, tokens = tokens[: self._num_exempt_tokens], tokens[self._num_exempt_tokens :]
            self._num_exempt_tokens -= len(early)
            self._decode_more(early)
            self._num_exempt_characters = len(self._text)
        self._decode_more(tokens)
        return self.end(self._final_text())

    def end(self, text: str) -> str:
        """Returns the rest of the whole text."""
        new = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return new

    def _decode_more(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        earlier = self._decode(self._tokens[self._start : self._num_decoded])
        both = self._decode(self._tokens[self._start :])
        if both.endswith(REPLACEMENT):
            return
        self._text += both[len(earlier) :]
        if len(both) > len(earlier):
            self._start = self._num_decoded
        self._num_decoded = len(self._tokens)

    def _final_text(self) -> str:
        text = text_before_stop(self._text, self._stop, self._num_exempt_characters)
        first_held = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < first_held:
                if stop.startswith(text[start:]):
                    first_held = start
                start = text.find(stop[0], start + 1)
        return text[:first_held]


async def streamed(
    exchange: Exchange, writer: Writer, num: int, arriving: AsyncIterator[Delta], tokenizer: Any
) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a streamed response of `num` completions."""
    streams = [PieceStream(exchange, index, tokenizer) for index in range(num)]
    completions = [Completion() for _ in streams]
    for event in writer.first_events():
        yield event
    async for delta in arriving:
        completion = completions[delta.index]
        if delta.start < len(completion.tokens):
            raise ApiError(503, "the weights changed, and the completion had to be restarted", code="aborted")
        for event in writer.events(delta, streams[delta.index].add(delta), completion):
            yield event
        completion.add(delta)
    for event in writer.last_events(completions):
        yield event
