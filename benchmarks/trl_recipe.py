"""Trains on a recipe with TRL: the same data, rewards and settings as `groupax train --recipe`, for the same curves.

    python benchmarks/trl_recipe.py instructions MODEL OUT --seed 0

TRL samples with transformers' `generate`, and computes in bfloat16 with float32 weights, as the recipe does, or in
float32 with `--dtype float32`. OUT gets a line of JSON per step in `metrics.jsonl`, with the names of groupax's
metrics, and the trained model.
"""

import argparse
import functools
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupax.core.config import GRPOConfig
from groupax.recipes import load_recipe
from groupax.rewards.contract import Reward
from groupax.rewards.resolve import resolve_rewards

SAME_NAME = (
    *("num_generations", "max_completion_length", "temperature", "learning_rate", "lr_scheduler_type", "beta"),
    *("epsilon", "loss_type", "max_grad_norm", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
)


def trl_settings(config: GRPOConfig) -> dict[str, Any]:
    """Returns the settings of groupax under TRL's names."""
    return {name: getattr(config, name) for name in SAME_NAME} | {
        "per_device_train_batch_size": config.prompts_per_step * config.num_generations,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "reward_weights": list(config.reward_weights) if config.reward_weights else None,
        "bf16": config.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def with_own_arguments(reward: Reward) -> Callable[..., Any]:
    """Returns a reward function that ignores what it does not take, since TRL passes everything."""

    @functools.wraps(reward.function)
    def score(**given: Any) -> Any:
        taken = {name: each for name, each in given.items() if reward.takes is None or name in reward.takes}
        return reward.function(**taken)

    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, help="number of steps; by default the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of the computation; by default the recipe's")
    args = parser.parse_args()

    from datasets import Dataset
    from transformers import TrainerCallback

    trl: Any = importlib.import_module("trl")
    recipe = load_recipe(args.recipe)
    config, rows = GRPOConfig.from_mapping(recipe.config), recipe.train_dataset()
    config = config if args.dtype is None else replace(config, dtype=args.dtype)
    given = resolve_rewards(list(recipe.reward_funcs), [name for name in rows[0] if name != "prompt"])

    class Lines(TrainerCallback):
        """Writes each step's metrics and seconds."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun_s, self.begun_cpu_s = time.perf_counter(), time.process_time()

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" in logs:
                seconds = {
                    "step_time": time.perf_counter() - self.begun_s,
                    "cpu_s": time.process_time() - self.begun_cpu_s,
                }
                with (args.out / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({**logs, **seconds, "step": state.global_step}) + "\n")

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "metrics.jsonl").unlink(missing_ok=True)  # of a run that was interrupted
    trainer = trl.GRPOTrainer(
        model=args.model,
        reward_funcs=[with_own_arguments(reward) for reward in given],
        args=trl.GRPOConfig(
            output_dir=str(args.out / "trainer"),
            max_steps=args.steps or config.max_steps,
            seed=args.seed,
            **trl_settings(config),
        ),
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        callbacks=[Lines()],
    )
    trainer.train()
    trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    main()
