"""Runs scripts written for TRL in a world without a network, with nothing changed but the imports and sizes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dev import trl_images, trl_world

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT.parent / "shared" / "tokenizers" / "qwen"
# Specs of environments are no trainers: their imports stay as they are.
IMPORT = re.compile(r"^(\s*from\s+)trl\b(?!\.experimental\.(?:harbor|openreward))", re.M)
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen2-7B-Instruct",
    "Qwen/Qwen2-0.5B",
    "Qwen/Qwen2-0.5B-Instruct",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "EssentialAI/rnj-1-instruct",
)
VISION_MODELS = ("HuggingFaceTB/SmolVLM2-2.2B-Instruct",)
QWEN_VISION_MODELS = {"qwen2_5_vl": "Qwen/Qwen2.5-VL-3B-Instruct", "qwen3_vl": "Qwen/Qwen3-VL-4B-Instruct"}
SHAPES = ROOT / "groupax" / "recipes" / "shapes" / "model"
# Amounts of the scripts, made small: what is sampled in a step, and the rows of datasets made in the script.
SIZES = (
    (r"max_completion_length=\d+", "max_completion_length=256"),
    (r"max_completion_length = \d+", "max_completion_length = 256"),
    (r"range\((1000|3000)\)", "range(4)"),
    (r"dataset_size = 3000", "dataset_size = 4"),
    (r"n = 500\b", "n = 4"),
    (r'\["coding", "game"\] \* 500', '["coding", "game"] * 4'),
    (r"max_steps\s*=\s*\d+", "max_steps=2"),
    (r"gradient_accumulation_steps=\d{2,}", "gradient_accumulation_steps=8"),
    (r"save_steps=\d+", "save_steps=1"),
    (r"logging_steps=\d+", "logging_steps=1"),
    (r"warmup_steps=\d+", "warmup_steps=0"),
    (r"max_new_tokens=\d+", "max_new_tokens=16"),
)
# What needs a network or a GPU: uploads, logins, and lines about a GPU's memory.
ABSENT = (
    (r"push_to_hub\s*=\s*True", "push_to_hub=False"),
    (r"^(\s*)\w*\.push_to_hub\(.*\).*$", r"\1pass"),
    (r"^!.*$", ""),
)
ABSENT_CELLS = (
    "notebook_login",
    "torch.cuda.",
    "smolagents",
    "from vllm import",
    "push_to_hub(f",
    "agent.run",
    "llm.generate",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a script.

    Attributes:
        failure: The last line of what it wrote to stderr, or what is wrong with what it saved; None if nothing is.
        saved: The folder of the trained model, under the folder in which it ran.
        change: The largest change of a weight.
        output: What it wrote.
    """

    failure: str | None
    saved: str = ""
    change: float = 0.0
    output: str = field(default="", repr=False)


def with_import_changed(source: str, library: str = "groupax.compat.trl") -> str:
    """Returns a script that imports from another library what it imported from TRL."""
    return IMPORT.sub(rf"\1{library}", source)


def made_small(source: str) -> str:
    """Returns a script with small sizes, and without what needs a network or a GPU."""
    for pattern, replacement in (*SIZES, *ABSENT):
        source = re.sub(pattern, replacement, source, flags=re.M)
    return source


def without_parts(source: str) -> str:
    """Returns a script whose system's message is a text, since Qwen's template takes no parts."""
    return re.sub(r'\[\s*\{"type": "text", "text": (\w+)\},?\s*\]', r"\1", source)


def without_system_prompt(source: str) -> str:
    """Returns a script whose prompts have no system's message, which the model of the shapes recipe has not learned."""
    return re.sub(r'\{"role": "system", "content": SYSTEM_PROMPT\},\s*', "", source)


def mended_for_qwen3_vl(source: str) -> str:
    """Returns TRL's notebook of Qwen 3 VL with changes that it needs for TRL too.

    Its messages have places for images, which `datasets` 5 would store as JSON in parts with different keys; its
    rewards read messages; and its processor is loaded without the part for videos, which needs torchvision.
    """
    for old, new in (
        ('{"type": "image", "image": example["image"]}', '{"type": "image"}'),
        ("(pattern, content, re.DOTALL", '(pattern, content[0]["content"], re.DOTALL'),
        ("contents = completions", 'contents = [each[0]["content"] for each in completions]'),
    ):
        assert old in source, f"the notebook has no {old}"
        source = source.replace(old, new)
    load = "import functools, dev.trl_images\n_load = functools.partial(dev.trl_images.load_processor, 'qwen3_vl')\n"
    return load + re.sub(r"AutoProcessor\.from_pretrained\((\w+)[^)]*\)", r"_load(\1)", source)


