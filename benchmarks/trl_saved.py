"""What scripts written for TRL save: the reward of the saved model, trained by TRL and through `groupax.compat.trl`.

    python benchmarks/trl_saved.py MODEL [--json] [--steps 40] [--seeds 3] [--scripts model_folder ...]

MODEL is the folder of a small story model. Each kind of script trains, saves and loads in its own way; only the import
of TRL differs. Prompts, reward and sizes are those of `trl_curves.py`. The model that is loaded at the end samples 4
completions of 24 tokens for each prompt, with PyTorch; the table has the mean share of the letter "e" in them, over
seeds, and its spread between seeds. Each value is also printed to standard error as soon as it is known.
"""

import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from models import parser, show
from trl_curves import PROMPTS, share_of_e

LORA = {"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
LORA |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}


def _trainer(trl: Any, model: Any, folder: Path, steps: int, seed: int, **more: Any) -> Any:
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=24,
        max_steps=steps,
        learning_rate=2e-3 if "peft_config" in more or hasattr(model, "peft_config") else 5e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_steps=steps,
        disable_tqdm=True,
        report_to="none",
        seed=seed,
    )
    return trl.GRPOTrainer(
        model=model, reward_funcs=share_of_e, args=args, train_dataset=Dataset.from_list(PROMPTS), **more
    )


def _load(source: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype="float32")


def _adapted(source: Any) -> Any:
    import peft

    return peft.get_peft_model(_load(source), peft.LoraConfig(**LORA))


def save_pretrained(trl: Any, model: str, folder: Path, *run: int) -> Any:
    """A PyTorch model is loaded, trained, and saved by its own method."""
    trained = _load(model)
    _trainer(trl, trained, folder / "out", *run).train()
    trained.save_pretrained(folder / "saved")
    return _load(folder / "saved")


def save_adapter(trl: Any, model: str, folder: Path, *run: int) -> Any:
    """As scripts with unsloth do: PEFT's model is trained and saved by its own method."""
    import peft

    adapted = _adapted(model)
    _trainer(trl, adapted, folder / "out", *run).train()
    adapted.save_pretrained(folder / "lora")
    return peft.PeftModel.from_pretrained(_load(model), folder / "lora")


def merge_and_unload(trl: Any, model: str, folder: Path, *run: int) -> Any:
    """As in Hugging Face's course: the trainer's model is merged, saved, and loaded by a pipeline."""
    from transformers import pipeline

    trainer = _trainer(trl, _adapted(model), folder / "out", *run)
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(folder / "merged")
    return pipeline("text-generation", model=str(folder / "merged"), tokenizer=model, dtype="float32").model


def adapter_folder(trl: Any, model: str, folder: Path, *run: int) -> Any:
    """As in Hugging Face's cookbook: the output folder is an adapter."""
    import peft

    trainer = _trainer(trl, model, folder / "out", *run, peft_config=peft.LoraConfig(**LORA))
    trainer.train()
    trainer.save_model(trainer.args.output_dir)
    return peft.PeftModel.from_pretrained(_load(model), folder / "out").merge_and_unload()


def model_folder(trl: Any, model: str, folder: Path, *run: int) -> Any:
    """The output folder is a model, which a pipeline loads."""
    from transformers import pipeline

    trainer = _trainer(trl, model, folder / "out", *run)
    trainer.train()
    trainer.save_model()
    return pipeline("text-generation", model=str(folder / "out"), dtype="float32").model


def checkpoint_folder(trl: Any, model: str, folder: Path, *run: int) -> Any:
    """The last checkpoint is a model."""
    _trainer(trl, model, folder / "out", *run).train()
    return _load(folder / "out" / f"checkpoint-{run[0]}")


SCRIPTS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (save_pretrained, save_adapter, merge_and_unload, adapter_folder, model_folder, checkpoint_folder)
}


def score(model: Any, source: str, seed: int) -> float:
    """The mean reward of completions that PyTorch samples from a model."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer([row["prompt"] for row in PROMPTS], return_tensors="pt", padding=True)
    torch.manual_seed(seed)
    length = inputs["input_ids"].shape[1]
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=24, num_return_sequences=4)
    return float(np.mean(share_of_e(tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True))))


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("model")
    flags.add_argument("--steps", type=int, default=40)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--scripts", nargs="+", choices=[*SCRIPTS], default=[*SCRIPTS])
    args = flags.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = [{"script": "untrained"}]
    untrained = [score(_load(args.model), args.model, seed) for seed in range(args.seeds)]
    libraries = {"TRL": "trl", "compat.trl": "groupax.compat.trl"}
    rows[0] |= dict.fromkeys(libraries, _shown(untrained))
    for name in args.scripts:
        row: dict[str, Any] = {"script": name}
        for label, library in libraries.items():
            trl, values = importlib.import_module(library), list[float]()
            for seed in range(args.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    loaded = SCRIPTS[name](trl, args.model, Path(folder), args.steps, seed)
                    values.append(score(loaded, args.model, seed))
                print(f"{name} {label} seed {seed}: {values[-1]:.3f}", file=sys.stderr, flush=True)
            row[label] = _shown(values)
        rows.append(row)
    show(rows, args.json)


def _shown(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) if len(values) > 1 else 0.0:.3f}"


if __name__ == "__main__":
    main()
