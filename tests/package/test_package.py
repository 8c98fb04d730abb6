"""What the package promises as a whole: quick imports, layers that point one way, a command line that helps."""

import ast
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

import groupax
from groupax.cli.bisect import Bisect
from groupax.cli.evaluate import Compare, Eval
from groupax.cli.generate import Generate
from groupax.cli.init import Init
from groupax.cli.launch import Local
from groupax.cli.main import main
from groupax.cli.models import Checkpoints, Convert, Inspect, Merge, Push, Quantize, Report
from groupax.cli.plan import PlanCommand
from groupax.cli.replay import Replay
from groupax.cli.serve import Serve
from groupax.cli.train import SFT, Train, train_defaults
from groupax.cli.view import View
from groupax.core.errors import EXTRAS
from groupax.core.settings.command_line import Positional, all_options, parsed
from groupax.recipes import load_recipe
from groupax.recipes.arithmetic.problems import generate, solve
from groupax.satellites.launch.slurm import Slurm

PACKAGE = Path(__file__).parents[2] / "groupax"

# A room imports from those above it only.
ROOMS = [
    ["core"],
    ["events", "parallel"],
    ["objective", "data"],
    ["models", "tools"],
    ["engine"],
    ["serve", "rewards", "training"],
    ["recipes", "episodes"],
    ["rollouts"],
    ["evaluation"],
    ["runs"],
    ["trainer", "sft"],
    ["satellites"],
    ["__init__"],
    ["cli"],
    ["compat"],
    ["__main__"],
]
WITHOUT_JAX = [
    "groupax",
    "groupax.core.config",
    "groupax.core.schedule",
    "groupax.data.bridge",
    "groupax.data.chat",
    "groupax.tools.formats",
    "groupax.tools.runner",
    "groupax.satellites.environments.mcp_tools",
    "groupax.satellites.environments.openenv",
    "groupax.satellites.environments.program",
    "groupax.satellites.environments.python_tool",
    "groupax.data.files",
    "groupax.core.settings.fields",
    "groupax.rewards.runner",
    "groupax.engine.constraints",
    "groupax.engine.plan",
    "groupax.engine.scheduler",
    "groupax.serve.requests",
    "groupax.serve.exchange",
    "groupax.serve.remote",
    "groupax.training.shapes",
    "groupax.parallel.preemption",
    "groupax.runs.progress.named",
    "groupax.events",
    "groupax.core.storage.buckets",
    "groupax.runs.files",
    "groupax.rollouts.state",
    "groupax.runs.folder",
    "groupax.runs.trackers.sink",
    "groupax.runs.rollout_log",
    "groupax.runs.report",
    "groupax.evaluation.items",
    "groupax.satellites.launch.local",
    "groupax.satellites.launch.slurm",
    "groupax.parallel.accelerators",
    "groupax.satellites.view.server",
    "groupax.recipes.gsm8k",
    "groupax.runs.checkpoints.store",
    "groupax.cli.main",
]


# Lines of Python by room. A room that must grow gets its number raised in the same commit, with the reason in
# dev/LOG.md; one that has shrunk gets it lowered.
LINES = {
    "__init__": 90,
    "__main__": 10,
    "cli": 2580,
    "compat": 3770,
    "core": 3460,
    "data": 3520,
    "engine": 4300,
    "episodes": 3230,
    "evaluation": 630,
    "events": 210,
    "models": 10300,
    "objective": 950,
    "parallel": 1970,
    "recipes": 1120,
    "rewards": 3520,
    "rollouts": 980,
    "runs": 5930,
    "satellites": 7490,
    "serve": 4220,
    "sft": 320,
    "tools": 1240,
    "trainer": 424,
    "training": 2070,
}
TEST_LINES = 31908
FILES = 329
MODULES = 191  # that groupax.trainer imports, also inside of functions


