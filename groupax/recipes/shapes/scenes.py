"""The shapes recipe: a small model inside the package, which sees images, learns to look before it answers.

The model was pretrained on answers of mixed quality (see `model/README.md`). It can name the shapes of a picture one by
one and then count, but mostly guesses. The rewards are for an answer in the form
`<think>...</think><answer>...</answer>`, and mainly for a correct one. Rows of another source have the columns
`prompt` (such as `How many red shapes?`), `image` and `answer`.
"""

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.core.errors import require
from groupax.data.examples import Example
from groupax.recipes.recipe import Split, draw_split, make_recipe

KINDS = ("circle", "square", "triangle")
COLORS = {"red": (208, 48, 48), "green": (40, 160, 72), "blue": (48, 88, 208)}
CELLS_PER_SIDE = 3
CELL_PIXELS = 16
IMAGE_PIXELS = CELLS_PER_SIDE * CELL_PIXELS
NUM_SHAPES = (2, 6)  # fewest and most of a picture
RADIUS_PIXELS = (5, 7)  # smallest and largest
HELD_OUT_FRAC = 0.1


@dataclass(frozen=True)
class Shape:
    """A shape of a picture."""

    cell: int  # index of its cell, row by row
    color: str  # its colour and form
    kind: str
    radius: int  # half of its width in pixels
    shift: tuple[int, int]  # distance of its centre from that of the cell, in pixels to the right and down


@dataclass(frozen=True)
class Scene:
    """A picture and a question."""

    shapes: tuple[Shape, ...]  # shapes in the order of their cells
    background: int  # brightness of the background
    asked: str  # the colour or the form to count

    @property
    def question(self) -> str:
        """The question.

        Example:
            >>> Scene((), 255, "red").question
            'How many red shapes?'
        """
        return f"How many {self.asked}{'s' if self.asked in KINDS else ' shapes'}?"

    @property
    def answer(self) -> str:
        """Number of the shapes that are asked for."""
        return str(sum(self.asked in (each.color, each.kind) for each in self.shapes))


def generate(num: int, seed: int, split: Split = "train") -> list[dict[str, Any]]:
    """Returns rows with the columns `prompt`, a conversation, `image`, a PIL image, and `answer`.

    No picture is in both splits. The seed determines the rows; a shorter list is the start of a longer one.
    """
    if num < 0:
        raise ValueError(f"num must be at least 0, got {num}")
    return [as_row(scene) for scene in itertools.islice(scenes(seed, split), num)]


def as_row(scene: Scene) -> dict[str, Any]:
    """Returns the row of a scene."""
    prompt = [{"role": "user", "content": scene.question}]
    return {"prompt": prompt, "image": draw(scene), "answer": scene.answer}


def scenes(seed: int, split: Split = "train") -> Iterator[Scene]:
    """Returns an iterator over the scenes of `generate`, without end."""
    return draw_split(_random_scene, is_held_out, seed, split)


def is_held_out(scene: Scene) -> bool:
    """Returns whether a scene is in the held-out split, by the hash of what its picture shows and where."""
    shown = ";".join(f"{shape.cell} {shape.color} {shape.kind}" for shape in scene.shapes)
    return zlib.crc32(shown.encode()) < HELD_OUT_FRAC * 2**32


def draw(scene: Scene) -> Any:
    """Returns the picture as a PIL image. The same scene always has the same pixels."""
    require("vision", "drawing pictures")
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (IMAGE_PIXELS, IMAGE_PIXELS), (scene.background,) * 3)
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        row, column = divmod(shape.cell, CELLS_PER_SIDE)
        x = column * CELL_PIXELS + CELL_PIXELS // 2 + shape.shift[0]
        y = row * CELL_PIXELS + CELL_PIXELS // 2 + shape.shift[1]
        left, top, right, bottom = x - shape.radius, y - shape.radius, x + shape.radius, y + shape.radius
        color = COLORS[shape.color]
        match shape.kind:
            case "circle":
                canvas.ellipse((left, top, right, bottom), fill=color)
            case "square":
                canvas.rectangle((left, top, right, bottom), fill=color)
            case "triangle":
                canvas.polygon([(x, top), (right, bottom), (left, bottom)], fill=color)
    return image


def _random_scene(rng: random.Random) -> Scene:
    cells = sorted(rng.sample(range(CELLS_PER_SIDE**2), rng.randint(*NUM_SHAPES)))
    shapes = tuple(_random_shape(rng, cell) for cell in cells)
    # mostly of a shape that there is, so that few answers are 0
    example = rng.choice(shapes) if rng.random() < 0.9 else _random_shape(rng, 0)
    return Scene(shapes, rng.randint(200, 255), rng.choice((example.color, example.kind)))


def _random_shape(rng: random.Random, cell: int) -> Shape:
    color, kind, radius = rng.choice(list(COLORS)), rng.choice(KINDS), rng.randint(*RADIUS_PIXELS)
    room = CELL_PIXELS // 2 - 1 - radius
    return Shape(cell, color, kind, radius, (rng.randint(-room, room), rng.randint(-room, room)))


NUM_TRAIN = 2048
NUM_HELD_OUT = 300


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt, the image and the answer."""
    if not row.get("prompt") or row.get("image") is None or row.get("answer") is None:
        raise ValueError(f"it needs the columns prompt, image and answer, it has {', '.join(row)}")
    prompt = row["prompt"]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"prompt": prompt, "image": row["image"], "answer": str(row["answer"])}


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {"train": lambda: generate(NUM_TRAIN, seed=1), "eval": lambda: generate(NUM_HELD_OUT, seed=0, split="held_out")},
)
