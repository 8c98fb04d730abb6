"""Settings of evaluations. Imports no jax."""

from dataclasses import dataclass

from groupax.settings.fields import ranged, setting
from groupax.settings.sampling import EvalSamplingSettings


@dataclass(frozen=True, kw_only=True)
class EvaluationSchedule:
    """Schedule of evaluations."""

    eval_steps: int = ranged(0, 10**9, resume="free")
    """Evaluate on eval_dataset every this many steps during training; 0 never does. Before and after training, groupax
    train evaluates in any case."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(EvaluationSchedule, EvalSamplingSettings):
    """Schedule, number of completions and sampling of evaluations."""

    eval_num_generations: int = ranged(1, 2**16, low=1, resume="free")
    """Completions per prompt in evaluation; above 1, pass@k and maj@k up to this k are reported."""
    eval_max_completion_length: int | None = ranged(None, 10**9, low=1, resume="free")
    """Longest completion in evaluation; None takes max_completion_length."""
    correctness_reward: str | None = setting(None, resume="free")
    """Reward function whose 1 means that a completion is correct, for pass@k and solved groups; None takes the first
    built-in one of that kind, e.g. gsm8k_accuracy, if there is one."""

    def check(self) -> None:
        """Raises a ValueError for several greedy completions of a prompt."""
        if self.eval_num_generations > 1 and self.eval_temperature == 0:
            raise ValueError(
                f"eval_num_generations is {self.eval_num_generations}, but at eval_temperature 0 all completions of a "
                "prompt are the same; set eval_temperature, e.g. to 0.8"
            )
