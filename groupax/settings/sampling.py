"""How to sample. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
# Stop tokens and biased tokens, powers of two, that every slot has room for; requests with more of them compile again.
STOP_IDS = 256
BIASED_TOKENS = 512
MIN_TEMPERATURE = 1e-6  # below it logits over temperature leave float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request. All are runtime values: changing them compiles nothing.

    The logits are changed first, if at all: `logit_bias` is added, stop tokens are ruled out before `min_tokens`, and
    the penalties are applied. The sampler draws from softmax(logits / temperature), cut to the `top_k` likeliest
    tokens, then to the fewest tokens that hold `top_p` of what is left, then to those at least `min_p` times as likely
    as the likeliest. Tokens that tie with the last one kept are kept.

    Attributes:
        n: completions per prompt.
        max_tokens: the longest completion, in tokens, its end-of-sequence token included.
        min_tokens: tokens in which neither a stop token nor a stop text ends a completion; a stop text counts if it
            ends after them.
        temperature: 0 takes the likeliest token (log-probs are then those at temperature 1); else at least 1e-6.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1); 0 keeps all.
        repetition_penalty: divides positive logits of tokens that occurred in prompt or completion and multiplies
            negative ones; 1 is off (arXiv:1909.05858, section 4.1).
        presence_penalty: taken off the logits of tokens that occurred in the completion; 0 is off.
        frequency_penalty: taken off as often as they occurred; 0 is off.
        logit_bias: added to the logits of these tokens.
        seed: same seed, same prompts, same completions, in whatever batch they run; of 64 bits, with a sign.
        stop: texts that end a completion, or one text; its tokens include them, its text does not. One that is written
            like a special token is that token.
        stop_token_ids: tokens that end a completion beside the model's own end-of-sequence tokens, or one token.
        ignore_eos: the model's own end-of-sequence tokens end nothing.
        logprobs: likeliest alternatives to report for each token, at most 20.
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] | int = ()
    ignore_eos: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        texts, ids = self.stop, self.stop_token_ids  # a text is a sequence too, but not of texts that were meant
        object.__setattr__(self, "stop", (texts,) if isinstance(texts, str) else tuple(texts))
        object.__setattr__(self, "stop_token_ids", (ids,) if isinstance(ids, int) else tuple(ids))
        limits = {
            "n": (self.n >= 1, "at least 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens = {self.max_tokens}]"),
            "temperature": (
                self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
                f"0 (greedy) or at least {MIN_TEMPERATURE}",
            ),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "seed": (-(1 << 63) <= self.seed < 1 << 63, "an integer of 64 bits"),
            "logprobs": (0 <= self.logprobs <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
            "stop": (all(self.stop), "texts that are not empty"),
        }
        for name, (valid, rule) in limits.items():
            if not valid:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
