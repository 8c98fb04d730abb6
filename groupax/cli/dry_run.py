"""`groupax train --dry_run`: everything of a run up to its first step, except for the weights."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.core.config import GRPOConfig
from groupax.core.errors import RewardError
from groupax.core.settings.compute import mesh_sizes
from groupax.core.types import Rollout
from groupax.engine.constraints import ConstraintCompiler
from groupax.models.lora import LoRAConfig
from groupax.models.weights.checkpoint import Model
from groupax.parallel.memory import free_memory_bytes
from groupax.runs.build import check_constraint, model_for
from groupax.runs.header import model_facts
from groupax.runs.progress.display import fact_lines
from groupax.satellites.planning.abstract import DoesNotFitError, device_bytes
from groupax.satellites.planning.run import estimated_temporaries, trace_run
from groupax.trainer import GRPOTrainer

COMPLETION = "This is a completion."  # that the rewards are tried on
SHOWN = 1200  # characters of a prompt


def use_devices_for(args: GRPOConfig) -> None:
    """Makes as many virtual devices as the mesh has; call this before jax is used. GPUs and TPUs come first."""
    shapes = [mesh_sizes(mesh) for mesh in (args.mesh, args.mesh_dcn) if mesh is not None]
    if shapes:
        with suppress(RuntimeError):  # jax is in use already
            jax.config.update("jax_num_cpu_devices", math.prod(size for shape in shapes for size in shape if size > 0))


class DryRun(GRPOTrainer):
    """A run that reads and checks everything but weights, so that its mistakes are found before it waits in a queue."""

    def make_model(self, model: str | Path | Model, lora: LoRAConfig | None) -> Model:
        """Returns the model with shapes in the place of weights."""
        return model_for(self.args, model, lora, is_abstract=True)

    def prepare_devices(self, longest: tuple[int, int]) -> None:
        """Plans the memory of the devices."""
        constraints = ConstraintCompiler(self.tokenizer, self.start_model.config.vocab_size, self.eos_ids)
        check_constraint(self.args, self.rules, constraints)
        self._memory = self._planned_memory(longest)

    def report(self) -> str:
        """Returns what was found, with a prompt as the model sees it and the rewards of a completion.

        Raises:
            RewardError: A reward function failed.
        """
        facts = {**model_facts(self.start_model), "data": self.dataset_name, **self.facts()}
        facts |= {"memory": self._memory, "rewards": self._tried_rewards()}
        ids = self.prompts.token_ids[0]
        prompt = self.tokenizer.decode([int(token) for token in ids])
        if len(prompt) > SHOWN:
            prompt = f"{prompt[: SHOWN // 2]} … {prompt[-SHOWN // 2 :]}"
        lengths = f"{len(ids):,} tokens; the longest has {max(map(len, self.prompts.token_ids)):,}"
        return f"{fact_lines(facts)}\n\nthe first prompt, {lengths}\n{prompt}\n\ndry run: nothing is trained"

    def _planned_memory(self, longest: tuple[int, int]) -> str:
        model, args = self.start_model, replace(self.args, max_prompt_length=longest[0])
        lora, mesh = model.adapter and model.adapter.config, model.mesh
        free, is_cpu = free_memory_bytes(mesh), mesh.devices.flat[0].platform == "cpu"
        try:
            run = trace_run(model.config, mesh, args, lora, None if is_cpu else free)
        except DoesNotFitError as error:
            raise ValueError(f"{error}; groupax plan looks for settings or devices that fit") from None
        except ValueError as error:
            return f"not planned: {error}"
        temporaries: Mapping[str, Mapping[str, Any]] = estimated_temporaries(model.config, mesh, args, run)
        peaks = {
            each.name: device_bytes({**run.residents, **each.arguments}) + sum(temporaries.get(each.name, {}).values())
            for each in run.programs
        }
        most = max(peaks, key=lambda name: peaks[name])
        needed = (
            f"about {peaks[most] / 1e9:.2f} GB of each of {mesh.devices.size} in {most}; {free / 1e9:.1f} GB are free"
        )
        if peaks[most] > free and not is_cpu:
            raise ValueError(f"{needed}; groupax plan looks for settings or devices that fit")
        return f"{needed} here (for other devices: groupax plan --devices h100-8)"

    def _tried_rewards(self) -> str:
        names = ", ".join(reward.name for reward in self.rewards)
        if self.rules.has_turns or self.rules.rollout_func is not None:
            return f"{names}; not tried, since they need episodes"
        tokens = np.asarray(self.tokenizer.encode(COMPLETION, add_special_tokens=False), np.int32)
        logps = np.zeros(len(tokens), np.float32)
        given = {"prompt_ids": self.prompts.token_ids[0], "completion_ids": tokens, "policy_logps": logps}
        given |= {"sampler_logps": logps, "finish_reason": "stop", "policy_version": 0, "text": COMPLETION}
        example, number = self.prompts.examples[0], self.args.num_generations
        group = [Rollout(prompt_index=0, sample_index=index, example=example, **given) for index in range(number)]
        with self.reward_runner as runner:
            scored = runner.score([group])
        for name, error in scored.errors.items():
            raise RewardError(f"the reward function {name!r} failed for the completion {COMPLETION!r}:\n{error}")
        values = scored.groups[0][0].rewards.items()
        return (
            f"{', '.join(f'{name} {value}' for name, value in values)} for {COMPLETION!r}, in {scored.reward_s:.2g} s"
        )
