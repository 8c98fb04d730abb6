"""A request with what its response is made of, whatever the protocol. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from groupax.data.tokenizer import context_tokens, decode
from groupax.serve.requests import Request
from groupax.serve.text import TextStream
from groupax.serve.turns import Turn, TurnReader, TurnStream


@runtime_checkable
class NewTokens(Protocol):
    """New tokens of a completion (see `loop.Delta`)."""

    @property
    def index(self) -> int:
        """Index of the completion in its request."""
        ...

    @property
    def start(self) -> int:
        """Position of the first new token."""
        ...

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Reason of the end; None while the completion continues."""
        ...

    @property
    def text(self) -> str:
        """The whole text of a finished completion."""
        ...


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
    """A completion as far as it was reported, accumulated from `NewTokens`."""

    tokens: list[int] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    sampler_logps: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    num_characters: int = 0  # of the texts of its tokens, as `text_offset` counts them

    def add(self, delta: NewTokens) -> None:
        """Adds new tokens, which replace earlier ones if the completion was restarted."""
        for name in ("tokens", "policy_logps", "sampler_logps", "alternatives", "versions"):
            getattr(self, name)[delta.start :] = getattr(delta, name)
        self.finish_reason, self.text = delta.finish_reason, delta.text


@runtime_checkable
class PromptLogps(Protocol):
    """Log-probs of the tokens of a prompt after the first one (see `engine.prompt_logps`)."""

    @property
    def logps(self) -> list[float]:
        """Log-prob of each token."""
        ...

    @property
    def ranks(self) -> list[int]:
        """Rank of each token, from 1."""
        ...

    @property
    def alternatives(self) -> list[list[tuple[int, float]]]:
        """The likeliest tokens in place of each, with their log-probs."""
        ...


@dataclass(frozen=True, eq=False)
class Exchange:
    """A request and what its response is made of.

    Attributes:
        request: The request.
        wire: Further fields that the client has sent and the response repeats.
        model: The model's name for the client.
        prompts: Token ids of each prompt.
        prompt_texts: Texts of the prompts, if they are echoed.
        token_texts: Texts of the model's tokens, for log-probs.
        reader: Reads turns of a chat; None for completions of texts.
        prompt_logps: Log-probs of each prompt, if they are requested.
    """

    request: Request
    wire: Mapping[str, Any]
    model: str
    prompts: list[list[int]]
    prompt_texts: list[str]
    token_texts: TokenTexts
    reader: TurnReader | None = None
    prompt_logps: Sequence[PromptLogps] = ()

    def turn(self, index: int, completion: Completion) -> Turn:
        """Returns a finished completion as a turn.

        Args:
            index: Its index in the request.
            completion: Its tokens and its text.
        """
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


class PieceStream:
    """A completion that grows, as text that later tokens cannot change.

    Args:
        exchange: The request that it answers.
        index: Its index there.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, exchange: Exchange, index: int, tokenizer: Any) -> None:
        request, reader = exchange.request, exchange.reader
        prompt = exchange.prompts[index // request.n]
        self._context = context_tokens(tokenizer, prompt)
        self._reader, self._tokens = reader, []
        self._turn = None if reader is None else TurnStream(reader, exchange.seed(index))
        decode_text = (lambda ids: decode(tokenizer, [ids])[0]) if reader is None else reader.format.decode
        self._text = TextStream(decode_text, request.stop, self._context, request.min_tokens)

    def add(self, delta: NewTokens) -> Turn:
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


@runtime_checkable
class Writer(Protocol):
    """Writes the response to a request in a protocol's format."""

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole response as one object."""
        ...

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the first events of a streamed response."""
        ...

    def events(self, delta: NewTokens, piece: Turn, completion: Completion) -> list[dict[str, Any]]:
        """Returns the events of new tokens.

        Args:
            delta: The new tokens.
            piece: What they add to the turn.
            completion: The completion before these tokens.
        """
        ...

    def last_events(self, completions: list[Completion]) -> list[dict[str, Any]]:
        """Returns the last events of a streamed response."""
        ...
