"""Trains TRL for one step on prompts with images, and records what it computed (see tests/compat/test_trl_images.py):

    python dev/trl_images.py [family ...]

It needs TRL 1.16 with PyTorch, and not torchvision. It writes tests/golden/trl_images.json and .npz.
"""

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.compat.trl_images import COMPLETIONS, FAMILIES, GOLDEN, REWARDS, SETTINGS, make_folder, rows, weight


def make_model(family: str, folder: Path) -> None:
    """Writes a model."""
    import torch
    import transformers

    make_folder(family, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, own in model.named_parameters():
            own.copy_(torch.from_numpy(weight(name, tuple(own.shape))))
    model.save_pretrained(folder)


def load_processor(family: str, folder: Path) -> Any:
    """Returns a model's processor; that of a Qwen without its part for videos, which needs torchvision."""
    import transformers

    if not family.startswith("qwen"):
        return transformers.AutoProcessor.from_pretrained(folder, padding_side="left")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind: Any = getattr(transformers, FAMILIES[family]["processor"]["processor_class"])

    class WithoutVideos(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    WithoutVideos.video_processor = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return WithoutVideos(images, tokenizer, None, chat_template=tokenizer.chat_template)


def record(family: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns numbers and arrays of a step of TRL."""
    from datasets import Dataset

    trl: Any = importlib.import_module("trl")
    make_model(family, folder / "model")
    args = trl.GRPOConfig(str(folder / "run"), use_cpu=True, bf16=False, gradient_checkpointing=False, **SETTINGS)
    args.model_init_kwargs = {"dtype": "float32"}
    dataset = Dataset.from_list(rows())
    processor = load_processor(family, folder / "model")
    trainer = trl.GRPOTrainer(str(folder / "model"), lambda **_: REWARDS, args, dataset, processing_class=processor)
    encode = trainer.processing_class.tokenizer.encode
    seen: dict[str, Any] = {}

    def generate(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        assert len(prompt_ids) == len(COMPLETIONS)
        return [encode(text, add_special_tokens=False) or [0] for text in COMPLETIONS], None

    compute, logps_of = trainer._compute_loss, trainer._get_per_token_logps_and_entropies

    def loss_of(model: Any, inputs: Any) -> Any:
        seen.update(inputs)
        seen["loss"] = compute(model, inputs)
        return seen["loss"]

    def recorded_logps(*given: Any, **options: Any) -> Any:
        found = logps_of(*given, **options)
        seen["logps"] = found[0].detach()
        return found

    assert processor is trainer.processing_class
    trainer._generate_single_turn, trainer._compute_loss = generate, loss_of
    trainer._get_per_token_logps_and_entropies = recorded_logps
    step, gradients = trainer.training_step, {}

    def kept(model: Any, *given: Any) -> Any:
        start = time.perf_counter()
        found = step(model, *given)
        seen["seconds"] = time.perf_counter() - start
        gradients.update(
            {name: own.grad.numpy().copy() for name, own in model.named_parameters() if own.grad is not None}
        )
        return found

    trainer.training_step = kept
    trainer.train()
    mask = seen["completion_mask"].bool()
    logps = seen["logps"].masked_fill(~mask, 0.0).numpy()
    names = list(chosen(gradients))
    numbers = {
        "prompts": [
            ids[kept.bool()].tolist() for ids, kept in zip(seen["prompt_ids"], seen["prompt_mask"], strict=True)
        ],
        "completions": [ids[kept].tolist() for ids, kept in zip(seen["completion_ids"], mask, strict=True)],
        "advantages": seen["advantages"].tolist(),
        "loss": seen["loss"].item(),
        "grad_norm": float(np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in gradients.values()))),
        "tower_grad_norm": float(
            np.sqrt(sum((g.astype(np.float64) ** 2).sum() for name, g in gradients.items() if is_tower(name)))
        ),
        "shapes": {name: list(own.shape) for name, own in trainer.model.named_parameters()},
        "gradients": names,
    }
    pixels = seen["pixel_values"].numpy()
    arrays = {f"{family}/logps": logps, f"{family}/pixels": pixels.astype(np.float32)}
    arrays |= {f"{family}/grad/{name}": gradients[name] for name in names}
    return numbers, arrays


def is_tower(name: str) -> bool:
    """True for a weight that sees images."""
    return any(part in name for part in ("vision", "visual", "connector", "multi_modal_projector"))


def chosen(gradients: dict[str, np.ndarray]) -> Iterator[str]:
    """Yields the names of weights whose gradients are stored: some of each part."""
    for name, grad in gradients.items():
        first = (".0." in name and "q_proj" in name) or "blocks.0.attn.qkv" in name
        ends = any(part in name for part in ("patch_embed", "connector", "multi_modal_projector", "merger.linear_fc2"))
        if (first or ends or "embed_tokens" in name) and grad.size <= 8192:
            yield name


def main() -> None:
    numbers: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for family in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            numbers[family], own = record(family, Path(folder))
        arrays |= own
        print(family, {name: numbers[family][name] for name in ("loss", "grad_norm", "tower_grad_norm")})
    (GOLDEN / "trl_images.json").write_text(json.dumps(numbers) + "\n")
    np.savez_compressed(GOLDEN / "trl_images.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
