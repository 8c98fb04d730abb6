"""The recipe of pictures: what its scenes show, ask for and count."""

import itertools
from collections import Counter

import numpy as np
import pytest

from groupax.recipes.shapes.scenes import (
    CELL_PIXELS,
    COLORS,
    IMAGE_PIXELS,
    Scene,
    Shape,
    draw,
    example,
    generate,
    scenes,
)
from groupax.rewards.formats import think_answer_correct, think_answer_format

SHAPES = (
    Shape(0, "red", "circle", 5, (0, 0)),
    Shape(4, "blue", "square", 7, (0, 0)),
    Shape(8, "red", "square", 6, (1, 0)),
)


def test_what_is_asked_for_is_counted():
    scene = Scene(SHAPES, 255, "red")
    assert (scene.question, scene.answer) == ("How many red shapes?", "2")
    assert scene.description == "red=1 circle;;;;blue square;;;;red=2 square"
    scene = Scene(SHAPES, 255, "square")
    assert (scene.question, scene.answer) == ("How many squares?", "2")
    assert Scene(SHAPES, 255, "green").answer == "0"


def test_worked_solutions_get_the_full_reward():
    drawn = list(itertools.islice(scenes(3), 50))
    completions = [[{"role": "assistant", "content": scene.worked_solution}] for scene in drawn]
    assert think_answer_format(completions=completions) == [1.0] * 50
    assert think_answer_correct(completions=completions, answer=[scene.answer for scene in drawn]) == [1.0] * 50
    assert len(Counter(scene.answer for scene in drawn)) > 3


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