def imports_of(path):
    """The groupax modules that a file imports, those for type checkers and those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "groupax")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "groupax":
            for alias in node.names:
                name = f"{node.module}.{alias.name}".replace(".", "/")
                is_module = any((PACKAGE.parent / f"{name}{end}").exists() for end in (".py", "/__init__.py"))
                yield f"{node.module}.{alias.name}" if is_module else node.module


def modules():
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


def room_of(module):
    return [*module.split("."), "__init__"][1]


def test_a_room_imports_from_those_above_it_only():
    level = {room: index for index, rooms in enumerate(ROOMS) for room in rooms}
    for module, path in modules().items():
        room = room_of(module)
        assert room in level, f"groupax/{room} is not in ROOMS"
        for imported in map(room_of, imports_of(path)):
            is_above = imported == room or level[imported] < level[room]
            assert is_above, f"{module} imports from {imported}, which is not above {room}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: set(imports_of(path)) - {module} for module, path in modules().items()}
    while True:
        imported = set().union(*graph.values())
        ends = [module for module in graph if module not in imported or not graph[module] & graph.keys()]
        if not ends:
            break
        for module in ends:
            del graph[module]
    assert not graph, f"these import each other: {', '.join(sorted(graph))}"


def test_no_room_names_a_private_attribute_of_another():
    """Satellites such as compat and replay extend trainers by their public parts and hooks alone."""
    used, defined, classes = {}, {}, {}
    for module, path in modules().items():
        own_used, own_defined = used.setdefault(module, set()), defined.setdefault(room_of(module), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                (own_defined if isinstance(node.ctx, ast.Store) else own_used).add(node.attr)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("groupax"):
                if room_of(node.module) != room_of(module):
                    own_used |= {each.name for each in node.names if is_private(each.name)}
            elif isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                private = {name for each in node.body if is_private(name := getattr(each, "name", ""))}
                classes.setdefault(node.name, []).append((room_of(module), bases, private))
                targets = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                own_defined |= private | {each.id for each in targets if isinstance(each, ast.Name)}
            elif isinstance(node, ast.FunctionDef) and is_private(node.name):
                own_defined.add(node.name)
    everywhere = set().union(*defined.values())
    for module, names in used.items():
        foreign = (names & everywhere) - defined[room_of(module)]
        assert not foreign, f"{module} names {', '.join(sorted(foreign))}, which another room keeps to itself"
    for name, found in classes.items():
        for room, base, private in ((each[0], base, each[2]) for each in found for base in each[1]):
            for other, _, theirs in classes.get(base, []):
                shared = private & theirs
                assert other == room or not shared, f"{name} overrides {', '.join(shared)} of {base} in another room"


def is_private(name):
    of_named_tuples = ("_fields", "_replace", "_asdict", "_make")
    return name.startswith("_") and not name.startswith("__") and name not in ("_", *of_named_tuples)


def test_imports_without_jax():
    code = "import importlib, sys\n"
    code += f"for name in {sorted(WITHOUT_JAX)}:\n    importlib.import_module(name)\n"
    code += "    assert not {'jax', 'transformers', 'datasets'} & set(sys.modules), name"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_trainer_imports_only_what_it_needs():
    code = "import sys, groupax; groupax.GRPOTrainer; print(*(name for name in sys.modules if 'groupax.' in name))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    rooms = set(map(room_of, loaded))
    assert "trainer" in rooms
    assert not {"serve", "satellites", "cli", "compat", "recipes"} & rooms


def test_no_room_is_heavier_than_its_budget():
    lines = Counter()
    for module, path in modules().items():
        lines[room_of(module)] += path.read_text().count("\n")
    heavier = {room: number for room, number in lines.items() if number > LINES[room]}
    assert not heavier, "lines above LINES of this file"
    assert len(modules()) <= FILES
    assert sum(path.read_text().count("\n") for path in Path(__file__).parents[1].rglob("*.py")) <= TEST_LINES


def test_the_trainer_reaches_few_modules():
    graph, reached, ahead = modules(), set(), ["groupax.trainer"]
    while ahead:
        if (module := ahead.pop()) not in reached:
            reached.add(module)
            ahead += imports_of(graph[module])
    assert len(reached) <= MODULES


def test_public_names_exist():
    assert set(dir(groupax)) == {*groupax.__all__, "__version__"}
    assert all(getattr(groupax, name) is not None for name in groupax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainr'"):
        groupax.GRPOTrainr


# -- the command line


def test_flags_come_after_the_file_and_the_file_after_the_recipe(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: arithmetic\nlearning_rate: 0.5\nbeta: 0.1\nreward_weights: [1, 2]\n")
    (earlier := tmp_path / "earlier.yaml").write_text("recipe: numinamath\nlearning_rate: 0.1\n")
    defaults = train_defaults(["--config", str(earlier), "--config", str(file)])
    assert defaults.recipe == "arithmetic"
    assert defaults.args.learning_rate == 0.5
    assert defaults.args.reward_weights == (1, 2)
    assert defaults.args.max_completion_length == load_recipe("arithmetic").config["max_completion_length"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "did you mean train"),
        (["frobnicate"], "there are train, init, sft, eval, "),
        (["train"], "--model is missing"),
        (["eval", "--model", "m", "--logit_bias", "5", "1", "7"], "--logit_bias: 7 has no value"),
        (["train", "--recipe", "arithmetik"], "did you mean arithmetic"),
        (["train", "--recipe", "arithmetic", "--num_generations", "1"], "at least 2 completions"),
        (["train", "--model", "nowhere", "--dataset", "x.jsonl", "--reward_funcs", "f"], "no file x.jsonl"),
        (["eval", "--recipe", "gsm8k", "--n", "2"], "at --temperature 0 all completions of a prompt are the same"),
        (["eval", "--dataset", "x.jsonl"], "--model is missing"),
        (["eval", "--model", "m", "--reward_funcs", "xml_count"], "--dataset is missing"),
        (["eval", "--recipe", "gsm8k", "--dataset", "a=x.jsonl", "a=y.jsonl"], "two evaluation sets have the name 'a'"),
        (["eval", "--config", "x.yaml"], "there is no --config here: give what it has of --model, --dataset"),
        (["compare", "nowhere", "nothing"], "nowhere is missing"),
    ],
)
def test_mistakes_are_told_in_one_line(argv, message, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


DRY = ["train", "--recipe", "arithmetic", "--dry_run", "--progress_bar", "none", "--output_dir", "{tmp}/run"]
ROWS = ["--dataset", "{tmp}/rows.jsonl"]
BROKEN = ["--reward_weights", "1", "--correctness_reward", "broken", "--reward_funcs", "mine:broken"]
BROKEN += ["--reward_errors", "raise"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model", "{tmp}/cut"], "model.safetensors"),
        (["--model", "{tmp}"], "is not a model"),
        (["--mesh", "1,1,1,3,1"], "mesh"),
        (["--lora_r", "8", "--lora_target_modules", "q_prj"], "q_prj"),
        (["--max_completion_length", "100000"], "max_completion_length"),
        (["--regex", "(a"], "regex"),
        (["--output_dir", "{tmp}/rows.jsonl"], "rows.jsonl"),
        (["--reward_weights", "1"], "reward_weights has 1 entries for 2 reward functions"),
        ([*ROWS, "--reward_funcs", "nowhere:f"], "no module 'nowhere'"),
        ([*ROWS, *BROKEN], "the reward function 'broken' failed in step 1"),
        (["--attn_implementation", "fused"], "attn_implementation is 'fused', but there is no fused attention"),
        (["--resume", "{tmp}/nothing"], "there is no such checkpoint"),
        (["--decoding_tp", "3"], "needs a multiple of 3 devices"),
        (["--dataset", "{tmp}/columns.jsonl"], "it needs the columns prompt and answer, it has text"),
    ],
)
def test_a_dry_run_finds_each_mistake_and_writes_nothing(changes, message, tmp_path, capsys, monkeypatch):
    shutil.copytree(load_recipe("arithmetic").model, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def broken(completions, **_):\n    return 1 / 0\n")
    (tmp_path / "columns.jsonl").write_text('{"text": "1+1="}\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = sorted(tmp_path.rglob("*"))
    assert main([each.format(tmp=tmp_path) for each in (*DRY, *changes)]) in (1, 2)
    first, *more = capsys.readouterr().err.splitlines()
    assert message in first
    assert bool(more) == ("broken" in message)  # its traceback
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_shows_a_prompt_the_rewards_and_the_memory(tmp_path, capsys):
    assert main([each.format(tmp=tmp_path) for each in (*DRY, "--lora_r", "8", "--mesh", "1,-1,1,1,1")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("of which 78,848 are trained", "think_answer_correct 0.0", "<bos>(54-47)*9=", "GB of each of"):
        assert text in out
    assert not list(tmp_path.iterdir())


NEED = {
    "serve": ["serve", "--model", "nowhere"],
    "view": ["view", "{tmp}"],
    "math": ["eval", "--model", "nowhere", "--dataset", "{tmp}/rows.jsonl", "--reward_funcs", "math_accuracy"],
    "s3": ["resume", "s3://bucket/run"],
    "gcs": ["resume", "gs://bucket/run"],
}


@pytest.mark.parametrize(("extra", "module"), [(extra, module) for extra in NEED for module in EXTRAS[extra]])
def test_a_missing_package_is_told_in_one_line_before_the_model_is_looked_for(
    extra, module, capsys, monkeypatch, tmp_path
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    monkeypatch.setitem(sys.modules, module, None)
    assert main([each.replace("{tmp}", str(tmp_path)) for each in NEED[extra]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"pip install 'groupax[{extra}]'" in lines[0]
    assert module in lines[0]


def test_the_extras_are_those_of_the_package():
    names = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert names.keys() - {"cuda13", "cuda12", "tpu", "test", "docs", "lint", "parity"} == EXTRAS.keys()
    assert {name: len(names[name]) for name in EXTRAS} == {name: len(modules) for name, modules in EXTRAS.items()}


def test_a_reader_that_ends_early_leaves_no_traceback():
    command = f"{sys.executable} -m groupax train --help all | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("merge", "ADAPTER DESTINATION"),
        ("checkpoints", "RUN_DIR [ACTION] [STEP]"),
        ("view", "RUN_DIRS ..."),
        ("resume RUN_DIR", ""),
    ],
)
def test_usage_names_what_belongs_where(command, usage, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command.split()[0], "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: groupax {command} [options] {usage}".strip() + "\n")
    assert not usage or f"\nArguments\n  {usage.split()[0]} " in out
    assert main(["--help"]) == main(["--version"]) == 0
    assert f"\n  {command.split()[0]} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --betta 3", "there is no flag --betta; did you mean --beta or --delta?"),
        ("train --modl=m x --foo", "there is no flag --modl; did you mean --model? there is no flag --foo"),
        ("train --max_steps 3 4 -x", "unexpected arguments: 4 -x"),
        ("sft --recipe arithmetic", "there is no flag --recipe"),
        ("eval --max-token 3", "there is no flag --max-token; did you mean --max_tokens or --max_turn_tokens?"),
        ("replay RUN --stap 1", "there is no flag --stap; did you mean --step or --stage?"),
        ("merge A B C", "unexpected arguments: C"),
        ("init run.yaml --modle x", "there is no flag --modle; did you mean --model?"),
        ("launch slurm --tyme 1 -- train", "there is no flag --tyme; did you mean --time?"),
    ],
)
def test_unknown_flags_name_the_nearest(command, message, capsys):
    assert main(command.split()) == 2
    shown = " ".join(command.split()[: 1 + command.startswith("launch")])
    end = f" (groupax {shown} --help all lists them)\n"
    assert capsys.readouterr().err == f"groupax {command.split()[0]}: {message}{end}"


KINDS = [Train, Init, SFT, Eval, Generate, Serve, Replay, Bisect, Checkpoints, View, PlanCommand, Local, Slurm]
KINDS += [Compare, Report, Inspect, Merge, Convert, Quantize, Push]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_help_describes_every_option(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parsed(kind, "it", ["--help", "all"])
    out = capsys.readouterr().out
    for option in all_options(kind() if kind in (Train, Init, SFT, PlanCommand) else kind):
        assert len(option.text) > 10, option.name
        assert option.is_positional or re.search(rf"^  --{option.name}\b", out, re.MULTILINE), option.name


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 1.0
    stop: Sequence[str] = ()
    bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Command:
    place: Positional[Path]
    more: Positional[tuple[int, ...]]
    count: Annotated[int, "-n"] = 1
    switch: bool = True
    maybe: bool | None = None
    kind: Literal["a", "b"] | Callable[..., float] | None = None
    ends: bool | tuple[Literal["x", "y"], ...] = False
    sizes: tuple[int, int] | None = None
    names: tuple[str, ...] | None = ("d",)
    with_: tuple[str, ...] = ()
    options: dict[str, float] = field(default_factory=dict)
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["p", "1", "2"], {"place": Path("p"), "more": (1, 2), "inner": Inner()}),
        (
            ["positional", "-n", "-3", "--no-switch", "--maybe"],
            {"more": (), "count": -3, "switch": False, "maybe": True},
        ),
        (["--maybe", "False", "p", "--kind=m:f"], {"place": Path("p"), "maybe": False, "kind": "m:f"}),
        (["p", "--maybe", "None", "--kind", "a"], {"maybe": None, "kind": "a"}),
        (["--maybe", "p", "--ends"], {"maybe": True, "ends": True}),
        (["p", "--no_maybe", "--ends"], {"maybe": False, "ends": True}),
        (["p", "--ends", "x", "y", "--with", "a=1"], {"ends": ("x", "y"), "with_": ("a=1",)}),
        (["p", "--sizes", "1", "2", "--names"], {"sizes": (1, 2), "names": ()}),
        (["p", "--names", "None", "--options", '{"a": 1}'], {"names": None, "options": {"a": 1}}),
        (["p", "--bias", "5", "-1e2", "6", "1"], {"inner": Inner(bias={5: -100.0, 6: 1.0})}),
        ([], "PLACE is missing; give it: usage: groupax it [options] PLACE MORE ..."),
        (["p", "x"], "MORE ... must be a list with each a whole number, got ('x',)"),
        (["p", "--count"], "--count needs a value"),
        (["p", "--count", "1.5"], "--count must be a whole number, got '1.5'"),
        (["--switch", "no", "p"], "no value: write --switch to switch it on, --no_switch to switch it off"),
        (["p", "--kind", "c"], "--kind must be one of a, b or a function, also by reference as 'module:function' or"),
        (["p", "--ends", "z"], "--ends must be true or false or a list with each one of x, y, got ('z',)"),
        (["p", "--sizes", "1"], "--sizes must be a list of 2 with each a whole number or None, got (1,)"),
        (["p", "--options", "[]"], "--options: [] is not a JSON object; write one"),
        (["p", "--rat", "1"], "there is no flag --rat; did you mean --rate?"),
    ],
)
def test_options_are_read_by_their_types(arguments, values):
    if isinstance(values, str):
        with pytest.raises(ValueError, match=re.escape(values)):
            parsed(Command, "it", arguments)
        return
    found = parsed(Command, "it", arguments)
    assert found == dataclasses.replace(found, **values)
    again = parsed(Command, "it", ["q"], default=found)
    assert again == dataclasses.replace(found, place=Path("q"))


def test_unknown_keys_of_a_file_name_the_nearest(tmp_path, capsys):
    for text, message in (
        ("learning_rte: 1\n", "unknown key 'learning_rte'; did you mean learning_rate"),
        ("- 1\n", "must contain settings"),
    ):
        (tmp_path / "run.yaml").write_text(text)
        assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.optimized
@pytest.mark.heavy
def test_the_arithmetic_recipe_runs_and_reports(tmp_path, capsys):
    argv = ["train", "--recipe", "arithmetic", "--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    assert main([*argv, "--prompts_per_step", "4", "--progress_bar", "rich"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0.2 < result["pass_at_1_before"] < 0.5
    found = result["sets"]["eval"]
    assert found["before"]["pass@1"]["value"] == result["pass_at_1_before"]
    assert found["comparison"]["differences"]["pass@1"]["test"] == "mcnemar, exact"
    assert found["prompts"] == {"used": 500, "dropped": 0, "truncated": 0, "unscorable": 0}
    assert result["steps"] == 2
    assert "held-out prompts became right" in result["verdicts"]["eval"]
    out = capsys.readouterr().out
    assert "before and after, 500 held-out prompts" in out
    assert "training: 4,096 prompts; too long: 0 dropped, 0 cut" in out
    before, after = (str(tmp_path / "run" / "evaluations" / f"{when}.eval.jsonl") for when in ("before", "after"))
    assert main(["compare", before, after, "--to", str(tmp_path / "compared.json")]) == 0
    compared = json.loads((tmp_path / "compared.json").read_text())["after.eval"]
    assert compared == found["comparison"]
    assert "mean reward by step" in out


# -- the embedded problems


def test_problems_are_deterministic_right_and_held_out():
    train, held_out = generate(500, seed=0), generate(500, seed=0, split="held_out")
    assert generate(100, seed=0) == train[:100]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train:
        assert int(row["answer"]) == eval(row["prompt"].rstrip("="))
    assert solve("2+3*4") == "14"
