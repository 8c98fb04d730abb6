"""The recipes whose answers are texts of a real model: their rewards, by hand, and their held-out sets."""

import re

import pytest

from groupax.recipes import instructions, load_recipe, word_problems
from groupax.recipes.instructions import HELD_OUT_KINDS, KINDS, follows_instruction, instruction_score
from groupax.rewards.maths import gsm8k_accuracy

# Kind, argument, an answer that follows the instruction, and one that does not, all about rain.
ANSWERS = [
    ("sentences", "two", "Rain is wet. It falls down!", "Rain is wet and falls."),
    ("at_most_words", "8", "Rain is water that falls.", "Rain is water that falls from the dark and cold clouds."),
    ("without_word", "the", "There is rain in May.", "The rain falls in May."),
    ("without_letter", "b", "Rain is wet and cold.", "Rain is bad and cold."),
    ("with_words", "old and warm", "The old rain is warm.", "The older rain is warm."),
    ("begins_with", "I think", "I think rain is wet.", "I thinking of the rain."),
    ("quotes", "", '"Rain is wet and cold"', '"Rain" is "wet and cold"'),
    ("tags", "fact", "<fact>Rain is wet and cold.</fact>", "<fact>Rain</fact> is wet and cold.</fact>"),
    ("json", "text", ' {"text": "Rain is often wet."}\n', '```json\n{"text": "Rain is often wet."}\n```'),
    ("capitals", "", "RAIN IS WET AND COLD.", "RAIN IS WET and cold."),
    ("without_commas", "", "Rain is wet and cold.", "Rain, it is wet and cold."),
    ("with_digit", "", "The word rain has 4 letters.", "The word rain has four letters."),
    ("question", "", "Is rain wet and cold?", "Rain is wet and cold."),
    ("brackets", "", "[[Rain is wet and cold]]", "[Rain is wet and cold]"),
    ("last_word", "today", "There is cold rain today.", "There is cold rain todays."),
]


@pytest.mark.parametrize(("kind", "argument", "right", "wrong"), ANSWERS)
def test_an_instruction_is_checked(kind, argument, right, wrong):
    of_snow = right.lower().replace("rain", "snow").replace("RAIN", "SNOW")
    texts = [right, wrong, "", of_snow, right + " And then the", "Rain rain."]
    found = follows_instruction(texts, [kind] * 6, [argument] * 6, ["rain"] * 6)
    assert found == [1, 0, 0, 0, 0, 0]
    scores = instruction_score(texts, [kind] * 6, [argument] * 6, ["rain"] * 6)
    assert all(0 <= score <= 1 for score in scores)
    assert scores[0] > max(scores[1:])


def test_every_kind_is_checked_above():
    assert [kind for kind, *_ in ANSWERS] == [*KINDS, *HELD_OUT_KINDS]


def test_held_out_instructions_have_other_words_topics_or_kinds():
    recipe = load_recipe("instructions")
    train, held_out = recipe.train_dataset(), recipe.eval_dataset()
    assert isinstance(held_out, dict)
    assert held_out.keys() == {"wordings", "kinds"}
    assert {row["kind"] for row in train} == {row["kind"] for row in held_out["wordings"]} == set(KINDS)
    assert {row["kind"] for row in held_out["kinds"]} == set(HELD_OUT_KINDS)
    for rows in held_out.values():
        assert not {row["topic"] for row in train} & {row["topic"] for row in rows}
        ends = {row["prompt"][0]["content"].partition(". ")[2] for row in rows}
        assert not {row["prompt"][0]["content"].partition(". ")[2] for row in train} & ends
    assert instructions.generate(5, 1) == instructions.generate(9, 1)[:5]
    with pytest.raises(ValueError, match="no kind of instruction 'rhyme'"):
        instructions.example({**train[0], "kind": "rhyme"})
    with pytest.raises(ValueError, match="no column kind and no column topic; it has prompt, argument"):
        instructions.example({"prompt": "x", "argument": ""})


def test_word_problems_have_the_answers_of_their_numbers():
    for split in ("train", "held_out"):
        rows = word_problems.generate(400, seed=0, split=split)
        first = {re.sub(r"\d+|[A-Z][a-z]+", "_", row["question"])[:18] for row in rows}
        assert len(first) > 5
        for row in rows:
            numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
            if "buys" in row["question"] and "loses" in row["question"]:
                assert int(row["answer"]) == numbers[0] + numbers[1] - numbers[2]
            if "groups" in row["question"]:
                assert int(row["answer"]) * numbers[1] == numbers[0]
    questions = [{row["question"] for row in word_problems.generate(400, 0, split)} for split in ("train", "held_out")]
    assert not questions[0] & questions[1]


def test_worked_examples_are_right_and_calculations_are_checked():
    shown = word_problems.example({"question": "How many?", "answer": "#### 3"})
    assert shown["answer"] == "3"
    answers = [message["content"] for message in shown["prompt"] if message["role"] == "assistant"]
    assert gsm8k_accuracy(answers, ["9", "18"]) == [1, 1]
    wrong = ["6 + 3 = 8.", "9", "6 / 0 = 0", "3 x 3 = 9 and 9 - 1 = 9", "4 * 5 = 20"]
    questions = [message["content"] for message in shown["prompt"] if message["role"] == "user"][:2]
    scores = word_problems.sound_calculation([*answers, *wrong], [*questions, *[questions[1]] * len(wrong)])
    assert scores == pytest.approx([1, 1, 0, 0, 0, 0, 2 / 3])
