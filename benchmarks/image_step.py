"""GRPO steps on prompts with images: arithmetic of the tower and seconds of a step, groupax beside TRL, in one run.

    python benchmarks/image_step.py [--json] [--steps 3]

The model of the recipe `shapes`, which transformers loads too: 4 prompts with one image, 8 completions each of at most
24 tokens. Both train all weights in float32, the tower too. The arithmetic is that of matmuls, forward and backward, of
the vision transformer and the projector: TRL's counted by PyTorch's counter of operations, groupax's in the traced
program, for each image that it encodes. Medians over the steps after the first 12, in which groupax meets its shapes.
Without TRL it is left out.
"""

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import parser, show

from groupax import GRPOConfig, GRPOTrainer
from groupax.models.vision.tower import batch_images, encode_images
from groupax.recipes import load_recipe
from groupax.recipes.shapes.scenes import generate
from groupax.satellites.planning.counting import count_program

PROMPTS, GROUP, NEW_TOKENS, WARM_UP = 4, 8, 24, 12


def reward(completions: list[Any], **_: Any) -> list[float]:
    """A cheap reward that varies."""
    return [float(len(str(completion)) % 7) for completion in completions]


def rows() -> list[dict[str, Any]]:
    """Questions about pictures."""
    return [{"prompt": row["prompt"], "image": row["image"]} for row in generate(64, seed=3)]


def groupax_side(folder: str, run: Path, num_steps: int) -> dict[str, float]:
    """Median seconds of a step, and the tower's operations in one."""
    args = GRPOConfig(
        output_dir=str(run),
        prompts_per_step=PROMPTS,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=WARM_UP + num_steps,
        freeze_vision_tower=False,
        progress_bar="none",
        log_completions=False,
        dtype="float32",
    )
    times: list[float] = []
    encoded: list[int] = []
    trainer = GRPOTrainer(folder, reward, args, rows())
    learner: Any = trainer.learner
    apply = learner._apply

    def timed(accumulator: Any) -> Any:
        found = apply(accumulator)
        times.append(time.perf_counter())
        encoded.append(learner.features.num_encoded)
        return found

    learner._apply = timed
    trainer.train()
    config = learner.config
    of_first = trainer.prompts.images_of([0])[0]
    assert of_first is not None, "every prompt has an image"
    images = of_first.images
    forward, both = tower_flops(config.vision, learner.policy["vision"], images)
    in_rollout = float(statistics.median(np.diff(encoded)[WARM_UP - 1 :]))
    return {
        "step_s": float(statistics.median(np.diff(times)[WARM_UP - 1 :])),
        "images_forward": in_rollout + PROMPTS,
        "images_backward": PROMPTS,
        "tower_gflop": (in_rollout * forward + PROMPTS * both) / 1e9,
    }


def tower_flops(vision: Any, params: Any, images: Any) -> tuple[float, float]:
    """Returns the operations for an image forward, and forward and backward."""
    batch, _ = batch_images(vision, images)
    forward = jax.make_jaxpr(lambda params: encode_images(vision, params, batch))(params)
    total: Callable[[Any], Any] = lambda params: jnp.sum(encode_images(vision, params, batch))  # noqa: E731
    return count_program(forward).flops, count_program(jax.make_jaxpr(jax.grad(total))(params)).flops


def trl_side(folder: str, run: Path, num_steps: int) -> dict[str, float] | None:
    """The same of TRL; None if it is not installed."""
    try:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        trl: Any = importlib.import_module("trl")
        from datasets import Dataset
        from transformers import AutoModelForImageTextToText
    except ImportError:
        return None
    times: list[float] = []
    flops: list[float] = []
    counts = {"forward": 0, "backward": 0}
    args = trl.GRPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=WARM_UP + num_steps + 1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    trainer = trl.GRPOTrainer(model, reward, args, Dataset.from_list(rows()))

    def seen(_: Any, given: Any, options: Any) -> None:
        pixels = options["pixel_values"] if "pixel_values" in options else given[0]
        counts["forward"] += len(pixels)
        counts["backward"] += len(pixels) * torch.is_grad_enabled()

    model.model.vision_model.register_forward_pre_hook(seen, with_kwargs=True)
    step = trainer.training_step

    def timed(*given: Any) -> Any:
        if len(times) < WARM_UP + num_steps:
            found = step(*given)
            times.append(time.perf_counter())
            return found
        counts.update(forward=0, backward=0)
        with FlopCounterMode(display=False) as counter:  # the last step, which is slower and does not count in time
            found = step(*given)
        by_module = counter.get_flop_counts()
        names = ("model.vision_model", "model.connector")
        flops.append(sum(sum(by_module[name].values()) for name in by_module if name.endswith(names)))
        return found

    trainer.training_step = timed
    trainer.train()
    return {
        "step_s": float(statistics.median(np.diff(times)[WARM_UP - 1 :])),
        "images_forward": counts["forward"],
        "images_backward": counts["backward"],
        "tower_gflop": flops[0] / 1e9,
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=3)
    args = arguments.parse_args()
    folder = load_recipe("shapes").model
    with tempfile.TemporaryDirectory() as runs:
        sides = {"groupax": groupax_side(folder, Path(runs) / "groupax", args.steps)}
        peer = trl_side(folder, Path(runs) / "trl", args.steps)
    if peer is not None:
        sides["trl"] = peer
        sides["ratio"] = {name: value / sides["groupax"][name] for name, value in peer.items()}
    show([{"side": name, **values} for name, values in sides.items()], args.json)


if __name__ == "__main__":
    main()
