"""`groupax train --dry_run`: everything of a run up to its first step, except for the weights."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.core.config import GRPOConfig
from groupax.core.settings import environment as env
from groupax.core.settings.compute import mesh_sizes
from groupax.core.storage.buckets import is_remote
from groupax.core.terminal.printable import error_line
from groupax.core.types import Rollout, TrainerState
from groupax.engine.constraints import ConstraintCompiler
from groupax.models.lora import LoRAConfig
from groupax.models.weights.casts import is_quantized
from groupax.models.weights.checkpoint import Model
from groupax.parallel.memory import free_memory_bytes
from groupax.rewards.runner import RewardRunner
from groupax.runs.build import check_constraint, model_for
from groupax.runs.checkpoints.choose import split_path, store_of
from groupax.runs.header import model_facts
from groupax.runs.progress.display import fact_lines
from groupax.satellites.planning.abstract import DoesNotFitError, device_bytes
from groupax.satellites.planning.run import estimated_temporaries, trace_run, unplanned_setting
from groupax.trainer import GRPOTrainer
from groupax.training.state import check_trainable

COMPLETION = "This is a completion."  # that the rewards are tried on
SHOWN = 1200  # characters of a prompt


def use_devices_for(args: GRPOConfig) -> GRPOConfig:
    """Makes as many virtual devices as the mesh has, before jax is used, and returns settings without slices.

    GPUs and TPUs come first, if there are any.
    """
    if args.mesh is not None:
        number = math.prod(size for size in mesh_sizes(args.mesh) if size > 0)
        with suppress(RuntimeError):  # jax is in use already
            jax.config.update("jax_num_cpu_devices", max(1, number // int(os.environ.get(env.NUM_PROCESSES, "1"))))
    return replace(args, mesh_dcn=None)


class DryRun(GRPOTrainer):
    """A run that reads and checks everything but weights, so that its mistakes are found before it waits in a queue."""

    def make_model(self, model: str | Path | Model, lora: LoRAConfig | None) -> Model:
        """Returns the model with shapes in the place of weights."""
        return model_for(self.args, model, lora, is_abstract=True)

    def prepare_devices(self, longest: tuple[int, int]) -> None:
        """Plans the memory of the devices."""
        model, (run, step) = self.start_model, split_path(self.args.resume)
        check_trainable(model)
        if run not in ("auto", "never") and not is_remote(run):
            steps = store_of(run, self.run_folder.path).steps()
            if not steps or step not in (None, *steps):
                raise ValueError(f"resume {self.args.resume!r}: there is no such checkpoint")
        constraints = ConstraintCompiler(self.tokenizer, model.config.vocab_size, self.eos_ids)
        check_constraint(self.args, self.rules, constraints)
        self._memory = self._planned_memory(longest)

    def report(self) -> str:
        """Returns what was found, with a prompt as the model sees it and the rewards of a completion.

        Raises:
            RewardError: A reward function failed, and `reward_errors` is "raise".
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
        if model.adapter is not None and is_quantized(model.adapter.frozen):
            args = replace(args, base_weights="nf4")
        if unplanned := unplanned_setting(args):
            return f"not planned: {unplanned}"
        free, is_cpu = free_memory_bytes(mesh), mesh.devices.flat[0].platform == "cpu"
        try:
            run = trace_run(model.config, mesh, args, lora, None if is_cpu else free)
        except DoesNotFitError as error:
            raise ValueError(f"{error}; groupax plan looks for settings or devices that fit") from None
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
        first = Rollout(
            prompt_index=0,
            sample_index=0,
            example=self.prompts.examples[0],
            prompt_ids=self.prompts.token_ids[0],
            completion_ids=tokens,
            policy_logps=logps,
            sampler_logps=logps,
            finish_reason="stop",
            policy_version=0,
            text=COMPLETION,
        )
        group = [replace(first, sample_index=index) for index in range(self.args.num_generations)]
        functions = [reward for reward in self.rewards if not reward.on_device]
        with RewardRunner(functions, self.args) as runner:
            runner.state = TrainerState(num_steps=self.num_steps)
            scored = runner.score([group])
        values = {reward.name: "not tried" for reward in self.rewards}
        values |= {name: str(value) for name, value in scored.groups[0][0].rewards.items()}
        for name, error in scored.errors.items():
            values[name] = f"FAILED ({error_line(error.strip().splitlines()[-1])})"
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{shown} for {COMPLETION!r}, in {scored.reward_s:.2g} s"