def notebook_source(text: str) -> str:
    """Returns the code cells of a notebook as a script, without those that need a network or a GPU."""
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(cell for cell in cells if not any(each in cell for each in ABSENT_CELLS))


def make_world(folder: Path, turns: str, steps: int = 400) -> Path:
    """Makes a folder with the models and the datasets of the scripts; returns that of the model.

    Args:
        folder: The folder.
        turns: Name of what the model writes; "images" for the model of the shapes recipe, which is not trained, and a
            family of `QWEN_VISION_MODELS` for one with random weights.
        steps: Optimizer steps of its training.
    """
    model = folder / "tiny"
    if turns == "images":
        folder.mkdir(parents=True)
        model.symlink_to(SHAPES)
        trl_world.write_images(folder)
        trl_world.link(folder, SHAPES, VISION_MODELS)
        return model
    if turns in QWEN_VISION_MODELS:
        trl_world.write_images(folder)
        trl_images.make_model(turns, model)
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 1024
        (model / "config.json").write_text(json.dumps(config))
        trl_world.link(folder, model, [QWEN_VISION_MODELS[turns]])
        return model
    trl_world.make_model(model, TOKENIZER, trl_world.TURNS[turns], steps)
    trl_world.write_datasets(folder)
    trl_world.link(folder, model, MODELS)
    trl_world.make_reward_model(folder / "reward_model", TOKENIZER)
    (folder / "sergiopaniego").symlink_to(".")
    return model


def run_script(folder: Path, source: str, arguments: Sequence[str] = (), timeout_s: float = 600) -> Outcome:
    """Runs a script in a world, and looks at what it saved.

    Args:
        folder: Folder of `make_world`.
        source: The script.
        arguments: Its arguments.
        timeout_s: Seconds after which it is stopped.
    """
    before = set(folder.iterdir())
    (folder / "script.py").write_text(source)
    command = [sys.executable, "-W", "default", "script.py", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(f"still running after {timeout_s} s")
    output = done.stdout + done.stderr
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")]
        return Outcome(lines[-1] if lines else f"exit status {done.returncode}", output=output)
    made = [each for each in set(folder.iterdir()) - before if each.is_dir() and not each.is_symlink()]
    saved = [each for top in made for each in saved_models(top)]
    if not saved:
        return Outcome("it saved no model", output=output)
    return judged(folder, saved[0], output)


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment variables of a script in a world."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(trl_world.STAND_INS))),
    }


def judged(folder: Path, saved: Path, output: str) -> Outcome:
    """Returns the outcome of a script that saved a model."""
    where = str(saved.relative_to(folder))
    try:
        change = largest_change(saved, folder / "tiny")
    except Exception as error:  # noqa: BLE001  # whatever it is, it becomes a line of the table
        return Outcome(f"what it saved does not load: {error!r:.200}", where, output=output)
    if change > 0:
        return Outcome(None, where, change, output)
    fault = "runs; all rewards of a group were equal" if had_equal_rewards(saved) else "what it saved is not trained"
    return Outcome(fault, where, change, output)


def had_equal_rewards(saved: Path) -> bool:
    """Returns whether the log beside a saved model says that there was nothing to learn from."""
    files = [*saved.glob("trainer_state.json"), *saved.glob("checkpoint-*/trainer_state.json")]
    logged = [line for file in files for line in json.loads(file.read_text())["log_history"]]
    fractions = [line["frac_reward_zero_std"] for line in logged if "frac_reward_zero_std" in line]
    return bool(fractions) and min(fractions) == 1.0


def saved_models(folder: Path) -> list[Path]:
    """Returns the folders of models under that of a run: its own, then its checkpoints, the newest first."""
    names = ("adapter_model.safetensors", "model.safetensors")
    folders = {file.parent for name in names for file in folder.rglob(name)}
    return sorted(folders, key=lambda each: (len(each.parts), -_step_of(each)))


def largest_change(folder: Path, base: Path) -> float:
    """Returns the largest change of a weight from one model to another, both loaded with transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sees_images = hasattr(AutoConfig.from_pretrained(base), "vision_config")
    kind = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    if (folder / "adapter_config.json").is_file():
        after = PeftModel.from_pretrained(model, str(folder)).merge_and_unload().state_dict()
    else:
        after = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert before.keys() == after.keys(), "the saved model has the weights of the trained one"
    return max(float((after[name] - weight).abs().max()) for name, weight in before.items())


def _step_of(folder: Path) -> int:
    digits = re.findall(r"\d+", folder.name)
    return int(digits[-1]) if digits else 0
