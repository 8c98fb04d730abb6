"""Settings of rollouts: prompts, sizes, servers, episodes and reward calls. Imports no jax."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from groupax.core.settings.fields import check_json, ranged, setting

# Names that groupax passes to a template itself, and parameters of `apply_chat_template` that no template reads.
RESERVED = (
    *("messages", "conversation", "conversations", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tools", "documents", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"),
)


def check_template_kwargs(kwargs: Any, name: str) -> None:
    """Raises a ValueError, with their name, if arguments for a chat template are no JSON values that a user may set."""
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ValueError(
            f"{name} must be a mapping of names to values, e.g. {{'enable_thinking': False}}, got {kwargs!r}"
        )
    for key in kwargs:
        if key in RESERVED:
            raise ValueError(f"{name} has {key!r}, which groupax sets itself or does not support; leave it out")
    check_json(kwargs, name)


PromptOverflow = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Length limits of prompts and completions, and the chat template."""

    max_prompt_length: int | None = ranged(None, 10**9, low=1, resume="fixed")
    """Longest prompt in tokens; None takes the model's context minus max_completion_length."""
    prompt_overflow: PromptOverflow = setting("error", resume="fixed")
    """Handling of longer prompts: stop with an error, drop them, or keep their ends."""
    max_completion_length: int = ranged(256, 10**9, low=1)
    """Longest completion in tokens."""
    chat_template: str | None = setting(None, resume="fixed")
    """Chat template for a tokenizer without one: a built-in name (chatml, plain) or a file."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"resume": "fixed"})
    """Arguments of the chat template as JSON, e.g. {"enable_thinking": false} for Qwen3. A column of this name in the
    dataset holds arguments of single rows, which take precedence."""

    def check(self) -> None:
        """Raises a ValueError for arguments that no chat template can take."""
        check_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")


MAX_ROWS = 10**7  # completions of a rollout


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Sizes of rollouts and updates, asynchronous rollouts, rollout servers and dynamic sampling."""

    prompts_per_step: int = ranged(8, 10**6, low=1, resume="fixed")
    """Prompts per optimizer step, counted over all devices."""
    num_generations: int = ranged(
        8, 2**16, low=2, because="a group needs at least 2 completions to compare", resume="fixed"
    )
    """Completions per prompt: the group whose rewards are compared."""
    updates_per_rollout: int = ranged(1, 10**6, low=1, resume="fixed")
    """Optimizer steps per pass over a rollout. Each rollout samples prompts_per_step * updates_per_rollout prompts."""
    num_iterations: int = ranged(1, 10**4, low=1, resume="fixed")
    """Passes over each rollout; more than 1 trains off policy, within the clipping range."""
    max_staleness: int = ranged(0, 10**4)
    """Generate rollouts asynchronously with a policy at most this many optimizer steps old; 0 alternates generation
    and training. Needs rollout_correction. See docs/async.md."""
    rollout_servers: tuple[str, ...] = setting((), resume="free")
    """Addresses of servers that sample the rollouts instead of this process, e.g. http://host:8000; they receive the
    policy's weights before each rollout. `groupax serve`, or vLLM, which needs rollout_correction. Their key is read
    from the environment variable GROUPAX_API_KEY. See docs/serving.md."""
    rollout_timeout_s: float = ranged(600.0, 1e6, low=1, resume="free")
    """Longest time in seconds that a rollout server may take for the completions of one prompt; `groupax serve` has
    its own limit, --request_timeout_s."""
    rollout_folder: str | None = setting(None, resume="free")
    """Folder in which vLLM finds the policy's weights; it must have the same path here and on its machine. None takes
    rollout_weights/ in output_dir."""
    filter_zero_variance: bool = False
    """Dynamic sampling: replace groups whose completions all received the same reward by groups of further prompts."""
    filter_budget: float = ranged(4.0, 1e4, low=1)
    """Dynamic sampling stops after this many times the prompts of a rollout and fills up with groups without signal."""

    def check(self) -> None:
        """Raises a ValueError for rollouts that are too large and for addresses that are not servers."""
        rows = self.prompts_per_step * self.updates_per_rollout * self.num_generations
        if rows > MAX_ROWS:
            raise ValueError(
                f"a rollout has {rows:,} completions, and {MAX_ROWS:,} are the most; lower prompts_per_step "
                f"({self.prompts_per_step}), updates_per_rollout ({self.updates_per_rollout}) or num_generations "
                f"({self.num_generations})"
            )
        for address in self.rollout_servers:
            if set(address) & set("@?#"):
                raise ValueError(
                    "rollout_servers has an address with a user name, password, query or fragment, which would be "
                    "saved in config.json and are not sent; give http://host:port, and the key of the servers in the "
                    "environment variable GROUPAX_API_KEY"
                )
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"rollout_servers must be addresses like http://host:port, got {address!r}")
        if self.rollout_folder is not None and not self.rollout_servers:
            raise ValueError("rollout_folder is for rollout_servers, and there are none; set rollout_servers")


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Limits of episodes with tools or environments. All tokens after the prompt share `max_completion_length`."""

    max_turns: int = ranged(16, 10**5, low=1)
    """Most turns that the model samples in an episode. The calls of the last one are still run."""
    max_tool_calls: int | None = ranged(None, 10**6, low=1)
    """Most tool calls of an episode; a turn that exceeds them ends it, and its calls are not run. None for no limit."""
    max_tool_turns: int | None = ranged(None, 10**6)
    """Most turns of an episode whose calls are run; a further turn with calls ends it, and they are not run. None for
    no limit."""
    max_turn_tokens: int | None = ranged(None, 10**9, low=1)
    """Most tokens of a turn; one that is cut off ends the episode, and its calls are not run. None leaves a turn all
    that is left of max_completion_length."""
    malformed_calls: Literal["tell", "end"] = "tell"
    """Handling of a tool call that cannot be read: tell the model what is wrong with it, or end the episode."""
    overlong_results: Literal["error", "end"] = "error"
    """Handling of tools' results that do not fit into max_completion_length: give the model an error in their place, if
    that fits, or end the episode."""
    max_result_kb: float = ranged(64.0, 1e6, low=0.064)
    """Longest text of a tool's result in kilobytes; the middle of a longer one is left out."""
    tool_timeout_s: float = ranged(30.0, 1e6, low=1e-3, resume="free")
    """Timeout of a tool call, and of a call of an environment, in seconds."""
    tool_workers: int = ranged(64, 10**4, low=1, resume="free")
    """Tool calls that run at the same time."""
    environment_retries: int = ranged(2, 10**3, resume="free")
    """Number of times that an episode begins again, with a new environment, after its environment failed. Then it is
    left out of its group's comparison and of the loss."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Scope, concurrency, timeouts and retries of reward calls."""

    reward_scope: Literal["group", "rollout"] = setting("group", resume="free")
    """Completions of one call of a reward function: a group, while other groups are decoded, or the whole rollout."""
    reward_concurrency: int = ranged(1, 10**4, low=1, resume="free")
    """Concurrent calls of one synchronous reward function; above 1 the function must be thread-safe."""
    reward_workers: int = ranged(0, 10**4, resume="free")
    """Worker processes for synchronous reward functions; 0 runs them in threads."""
    reward_timeout_s: float | None = ranged(300.0, 1e6, low=1e-3, resume="free")
    """Timeout of a reward call in seconds; None for none."""
    reward_retries: int = ranged(0, 10**3, resume="free")
    """Retries of a reward call that raised or timed out."""
    reward_errors: Literal["none", "raise"] = setting("none", resume="free")
    """On a failed reward call, give its completions no reward and count them, or stop the run."""
