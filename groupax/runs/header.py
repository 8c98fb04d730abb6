"""What a user sees of a run before its first step."""

from collections.abc import Mapping, Sequence

from groupax.config import GRPOConfig
from groupax.data.prompts import PromptSet
from groupax.models.checkpoint import Model
from groupax.models.lora import count_params
from groupax.rewards.contract import Reward


def run_facts(
    args: GRPOConfig,
    model: Model,
    prompts: PromptSet,
    eval_prompts: Mapping[str, PromptSet],
    rewards: Sequence[Reward],
    num_steps: int,
) -> dict[str, str]:
    """Returns what identifies a run, by label.

    Args:
        args: its settings.
        model: the policy.
        prompts: those to train on.
        eval_prompts: the held-out ones, by name of the set.
        rewards: the reward functions.
        num_steps: optimizer steps.
    """
    held_out = "".join(f", {len(each):,} held out ({name})" for name, each in eval_prompts.items())
    return {
        "model": model.name or "a model made in memory",
        "parameters": _parameters(model),
        "devices": _devices(model),
        "prompts": f"{len(prompts):,}{held_out}",
        "rewards": ", ".join(reward.name for reward in rewards),
        "steps": f"{num_steps:,}, each on {args.prompts_per_step:g} prompts x {args.num_generations} completions",
    }


def _parameters(model: Model) -> str:
    trained, total = count_params(model.config, model.adapter and model.adapter.config)
    return f"{total:,}, all trained" if trained == total else f"{total:,}, of which {trained:,} are trained"


def _devices(model: Model) -> str:
    devices = model.mesh.devices
    return f"{devices.size} x {devices.flat[0].device_kind}"
