"""Runs the Python snippets of TRL's pages about GRPO and RLOO, with what they leave out filled in.

    python dev/trl_snippets.py PAGE LIBRARY

runs those of a page in a folder of `trl_runs.make_world`, all in this process, and writes what became of each to
outcomes.json. A snippet that ends with a config is continued with a trainer, and one that ends with a trainer trains.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
CONFIGS = ("GRPOConfig", "RLOOConfig")
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
# Snippets that need images, a server or the network.
ABSENT = (
    "PIL",
    "image",
    "vllm_server",
    '"server"',
    "experimental",
    "vllm serve",
    "unsloth",
    "kernels-community",
    ">>>",
)
PRELUDE = """
import random
from datasets import Dataset
from {library} import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

dataset = train_dataset = Dataset.from_list(
    [{{"prompt": [{{"role": "user", "content": f"Count to {{n}}."}}], "ground_truth": "4"}} for n in range(4)]
)
eval_dataset = dataset
check_math_solution = test_code_solution = lambda prompt, completion: len(completion) % 2 == 0

def reward_func(completions, **kwargs):
    return [float(len(str(completion)) % 7) for completion in completions]

reward_func1 = reward_func2 = my_reward_func = format_reward = reward_func

async def async_reward_func1(completions, **kwargs):
    return reward_func(completions)

async def async_reward_func2(completions, **kwargs):
    return reward_func(completions)

def tool1(text: str) -> str:
    \"\"\"Repeats.

    Args:
        text: The text.
    \"\"\"
    return text

def tool2(text: str) -> str:
    \"\"\"Repeats, too.

    Args:
        text: The text.
    \"\"\"
    return text
"""


class Filled(ast.NodeTransformer):
    """The filling of what a snippet leaves out: the arguments that it needs, and small sizes."""

    def __init__(self, index: int) -> None:
        self.index = index

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Fills the arguments of a config or of a trainer."""
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        if name in CONFIGS:
            self._set(node, max_steps="1", output_dir=repr(f"run_{self.index}"), max_completion_length="48")
            self._set(node, learning_rate="1e-3", report_to="'none'", save_strategy="'no'", push_to_hub="False")
            self._default(node, per_device_train_batch_size="8", num_generations="4")
        if name in TRAINERS:
            has_environment = any(each.arg == "environment_factory" for each in node.keywords)
            self._default(node, model="'Qwen/Qwen3-0.6B'", args=f"{name.removesuffix('Trainer')}Config()")
            if not has_environment:
                self._default(node, reward_funcs="reward_func", train_dataset="dataset")
            for each in node.keywords:
                if each.arg == "args":
                    each.value = self.visit(each.value) if isinstance(each.value, ast.Call) else each.value
        return node

    def _set(self, node: ast.Call, **values: str) -> None:
        node.keywords = [each for each in node.keywords if each.arg not in values]
        self._default(node, **values)

    def _default(self, node: ast.Call, **values: str) -> None:
        known = {each.arg for each in node.keywords}
        if None in known:  # **mapping
            return
        positional = ["model", "reward_funcs", "args", "train_dataset"][: len(node.args)]
        node.keywords += [
            ast.keyword(name, ast.parse(value, mode="eval").body)
            for name, value in values.items()
            if name not in known and name not in positional
        ]


def snippets(page: str) -> Iterator[tuple[int, str]]:
    """Yields the number and the source of each snippet with a config or a trainer that can run here.

    The classes that earlier snippets define come before it.
    """
    definitions: list[str] = []
    for index, block in enumerate(BLOCK.findall(page), 1):
        source = _without_ellipses(inspect.cleandoc(block))
        names = "|".join((*CONFIGS, *TRAINERS))
        if any(each in block for each in ABSENT):
            continue
        if re.search(rf"\b({names})\(", block):
            yield index, "\n".join([*definitions, source])
        else:
            definitions += _definitions(source)


def _definitions(source: str) -> list[str]:
    """Returns the classes of a snippet with its imports; nothing if it is no Python."""
    try:
        nodes = ast.parse(source).body
    except SyntaxError:
        return []
    if not any(isinstance(node, ast.ClassDef) for node in nodes):
        return []
    return [ast.unparse(node) for node in nodes if isinstance(node, (ast.ClassDef, ast.Import, ast.ImportFrom))]


def _without_ellipses(source: str) -> str:
    """Returns a snippet without the arguments `...`, which are no Python after keyword arguments."""
    source = re.sub(r"^\s*\.\.\.(,\s*$|\s*$(?=\n\s*\)))", "", source, flags=re.M)
    source = re.sub(r"\(\s*\.\.\.,\s*", "(", source)
    return re.sub(r",\s*\.\.\.\s*,?\s*\)", ")", source)


def filled(source: str, index: int) -> str:
    """Returns a snippet with what it leaves out filled in."""
    return ast.unparse(ast.fix_missing_locations(Filled(index).visit(ast.parse(source))))


def run_snippet(index: int, source: str, library: str, space: dict[str, Any]) -> Path:
    """Runs a snippet, and trains what it ends with.

    Args:
        index: Its number.
        source: Its text.
        library: What it imports.
        space: The names of the snippets before it, and afterwards also its own.

    Returns:
        The folder of the trained model.
    """
    for name in [name for name, value in space.items() if type(value).__name__ in (*CONFIGS, *TRAINERS)]:
        del space[name]
    exec(compile(PRELUDE.format(library=library), f"prelude {index}", "exec"), space)
    exec(compile(filled(source, index), f"snippet {index}", "exec"), space)
    trainer = space.get("trainer")
    if trainer is None:
        [args] = [value for value in space.values() if type(value).__name__ in CONFIGS]
        kind = getattr(__import__(library, fromlist=["*"]), type(args).__name__.replace("Config", "Trainer"))
        trainer = kind("Qwen/Qwen3-0.6B", space["reward_func"], args=args, train_dataset=space["dataset"])
    if not trainer.state.log_history:
        trainer.train()
    folder = Path(f"saved_{index}")
    trainer.save_model(str(folder))
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    return folder


def run_page(folder: Path, text: str, path: str, library: str) -> dict[str, Any]:
    """Runs the snippets of a page in a world; returns what became of each, by its name."""
    from dev import trl_runs

    (folder / "page.md").write_text(text)
    done = subprocess.run(
        [sys.executable, __file__, "page.md", library],
        cwd=folder,
        env=trl_runs.environment(folder),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    outcomes = {}
    for line in (folder / "outcomes.json").read_text().splitlines():
        index, failure, saved = json.loads(line)
        name = f"`{Path(path).name}`, block {index}"
        if failure:
            outcomes[name] = trl_runs.Outcome(failure, output=done.stdout + done.stderr)
        else:
            outcomes[name] = trl_runs.judged(folder, folder / saved, "")
    return outcomes


def main(page: str, library: str) -> None:
    """Runs the snippets of a page in this process."""
    space: dict[str, Any] = {"__name__": "__main__"}
    with Path("outcomes.json").open("w") as file:
        for index, source in snippets(Path(page).read_text()):
            changed = re.sub(r"^(\s*from\s+)trl\b", rf"\1{library}", source, flags=re.M)
            failure, saved = None, ""
            try:
                saved = str(run_snippet(index, changed, library, space))
            except Exception as error:  # noqa: BLE001  # whatever it is, it becomes a line of the table
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            file.write(json.dumps([index, failure, saved]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
