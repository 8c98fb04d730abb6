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
    "from eformer.executor.ray import": "from groupax.launch.ray_functions import",
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
# By name, in double quotes; the folders are made by the test.
IDS = {
    name: kind
    for kind, names in {
        "model": (
            "your_model_name",
            LLAMA,
            "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "cohereLabs/aya-expanse-8b",
            "Qwen/Qwen2-0.5B-Instruct",
            "Qwen/Qwen2.5-72B",
        ),
        "prompts": ("your_dataset_name", "trl-lib/tldr"),
        "gsm8k": ("gsm8k",),
        "gsm8k_raw": ("openai/gsm8k",),
        "numina": ("AI-MO/NuminaMath-TIR",),
        "repo": ("lordChipotle/Llama3GRPOReasoning",),
    }.items()
    for name in names
}
TRL_STEPS = {"logging_steps=10)": "logging_steps=10, max_steps=2, max_completion_length=64)"}
SHELL = "sets up a machine, with a network"
TUTORIAL = {
    # given twice, which Python refuses
    "        eval_dataset=test_dataset,\n        train_dataset=train_dataset,\n        arguments=grpo_config,\n": "",
    "max_prompt_length = 2048": "max_prompt_length = 512",
    "max_completion_length = 2048": "max_completion_length = 64",
    "num_train_epochs=3": "num_train_epochs=1",
    '"v4-64"': '"v4-8"',
    '["math_verify"]': "[]",  # needs a network
    "/dev/shm": "{shm}",
}
PROGRAM = {
    "easydel.scripts": "groupax.compat.easydel.scripts",
    "--max_completion_length 1024": "--max_completion_length 64",
}
LAUNCH = {"accelerate launch": "python"}
# All devices decode without being told; TRL's server listens on all addresses.
SERVE = {
    "trl vllm-serve --model Qwen/Qwen2.5-72B --tensor_parallel_size 8": (
        "groupax serve --model {model} --dtype bfloat16 --host 0.0.0.0 --port {port}"
    ),
}
# Two nodes train in place of four. A slice in quotes is several words, of which srun would take the second for the
# program; accelerate's options say what SLURM's variables say; block 8, which is started here, has another name for the
# server's address.
JOB = {
    **SERVE,
    "--nodes=5": "--nodes=3",
    "NODELIST[4]": "NODELIST[2]",
    '--nodelist="${NODELIST[@]:0:4}"': '--nodelist="${NODELIST[0]},${NODELIST[1]}"',
    "NODELIST[@]:0:4": "NODELIST[@]:0:2",
    "--nodes=4 --ntasks=4": "--nodes=2 --ntasks=2",
    """accelerate launch \\
     --config_file examples/accelerate_configs/deepspeed_zero3.yaml \\
     --num_processes 32 \\
     --num_machines 4 \\
     --main_process_ip ${NODELIST[0]} \\
     --machine_rank $SLURM_PROCID \\
     --rdzv_backend c10d \\
     train_grpo.py""": "python train_grpo.py",
    "--server_ip": "--vllm_server_host",
}
# By document and block.
TABLE = {
    "000": {0: Run({"    # ... other GRPO parameters\n": "    total_batch_size=4, num_train_epochs=1,\n"})},
    "001": {
        0: Run(),
        1: Run({"train[:10%]": "train[:50%]", "num_train_epochs=3": "num_train_epochs=1"}),
        2: Run({**PROGRAM, LLAMA: "{model} --dataset {gsm8k_raw}"}, by="test_the_programs_run"),
        3: Run(
            {**PROGRAM, LLAMA: "{model} --dataset {numina}", "--total_batch_size 16": "--total_batch_size 2"},
            by="test_the_programs_run",
        ),
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
        2: Run(TUTORIAL, by="test_the_tutorial_runs_on_ray"),
        3: Run(by="test_the_tutorial_runs_on_ray"),
    },
    "003": {
        0: Run(TRL_STEPS),
        1: Run(),
        2: Run(),
        3: Run(TRL_STEPS),
        4: Run(),
        5: Run(LAUNCH, by="test_the_command_starts_the_script"),
        6: Run(JOB, by="test_the_job_trains_beside_its_server"),
        7: Run(SERVE, by="test_the_server_of_the_job"),
        8: Run({"logging_steps=10,": "logging_steps=10, max_steps=2, max_completion_length=64,"}),
        9: Run(),
        10: Run(),
        11: Run(),
        12: Run(),
        13: Run(),
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
        17: Run(),
        18: Run(),
        19: Run(),
        20: Run(),
    },
    "004": {
        0: Not(SHELL),
        1: Not(SHELL),
        **{cell: Run() for cell in range(2, 10)},
        10: Run(),
        **{cell: Run() for cell in range(11, 24)},
        21: Run({"range(3000)": "range(16)"}),
        24: Not("downloads to the browser, from Colab"),
        25: Run(),
        26: Run({"huggingface-cli login": "hf auth login --token right"}),  # which asks for it
        **{cell: Run() for cell in range(27, 35)},
        35: Not("TRL's own source, quoted"),
        36: Not("a line of TRL's own source, quoted"),
        37: Not("printed tensors"),
        38: Not("printed tensors"),
    },
}
# Block 8 of document 003 as the job starts it, beside a server that is not at TRL's port.
WITH_SERVER = {"use_vllm=True,": "use_vllm=True, vllm_server_port={port},"}


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
