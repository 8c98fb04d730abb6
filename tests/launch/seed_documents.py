"""The code blocks of the documents in shared/seeds, and what has to be replaced so that they run here.

Replaced are imports, ids of models and datasets, numbers of steps and, where the demo would take minutes, lengths; and
what a document leaves open ("# ... other parameters") is filled in. Everything else runs as it is written.
"""

import ast
import re
import textwrap
from dataclasses import dataclass, field

FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\{(\w+)\}")
CELL = re.compile(r"^In \[(?:\d+|None)\]:\n", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block of a document: its number there, its language ("cell" in a notebook), its text."""

    number: int
    language: str
    text: str


@dataclass(frozen=True)
class Run:
    """A block that runs, with its own replacements.

    Attributes:
        replace: new texts by old ones; names in braces stand for what the test makes.
        by: the test that runs it by itself; without it the document's blocks run together, in one namespace.
    """

    replace: dict = field(default_factory=dict)
    by: str | None = None


@dataclass(frozen=True)
class Not:
    """A block that does not run, and why."""

    reason: str


def blocks_of(text):
    """The blocks of a document. A notebook has its cells, whose code is the longest beginning that is Python."""
    if not CELL.search(text):
        return [Block(n, m[1], textwrap.dedent(m[2])) for n, m in enumerate(FENCE.finditer(text))]
    parts = CELL.split(text)
    cells = [Block(n, "cell", _code(part)) for n, part in enumerate(parts[1:])]
    fences = [m for part in parts for m in FENCE.finditer(part)]
    return cells + [Block(len(cells) + n, m[1], textwrap.dedent(m[2])) for n, m in enumerate(fences)]


def _code(text):
    lines = text.splitlines()
    if lines[0].startswith("!"):
        return lines[0]
    for end in range(len(lines), 0, -1):
        code = "\n".join(lines[:end])
        try:
            ast.parse(re.sub(r"^!", "# !", code, flags=re.MULTILINE))
        except SyntaxError:
            continue
        return code + "\n"
    return text


IMPORTS = {
    "import easydel as ed": "import groupax.compat.easydel as ed",
    "from easydel.trainers import": "from groupax.compat.easydel import",
    "from trl import": "from groupax.compat.trl import",
    "from peft import": "from groupax.compat.hf import",
    "from transformers import BitsAndBytesConfig": "from groupax.compat.hf import BitsAndBytesConfig",
    "from transformers import AutoModelForCausalLM, AutoTokenizer": (
        "from groupax.compat.hf import AutoModelForCausalLM\nfrom transformers import AutoTokenizer"
    ),
    "from transformers import AutoModelForCausalLM\n": "from groupax.compat.hf import AutoModelForCausalLM\n",
    "from bitsandbytes import Int8Params\n": "",
}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
MODELS = (LLAMA, "your_model_name", "meta-llama/Meta-Llama-3.1-8B-Instruct", "cohereLabs/aya-expanse-8b")
MODELS += ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-72B")
# By name, in double quotes; the folders are made by the test.
IDS = {
    **dict.fromkeys(MODELS, "model"),
    **dict.fromkeys(("your_dataset_name", "trl-lib/tldr"), "prompts"),
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k_raw",
    "AI-MO/NuminaMath-TIR": "numina",
    "lordChipotle/Llama3GRPOReasoning": "repo",
}
TRL_STEPS = {"logging_steps=10)": "logging_steps=10, max_steps=2, max_completion_length=64)"}
SHELL = "sets up a machine, with a network"
TUTORIAL = {
    # given twice, which Python refuses
    "        eval_dataset=test_dataset,\n        train_dataset=train_dataset,\n        arguments=grpo_config,\n": "",
    "max_prompt_length = 2048": "max_prompt_length = 512",
    "max_completion_length = 2048": "max_completion_length = 64",
    "num_train_epochs=3": "num_train_epochs=1",
    # started on each host instead of through Ray
    "import ray # For distributed computing\n": "",
    "from eformer.executor.ray import TpuAcceleratorConfig, execute": "",
    "ray.init()\n": "",
    'TpuAcceleratorConfig(\n    "v4-64"': 'dict(\n    name="v4-64"',
    "@execute(tpu_config)\n@ray.remote\n": "",
    "/dev/shm": "{shm}",
}
LAUNCH = {"accelerate launch": "python"}
RECIPE = "another program's command; `groupax train --recipe` is ours"
# By document and block.
TABLE = {
    "000": {0: Run({"    # ... other GRPO parameters\n": "    total_batch_size=4, num_train_epochs=1,\n"})},
    "001": {
        0: Run(),
        1: Run({"train[:10%]": "train[:50%]", "num_train_epochs=3": "num_train_epochs=1"}),
        2: Not(RECIPE),
        3: Not(RECIPE),
        4: Run(by="test_rows_and_variables"),
        5: Run(
            {
                "    # Other parameters...\n": (
                    "    arguments=config, vinference=inference, model=model, train_dataset=dataset,\n"
                    "    processing_class=tokenizer,\n"
                )
            }
        ),
        6: Run(),
    },
    "002": {
        0: Not(SHELL),
        1: Run(by="test_rows_and_variables"),
        2: Run(TUTORIAL, by="test_the_tutorial_runs"),
        3: Run(by="test_the_tutorial_runs"),
    },
    "003": {
        0: Run(TRL_STEPS),
        **{block: Run() for block in (1, 2, 4, *range(9, 14), *range(17, 21))},
        3: Run(TRL_STEPS),
        5: Run(LAUNCH, by="test_the_command_starts_the_script"),
        6: Not("a job of SLURM with other programs' commands; `groupax launch slurm` writes ours"),
        7: Not("another program's server; `groupax serve` is ours"),
        8: Run({"logging_steps=10,": "logging_steps=10, max_steps=2, max_completion_length=64,"}),
        14: Run(
            {
                "from trl import GRPOTrainer": "from groupax.compat.trl import GRPOConfig, GRPOTrainer",
                "# Math-specific reward function\n": (
                    "def check_math_solution(prompt, completion): return '4' in completion\n"
                    "def test_code_solution(prompt, completion): return 'def' in completion\n"
                ),
                "    train_dataset=dataset,\n)": (
                    "    train_dataset=dataset,\n    args=GRPOConfig('m', max_steps=2, max_completion_length=64),\n)"
                ),
            }
        ),
        15: Run(TRL_STEPS),
        16: Run(LAUNCH, by="test_the_command_starts_the_script"),
    },
    "004": {
        0: Not(SHELL),
        1: Not(SHELL),
        **{cell: Run() for cell in (*range(2, 24), 25, *range(27, 35))},
        21: Run({"range(3000)": "range(16)"}),
        24: Not("downloads to the browser, from Colab"),
        26: Run({"huggingface-cli login": "hf auth login --token right"}),  # which asks for it
        35: Not("TRL's own source, quoted"),
        36: Not("a line of TRL's own source, quoted"),
        37: Not("printed tensors"),
        38: Not("printed tensors"),
    },
}


def code_of(document, block, world):
    """The text of a block as it runs, or None."""
    how = TABLE[document][block.number]
    if isinstance(how, Not):
        return None
    return replaced(block.text, how.replace, world)


def replaced(text, own, world):
    """A block's text with imports, ids, and its own replacements, each of which has to occur.

    Args:
        text: of the block.
        own: new texts by old ones.
        world: what names in braces stand for, such as folders.
    """
    for old, new in own.items():
        assert old in text, f"{old!r} is not in the block"
        text = text.replace(old, NAME.sub(lambda name: str(world[name[1]]), new))
    for old, new in IMPORTS.items():
        text = text.replace(old, new)
    for old, kind in IDS.items():
        text = text.replace(f'"{old}"', f'"{world[kind]}"')
    return text
