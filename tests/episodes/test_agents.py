"""Recipes of agents: their tools, environments and model, and the options of commands for tools and environments."""

import json

import numpy as np
import pytest

from groupax.cli.main import main
from groupax.episodes.rules import load_environments, load_tools
from groupax.evaluation.items import read_items
from groupax.recipes.agents import calculator, guess_number, sql

CALCULATOR = "groupax.recipes.agents.calculator:calculator"
GAME = "groupax.recipes.agents.guess_number:GuessNumber"
SMALL = ["--prompts_per_step", "2", "--num_generations", "2", "--max_steps", "1", "--progress_bar", "none"]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- tools and environments of the recipes


def test_the_calculator_calculates_and_refuses_what_is_no_arithmetic():
    for expression, value in (("348*27+95", 9491), ("(826+592)*44", 62392), ("-3-(4-5)", -2), (" 7 ", 7)):
        assert calculator.calculator(expression) == value
    for expression in ("", "2**9999", "7/2", "a+1", "1.5*2", "True+1", "print(1)", "1+" * 150 + "1", "("):
        with pytest.raises(ValueError, match="expression"):
            calculator.evaluate(expression)


def test_a_game_ends_with_the_number():
    game = guess_number.GuessNumber()
    game.reset({"number": 5}, seed=0)
    answers = [game.act({"content": text}) for text in ("3", "six", "6", "5")]
    assert [step.observation for step in answers] == ["higher", "a number, please", "lower", None]
    assert [step.reward for step in answers] == [None, None, None, 1.0]
    assert answers[-1].done


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("DELETE FROM fruits", "not authorized"),
        ("ATTACH '/tmp/stolen.db' AS other", "not authorized"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT COUNT(*) FROM n", "not authorized"),
        ("SELECT randomblob(1000000000)", "too big"),
        ("SELECT 1; SELECT 2", "one statement"),
    ],
)
def test_queries_only_read(query, message):
    environment = sql.FruitDatabase()
    environment.reset({}, seed=3)
    with pytest.raises(ValueError, match=message):
        environment.query(query)
    assert environment.query("SELECT COUNT(*) FROM fruits") == "8"
    environment.close()


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
        (load_environments, [GAME, f"game={GAME}"], "different names"),
    ],
)
def test_wrong_references_are_explained(load, references, message):
    with pytest.raises(ValueError, match=message):
        load(references)


# -- the commands


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.heavy) for name in ("guess_number", "sql")])
def test_a_recipe_of_agents_runs_one_step(name, tmp_path):
    module = {"guess_number": guess_number.games(4, 0), "sql": sql.problems(4, 0)}[name]
    rows = [{**row, "question": row["prompt"][0]["content"]} for row in module]
    run = tmp_path / "run"
    dataset = write_jsonl(tmp_path / "rows.jsonl", [{k: v for k, v in row.items() if k != "prompt"} for row in rows])
    assert main(["train", "--recipe", name, "--dataset", dataset, "--output_dir", str(run), *SMALL]) == 0
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1 <= metrics["episodes/turns"] <= 4


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


@pytest.mark.long
def test_the_model_learns_to_use_the_calculator(tmp_path):
    rows = [
        {"prompt": row["prompt"][0]["content"], "answer": row["answer"]} for row in calculator.generate(400, seed=1)
    ]
    dataset = write_jsonl(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    flags = ["--output_dir", str(run), "--max_steps", "20", "--progress_bar", "none"]
    assert main(["train", "--recipe", "calculator", "--dataset", dataset, *flags]) == 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [metrics["reward"] for metrics in logged if "reward" in metrics]
    assert rewards[0] <= 0.3
    assert np.mean(rewards[-3:]) >= 0.7
