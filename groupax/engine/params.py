"""How to sample. Imports no jax."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request. All are runtime values: changing them compiles nothing.

    The sampler draws from softmax(logits / temperature), cut to the `top_k` likeliest tokens, then to the fewest
    tokens that hold `top_p` of what is left, then to those at least `min_p` times as likely as the likeliest.
    Tokens that tie with the last one kept are kept.

    Attributes:
        n: completions per prompt.
        max_tokens: the longest completion, in tokens, its end-of-sequence token included.
        temperature: 0 takes the likeliest token (log-probs are then those at temperature 1).
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1); 0 keeps all.
        seed: same seed, same prompts, same completions, in whatever batch they run.
        stop_token_ids: tokens that end a completion beside the model's own end-of-sequence tokens.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        limits = {
            "n": (self.n >= 1, "at least 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
        }
        for name, (valid, rule) in limits.items():
            if not valid:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
