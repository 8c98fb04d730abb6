"""Sampling parameters: of one request, of rollouts and of evaluations, all from one declaration. Imports no jax.

A field of `SamplingSettings` is a sampling parameter everywhere: `SamplingParams` and `GRPOConfig` inherit it, and the
kind of program, the engine's arrays, the server's requests, the requests to other servers and the command line follow
from it. A new one takes its field here (with an `eval_` one, if evaluations should set their own) and a rule in
`engine/rules.py`, which cannot be imported as long as no rule reads the field.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from groupax.core.settings.fields import check_range, like, ranged

MAX_LOGPROBS = 20
# Stop tokens and biased tokens that a slot has room for.
STOP_IDS = 256
BIASED_TOKENS = 512
MAX_STOP_STRINGS = 16  # of one request; other servers have such a limit too
# Parameters that the host reads: how many completions, which random numbers, what ends one, which texts are allowed.
# The sampler reads all others, which are numbers of each row, or numbers of tokens.
HOST = {"n", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "regex", "json_schema", "grammar"}
MIN_TEMPERATURE = 1e-6  # below it logits over temperature leave float32
# What a program that samples supports: no settings but the temperature, as most training uses, or all of them.
SamplingKind = Literal["plain", "general"]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The distribution that tokens are drawn from, and the texts that end a completion.

    The sampler draws from softmax(logits / temperature), cut to the `top_k` likeliest tokens, then to the fewest tokens
    that hold `top_p` of the remaining mass, then to those at least `min_p` times as likely as the likeliest. Tokens
    that tie with the last one kept are kept.
    """

    temperature: float = ranged(1.0, 1e3, low=MIN_TEMPERATURE, also=0)
    """Divides the logits. 0 is greedy: it takes the likeliest token, whose log-probs are those at temperature 1."""
    top_k: int = ranged(0, 2**31 - 1)
    """Sample from the k likeliest tokens; 0 keeps all."""
    top_p: float = ranged(1.0, 1, low=1e-6)
    """Sample from the fewest tokens that hold this probability mass; 1 keeps all."""
    min_p: float = ranged(0.0, 1, is_open=True)
    """Sample from tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    repetition_penalty: float = ranged(1.0, 1e3, low=1e-3)
    """Divides positive logits of tokens that occurred in prompt or completion and multiplies negative ones; 1 is off
    (arXiv:1909.05858, section 4.1)."""
    stop: Sequence[str] = ()
    """Stop strings: texts that end a completion and are its last part; responses of a server leave them out. One that
    is written like a special token is that token."""
    regex: str | None = None
    """Regular expression in the syntax that Python and Rust share, with the classes of re.ASCII, that every completion
    matches as a whole: other tokens are not sampled. Needs groupax[constraints]. None for any text."""
    json_schema: str | None = None
    """JSON schema, as JSON, that every completion is valid for: other tokens are not sampled. Needs
    groupax[constraints]. None for any text."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SamplingSettings):
    """Sampling parameters of one request. All are runtime values: changing them compiles nothing.

    The logits are changed first, if at all: `logit_bias` is added, stop tokens are ruled out before `min_tokens`, and
    the penalties are applied. The sampler draws from them as `SamplingSettings` says.
    """

    n: int = ranged(1, low=1)
    """Completions per prompt."""
    max_tokens: int = ranged(256, low=1)
    """Longest completion in tokens, its end-of-sequence token included."""
    min_tokens: int = 0
    """Number of tokens in which neither a stop token nor a stop string ends a completion; a stop string counts if it
    ends after them."""
    presence_penalty: float = ranged(0.0, 1e9, low=-1e9)
    """Subtracted from the logits of tokens that occurred in the completion; 0 is off."""
    frequency_penalty: float = ranged(0.0, 1e9, low=-1e9)
    """Subtracted once for each time that a token occurred in the completion; 0 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int = ranged(0, (1 << 63) - 1, low=-(1 << 63))
    """The same seed and prompts give the same completions, in whatever batch they run."""
    stop_token_ids: tuple[int, ...] | int = ()
    """Tokens that end a completion, in addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Do not end completions at the model's own end-of-sequence tokens."""
    grammar: str | None = None
    """Grammar in llguidance's dialect of Lark that completions match, in place of `regex` or `json_schema`."""
    logprobs: int = ranged(0, MAX_LOGPROBS)
    """Number of likeliest alternatives to report for each token."""

    def __post_init__(self) -> None:
        texts, ids = self.stop, self.stop_token_ids  # a text is a sequence too, but not the sequence that was meant
        object.__setattr__(self, "stop", (texts,) if isinstance(texts, str) else tuple(texts))
        object.__setattr__(self, "stop_token_ids", (ids,) if isinstance(ids, int) else tuple(ids))
        for each in fields(self):
            check_range(each, getattr(self, each.name))
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}")
        check_constraint(self.regex, self.json_schema, self.grammar)
        if not all(self.stop):
            raise ValueError(f"stop must be texts that are not empty, got {self.stop!r}")

    @cached_property
    def constraint(self) -> tuple[str, str] | None:
        """The kind of constraint, "regex", "json_schema" or "grammar", and its text; None for any text."""
        kinds = {"regex": self.regex, "json_schema": self.json_schema, "grammar": self.grammar}
        return next(((kind, text) for kind, text in kinds.items() if text is not None), None)

    @cached_property
    def is_plain(self) -> bool:
        """True if tokens are drawn by the temperature alone and no alternatives are requested."""
        return all(getattr(self, name) == off for name, off in SAMPLER.items() if name != "temperature")


