"""Settings of rollouts: their size, their updates, and the servers that sample them. Imports no jax."""

import re
from dataclasses import dataclass

from groupax.settings.fields import ranged, setting
from groupax.terminal.printable import short_repr

ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # also names a folder
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
    policy's weights before each rollout. `groupax serve`, or vLLM or SGLang, which need rollout_correction. Their key
    is read from the environment variable GROUPAX_API_KEY. See docs/serving.md."""
    rollout_timeout_s: float = ranged(600.0, 1e6, low=1, resume="free")
    """Longest time in seconds that a rollout server may take for the completions of one prompt; `groupax serve` has
    its own limit, --request_timeout_s."""
    rollout_folder: str | None = setting(None, resume="free")
    """Folder in which vLLM and SGLang find the policy's weights; it must have the same path here and on their
    machines. None takes rollout_weights/ in output_dir."""
    adapters: tuple[str, ...] = setting((), resume="fixed")
    """Names of LoRA adapters that are trained at the same time over one base, with the settings lora_...; the dataset's
    column adapter names the one that answers a prompt, and programs choose by the model of a request. See
    docs/adapters.md."""
    filter_zero_variance: bool = False
    """Dynamic sampling: replace groups whose completions all received the same reward by groups of further prompts."""
    filter_budget: float = ranged(4.0, 1e4, low=1)
    """Dynamic sampling stops after this many times the prompts of a rollout and fills up with groups without signal."""

    def check(self) -> None:
        """Raises a ValueError for rollouts that are too large and for addresses that are no servers."""
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
        self._check_adapters()
        if self.rollout_folder is not None and not self.rollout_servers:
            raise ValueError("rollout_folder is for rollout_servers, and there are none; set rollout_servers")

    def _check_adapters(self) -> None:
        for name in self.adapters:
            if not re.fullmatch(ADAPTER_NAME, name):
                raise ValueError(
                    f"adapters must be names of letters, digits, '.', '_' and '-', at most 64, got {short_repr(name)}"
                )
        if "base" in self.adapters:
            raise ValueError("adapters must have other names than 'base', which is their base; e.g. 'basic'")
        if len(set(self.adapters)) < len(self.adapters):
            raise ValueError(f"adapters must have different names, got {', '.join(self.adapters)}")
        if self.adapters and self.rollout_servers:
            raise ValueError("rollout_servers sample for a single adapter; train adapters without rollout_servers")
