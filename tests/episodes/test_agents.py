"""The recipe of an agent, and the options of commands for tools and environments."""

import json

import pytest

from groupax.cli.main import main
from groupax.episodes.rules import load_environments, load_tools
from groupax.evaluation.items import read_items
from groupax.recipes.agents import calculator

CALCULATOR = "groupax.recipes.agents.calculator:calculator"
SHOP = "tests.view.test_view_episodes:Shop"
SMALL = ["--prompts_per_step", "2", "--num_generations", "2", "--max_steps", "1", "--progress_bar", "none"]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- the recipe's tool


def test_the_calculator_calculates_and_refuses_what_is_no_arithmetic():
    for expression, value in (("348*27+95", 9491), ("(826+592)*44", 62392), ("-3-(4-5)", -2), (" 7 ", 7)):
        assert calculator.calculator(expression) == value
    for expression in ("", "2**9999", "7/2", "a+1", "1.5*2", "True+1", "print(1)", "1+" * 150 + "1", "("):
        with pytest.raises(ValueError, match="expression"):
            calculator.evaluate(expression)


# -- references


def test_a_reference_with_options_is_called():
    [python] = load_tools(["python_tool(sandbox='none')"])
    assert python.name == "python"
    [made] = load_tools(["tests.episodes.test_agents:adder(amount=3)"])
    assert made(4) == 7
    assert [each(1) for each in load_tools(["tests.episodes.test_agents:adders()"])] == [2, 3]


def adder(amount):
    return lambda number: number + amount


def adders():
    return [adder(1), adder(2)]


@pytest.mark.parametrize(
    ("load", "references", "message"),
    [
        (load_tools, ["calculator"], "must be written as 'module:name'"),
        (load_tools, ["tests.episodes.test_agents:adder(amount=three)"], "numbers or quoted texts"),
        (load_environments, ["openev(url='ws://127.0.0.1:1')"], "did you mean openenv"),
        (load_environments, [SHOP, f"shop={SHOP}"], "different names"),
    ],
)
def test_wrong_references_are_explained(load, references, message):
    with pytest.raises(ValueError, match=message):
        load(references)


# -- the commands


@pytest.mark.drawn(4, "episodes")
@pytest.mark.heavy
def test_the_calculator_is_trained_evaluated_and_generated_with(tmp_path, capsys):
    run, evaluation = tmp_path / "run", tmp_path / "eval"
    rows = [{"prompt": row["prompt"][0]["content"], "answer": row["answer"]} for row in calculator.generate(6, seed=9)]
    dataset = write_jsonl(tmp_path / "rows.jsonl", rows)
    held_out = ["--eval_dataset", dataset, "--eval_temperature", "0.0"]
    command = ["--recipe", "calculator", "--dataset", dataset, "--output_dir", str(run), *SMALL, *held_out]
    assert main(["train", *command]) == 0
    model = str(run / "model")
    assert (
        main(
            ["eval", "--recipe", "calculator", "--model", model, "--dataset", dataset, "--output_dir", str(evaluation)]
        )
        == 0
    )
    result = json.loads((evaluation / "result.json").read_text())
    trained = json.loads((run / "result.json").read_text())
    assert result["sets"]["rows"]["greedy"]["estimates"]["pass@1"]["value"] == pytest.approx(
        trained["sets"]["eval"]["after"]["pass@1"]["value"]
    )
    assert len(read_items(evaluation / "rows.greedy.jsonl")) == 6
    capsys.readouterr()
    prompt = ["--prompt", "What is 123*45?", "--temperature", "1", "--n", "8", "--max_tokens", "64", "--seed", "1"]
    assert main(["generate", "--model", model, "--tools", CALCULATOR, *prompt]) == 0
    out = capsys.readouterr().out
    assert "-> calculator {expression: '123*45'}" in out
    assert "<- 5535" in out