def sampling_kind(params: Iterable[SamplingParams]) -> SamplingKind:
    """Returns the kind of sampling that requests need which are decoded together."""
    return "plain" if all(each.is_plain for each in params) else "general"


@dataclass(frozen=True, kw_only=True)
class RolloutSamplingSettings(SamplingSettings):
    """Sampling of rollouts, as far as training narrows it."""

    temperature: float = ranged(
        1.0,
        1e3,
        low=MIN_TEMPERATURE,
        because="greedy completions of one prompt are all the same, which leaves nothing to compare",
    )
    """Divides the logits, in sampling and in training alike."""
    repetition_penalty: float = like(SamplingSettings, "repetition_penalty")
    """Makes tokens that occurred less likely, in sampling alone: the policy that is trained has no penalty. 1 is
    off."""
    stop: tuple[str, ...] = ()
    """Stop strings: texts that end a completion, e.g. "</answer>". Their tokens are part of it and are trained on, and
    reward functions see them; such a completion does not count as truncated."""

    def check(self) -> None:
        """Raises a ValueError for stop strings that cannot be looked for, and for two constraints."""
        check_stop_strings("stop", self.stop)
        check_constraint(self.regex, self.json_schema)


@dataclass(frozen=True, kw_only=True)
class EvalSamplingSettings:
    """Sampling of evaluations; what has no field here is as in rollouts."""

    eval_temperature: float = like(SamplingSettings, "temperature", default=0.0, resume="free")
    """Sampling temperature in evaluation; 0 is greedy."""
    eval_top_k: int = like(SamplingSettings, "top_k", resume="free")
    """Sample from the k likeliest tokens in evaluation; 0 keeps all."""
    eval_top_p: float = like(SamplingSettings, "top_p", resume="free")
    """Sample from the fewest tokens that hold this probability mass in evaluation; 1 keeps all."""
    eval_min_p: float = like(SamplingSettings, "min_p", resume="free")
    """Sample from tokens at least this fraction as likely as the likeliest in evaluation; 0 keeps all."""
    eval_stop: tuple[str, ...] | None = like(SamplingSettings, "stop", default=None, resume="free")
    """Stop strings in evaluation; None takes stop."""

    def check(self) -> None:
        """Raises a ValueError for stop strings that cannot be looked for."""
        check_stop_strings("eval_stop", self.eval_stop or ())

    @property
    def eval_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingSettings` that evaluations set separately."""
        own = {each.name: getattr(self, each.name) for each in fields(EvalSamplingSettings)}
        return {name.removeprefix("eval_"): value for name, value in own.items() if value is not None}


def check_constraint(regex: str | None, json_schema: str | None, grammar: str | None = None) -> None:
    """Raises a ValueError if a constraint is not a text, or if there are two."""
    given = {"regex": regex, "json_schema": json_schema, "grammar": grammar}
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            hint = ", for example json.dumps(schema)" if name == "json_schema" else ""
            raise ValueError(f"{name} must be a text{hint}, got {value!r:.80}")
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are two constraints, and a completion can have one; set one of them")


def check_stop_strings(name: str, texts: Sequence[str]) -> None:
    """Raises a ValueError if a stop string is empty or no valid text, or if there are too many."""
    for text in texts:
        if not text or text.encode(errors="ignore").decode() != text:
            raise ValueError(f"{name} must be texts of at least one character, got {text!r}")
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"{name} has {len(texts)} texts, at most {MAX_STOP_STRINGS} are looked for")


# The parameters that the sampler reads, each with its default, which is without effect.
SAMPLER: dict[str, Any] = {name: value for name, value in vars(SamplingParams()).items() if name not in HOST}
