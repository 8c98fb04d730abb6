"""Recipes: rows to prompts, sources that work offline, and the programs and commands that run them."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from groupax import init_model, save_model
from groupax.cli.main import main
from groupax.cli.train import train_defaults
from groupax.core.config import GRPOConfig
from groupax.data.examples import load_examples
from groupax.data.files import read_rows
from groupax.episodes.environment import environment_rewards
from groupax.episodes.rules import load_environments, load_tools
from groupax.evaluation.items import read_items
from groupax.recipes import RECIPES, load_recipe
from groupax.recipes.recipe import fitting_length, fitting_template, max_positions_of
from groupax.recipes.shapes.scenes import (
    CELL_PIXELS,
    COLORS,
    IMAGE_PIXELS,
    Scene,
    Shape,
    draw,
    example,
    generate,
)
from groupax.rewards.resolve import resolve_rewards
from groupax.tools.tool import tools_from
from tests.conftest import TINY

GSM8K_ROWS = [
    {"question": "Tom has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "What are 2 x 500?", "answer": "2 x 500 = 1,000\n#### 1,000"},
    {"question": "What is 1 less than 0?", "answer": "#### -1"},
]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- every recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_whole(name):
    recipe = load_recipe(name)
    config = GRPOConfig.from_mapping(recipe.config)
    functions, columns = list(recipe.reward_funcs), ["answer", "question", "kind", "argument", "topic"]
    given = resolve_rewards(functions, columns) if functions else []
    rewards = [*given, *environment_rewards(load_environments(recipe.environments))]
    assert tools_from(load_tools(recipe.tools)).keys() == {name.partition(":")[2] for name in recipe.tools}
    assert config.reward_weights is None or len(config.reward_weights) == len(rewards)
    assert config.correctness_reward is None or config.correctness_reward in [reward.name for reward in rewards]
    assert recipe.expected
    assert {"max_completion_length", "output_dir"} <= set(recipe.config)


@pytest.mark.heavy
def test_generated_data_is_there_without_a_source():
    recipe = load_recipe("calculator")
    train, held_out = recipe.train_dataset(), recipe.eval_dataset()
    assert len(train) > 1000
    assert len(held_out) >= 250
    seen = {json.dumps(row["prompt"]) for row in train}
    assert not seen & {json.dumps(row["prompt"]) for row in held_out}


# -- rows


def test_one_recipe_reads_the_mathematics_of_several_sources(tmp_path):
    numina, gsm8k = load_recipe("numinamath"), load_recipe("gsm8k")
    rows = [
        {"problem": "Halve 1.", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        {"problem": "Halve 1.", "solution": "long", "answer": r"\frac{1}{2}"},
        {"prompt": [{"role": "user", "content": "Halve 4."}], "answer": 2},
    ]
    examples = numina.examples(str(write_jsonl(tmp_path / "x.jsonl", rows)))
    assert examples[0]["answer"] == rows[0]["solution"]
    assert examples[1]["answer"] == r"\frac{1}{2}"
    assert examples[2] == {"prompt": rows[2]["prompt"], "answer": "2"}
    file = write_jsonl(tmp_path / "gsm8k.jsonl", GSM8K_ROWS)
    assert [row["answer"] for row in numina.examples(str(file))] == ["7", "1,000", "-1"]
    with pytest.raises(ValueError, match=r"row 1 of .*x.jsonl does not fit the recipe: its answer .* is not a number"):
        gsm8k.examples(str(write_jsonl(tmp_path / "x.jsonl", [GSM8K_ROWS[0], rows[1]])))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"answer": "1"}, "no text in a column question, problem or prompt; it has answer"),
        ("gsm8k", {"question": "?"}, "neither a column answer nor a column solution"),
        ("numinamath", {"problem": "?", "answer": " "}, "neither a column answer nor a column solution"),
        ("arithmetic", {"prompt": "1+1="}, "needs the columns prompt and answer"),
    ],
)
def test_rows_that_do_not_fit_are_reported(tmp_path, name, row, message):
    with pytest.raises(ValueError, match=f"row 0 of .* does not fit the recipe: .*{message}"):
        load_recipe(name).examples(str(write_jsonl(tmp_path / "x.jsonl", [row])))


# -- sources


def test_folders_have_splits(tmp_path):
    write_jsonl(tmp_path / "a" / "train.jsonl", [{"prompt": "t"}])
    write_jsonl(tmp_path / "a" / "validation.jsonl", [{"prompt": "v"}])
    assert load_examples(tmp_path / "a") == [{"prompt": "t"}]
    assert load_examples(tmp_path / "a", "eval_dataset", ("test", "validation")) == [{"prompt": "v"}]
    (tmp_path / "b" / "main").mkdir(parents=True)
    for part in (0, 1):
        path = tmp_path / "b" / "main" / f"train-0000{part}-of-00002.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": str(part)}]), path)
    write_jsonl(tmp_path / "b" / "other" / "train.jsonl", [{"prompt": "o"}])
    assert [row["prompt"] for row in read_rows(tmp_path / "b", "x", subset="main")] == ["0", "1"]
    DatasetDict(train=Dataset.from_list([{"prompt": "d"}])).save_to_disk(tmp_path / "c")
    assert load_examples(tmp_path / "c")[0] == {"prompt": "d"}
    Dataset.from_list([{"prompt": "e"}]).save_to_disk(tmp_path / "d")
    assert load_examples(tmp_path / "d")[0] == {"prompt": "e"}
    assert load_recipe("numinamath").eval_dataset(str(tmp_path / "d")) is None


def test_sources_that_have_no_rows_are_refused_with_what_there_is(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text('{"prompt": 1}')
    for number in range(20):
        write_jsonl(tmp_path / "many" / f"part{number:02d}.jsonl", [{"prompt": "p"}])
    for place, message in (
        (tmp_path / "many", r"it has part00, .*, part07; name the file itself"),
        (tmp_path / "empty", r"it has no \.jsonl, \.json, \.csv, \.tsv or \.parquet file"),
        (tmp_path / "x.json", "must contain a list of rows, it contains a dict"),
        ("", "x is an empty text; name a file, a folder or a hub id, or leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            read_rows(place, "x")


def test_lines_may_have_line_separators_in_strings(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [row["prompt"] for row in load_examples(tmp_path / "x.jsonl")] == ["a\u2028b", "c"]


def test_a_source_without_held_out_rows_has_none(tmp_path):
    recipe = load_recipe("gsm8k")
    file = write_jsonl(tmp_path / "train.jsonl", GSM8K_ROWS)
    assert len(recipe.train_dataset(str(file))) == 3
    assert recipe.eval_dataset(str(file)) is None
    assert recipe.eval_dataset(str(tmp_path)) is None


# -- fitted to a model


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A tiny base model: characters as tokens, no chat template, 256 positions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<eos>", "<unk>", *(chr(code) for code in range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("base") / "model"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    config = {**TINY, "vocab_size": len(characters), "max_position_embeddings": 640, "eos_token_id": 0}
    save_model(init_model(config, seed=0), folder, fast)
    return str(folder)


def test_defaults_are_fitted_to_the_model_and_reported(base_model):
    assert max_positions_of(base_model) == 640
    length, [note] = fitting_length(640, 512, 512)
    assert length == 320
    assert note.startswith(
        "the model has 640 positions: completions have at most 320 tokens instead of the default 512"
    )
    assert fitting_length(640, 300, 512) == (300, [])
    assert fitting_length(640, 512, 100) == (512, [])
    chat, text = [{"prompt": [{"role": "user", "content": "?"}]}], [{"prompt": "?"}]
    assert fitting_template(base_model, None, [text]) == (None, [])
    assert fitting_template(base_model, "chatml", [chat]) == ("chatml", [])
    template, notes = fitting_template(base_model, None, [chat])
    assert template == "plain"
    assert "has no chat template" in notes[0]


# -- commands


@pytest.mark.drawn(3, "recipes")
@pytest.mark.heavy
def test_eval_command_on_several_sets(base_model, tmp_path, capsys):
    file, out = write_jsonl(tmp_path / "test.jsonl", GSM8K_ROWS), tmp_path / "out"
    common = f"eval --recipe gsm8k --model {base_model} --max_tokens 8 --output_dir {out}"
    argv = f"{common} --dataset one={file} {tmp_path} --n 4 --temperature 1.0 --limit 2".split()
    assert main([*argv, "--prompt_overflow", "truncate_left", "--max_prompt_length", "64"]) == 0
    told = capsys.readouterr().out
    assert all(text in told for text in ("pass@4", "maj@4", "2 cut"))
    result = json.loads((out / "result.json").read_text())
    [(name, one), (_, other)] = result["sets"].items()
    assert name == "one"
    assert set(one) == set(other) == {"greedy", "sampled"}
    assert one["greedy"]["sampling"]["temperature"] == 0
    assert one["sampled"]["estimates"]["pass@4"]["method"] == "wilson"
    assert one["sampled"]["estimates"]["reward"]["method"] == "student"
    items = read_items(out / "one.sampled.jsonl")
    assert [len(item.completions) for item in items] == [4, 4]
    assert items[0].columns["answer"] == "7"
    assert main([*argv, "--prompt_overflow", "drop", "--max_prompt_length", "480", "--no_greedy"]) == 0
    assert not (out / "one.greedy.jsonl").exists()
    assert (tmp_path / "out.1" / "one.greedy.jsonl").exists()


@pytest.mark.drawn(3, "recipes")
@pytest.mark.heavy
def test_eval_and_compare_of_plain_files(base_model, tmp_path, capsys):
    def told(words):
        assert main(words.split()) == 0
        return capsys.readouterr().out

    rows = [{"prompt": text, "answer": "1"} for text in ("a", "bc", "def")]
    file, other = write_jsonl(tmp_path / "test.jsonl", rows), write_jsonl(tmp_path / "other.jsonl", rows[:1])
    evaluate = f"eval --model {base_model} --dataset {file} --reward_funcs gsm8k_accuracy --max_tokens 8 --output_dir "
    evaluate += f"{tmp_path}/"
    told(f"{evaluate}a --weights bfloat16 --kv_cache_gb 0.01")
    told(f"{evaluate}b --max_concurrent_rows 2")
    found = told(f"compare {tmp_path}/a {tmp_path}/b")
    assert "test.greedy: 3 common items" in found
    told(f"{evaluate}c --dataset {file} {other} --reward_funcs gsm8k_accuracy xml_count")
    of_format = told(f"{evaluate}d --reward_funcs think_answer_format")
    assert "completion: --correctness_reward think_answer_format" in of_format
    found = told(f"compare {tmp_path}/a {tmp_path}/c")
    assert f"evaluated only in {tmp_path / 'c'}: other.greedy" in found
    assert f"only in {tmp_path / 'c'}: rewards/xml_count/mean" in found
    told(f"{evaluate}b --reward_weights 2")
    assert (tmp_path / "b.1" / "result.json").is_file()
    assert json.loads((tmp_path / "b" / "result.json").read_text())["correctness_reward"] == "gsm8k_accuracy"


def test_evaluation_sets_and_odd_values_in_a_file(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: gsm8k\neval_dataset: {a: x.jsonl, b: y.jsonl}\nreward_funcs:\n")
    defaults = train_defaults(["--config", str(file)])
    assert (defaults.eval_dataset, defaults.reward_funcs) == (("a=x.jsonl", "b=y.jsonl"), None)
    for line, message in (
        ("reward_funcs: {a: b}", "reward_funcs must be a list with each a text or None, got {'a': 'b'}"),
        ("model: [a]", "model must be a text or None, got ['a']"),
    ):
        file.write_text(f"recipe: gsm8k\n{line}\n")
        assert main(["train", "--config", str(file)]) == 2
        assert f"{file}: " in (err := capsys.readouterr().err)
        assert message in err


SHAPES = (
    Shape(0, "red", "circle", 5, (0, 0)),
    Shape(4, "blue", "square", 7, (0, 0)),
    Shape(8, "red", "square", 6, (1, 0)),
)


def test_what_is_asked_for_is_counted():
    scene = Scene(SHAPES, 255, "red")
    assert (scene.question, scene.answer) == ("How many red shapes?", "2")
    scene = Scene(SHAPES, 255, "square")
    assert (scene.question, scene.answer) == ("How many squares?", "2")
    assert Scene(SHAPES, 255, "green").answer == "0"


def test_pictures_show_the_shapes_in_their_cells():
    pixels = np.asarray(draw(Scene(SHAPES, 230, "circle")))
    assert pixels.shape == (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    for cell in range(9):
        row, column = divmod(cell, 3)
        middle = pixels[row * CELL_PIXELS + CELL_PIXELS // 2, column * CELL_PIXELS + CELL_PIXELS // 2]
        shape = next((shape for shape in SHAPES if shape.cell == cell), None)
        assert tuple(middle) == (COLORS[shape.color] if shape else (230, 230, 230))


def test_splits_share_no_picture_and_shorter_lists_are_starts_of_longer_ones():
    train = {image_bytes(row) for row in generate(200, seed=1)}
    held_out = {image_bytes(row) for row in generate(200, seed=0, split="held_out")}
    assert not train & held_out
    assert [image_bytes(row) for row in generate(5, 1)] == [image_bytes(row) for row in generate(9, 1)][:5]
    with pytest.raises(ValueError, match="at least 0"):
        generate(-1, 0)


def image_bytes(row):
    return row["image"].tobytes()


def test_rows_of_other_sources_have_a_prompt_an_image_and_an_answer():
    image = draw(Scene(SHAPES, 255, "red"))
    row = example({"prompt": "How many red shapes?", "image": image, "answer": 2})
    assert row == {"prompt": [{"role": "user", "content": "How many red shapes?"}], "image": image, "answer": "2"}
    with pytest.raises(ValueError, match="needs the columns prompt, image and answer"):
        example({"prompt": "How many?", "answer": 2})
