"""Images of the examples of supervised fine-tuning, read and processed when they are needed. Imports no jax."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from groupax.data.examples import Examples
from groupax.data.images import COLUMNS, has_images, images_of, with_images, without_images
from groupax.data.prompts import ImagesOfPrompts

Example = Mapping[str, Any]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class ExampleRows:
    """Examples by index, with their text or their whole conversation as a prompt whose images are read.

    Attributes:
        examples: Rows of a dataset.
        column: Column of what an example shows; "completion" stands for `prompt` and `completion` together.
        name: Name of an example in an error, before its index.
    """

    examples: Examples
    column: str
    name: str

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns an example."""
        return self.read(index, self.examples[index])

    def read(self, index: int, row: Example) -> dict[str, Any]:
        """Returns an example, given its row, with its images if it has some (see `images.with_images`)."""
        shown = row["prompt" if self.column == "completion" else self.column]
        if self.column == "completion" and isinstance(shown, list) and isinstance(row["completion"], list):
            shown = [*shown, *row["completion"]]
        row = {**row, "prompt": shown}
        return with_images(row, f"{self.name} {index}") if has_images(row) else row

    def text_of(self, row: Example, read: Example) -> dict[str, Any]:
        """Returns a row without its images, which `read` returned with them."""
        shown, rest = without_images(read["prompt"]), {name: row[name] for name in row if name not in COLUMNS}
        if self.column != "completion":
            return rest | {self.column: shown}
        if not isinstance(shown, list) or not isinstance(row["completion"], list):
            return rest | {"prompt": shown}
        size = len(row["prompt"])
        return rest | {"prompt": shown[:size], "completion": shown[size:]}


@dataclass(frozen=True, eq=False)
class ExampleImages:
    """The texts in the places of examples' images, and the images when they are needed.

    Attributes:
        rows: The examples.
        encoder: Encoder of the model's prompts (`models.vision.processing.PromptEncoder`).
        texts: Texts that stand for the images of each example.
        digests: Digests of the images of each example, none for a text.
    """

    rows: ExampleRows
    encoder: Any
    texts: Sequence[Sequence[str]]
    digests: Sequence[tuple[str, ...]]

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Puts the name of an example before a ValueError of the block."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.rows.name} {index}: {error}") from error

    def filled(self, index: int, text: str, spans: Spans = (), is_start: bool = False) -> tuple[str, Spans]:
        """Returns an example's text, or its start, with the texts of its images, and where spans of it are then.

        Raises:
            ValueError: The text has more or fewer placeholders than there are images.
        """
        if not self.digests[index]:
            return text, spans
        with self.naming(index):
            return self.encoder.fill(text, self.texts[index], spans, is_start)

    def check(self, index: int, ids: Int[np.ndarray, "T"], learned: Bool[np.ndarray, "T"]) -> Bool[np.ndarray, "T"]:
        """Returns which tokens of an example stand for features of images.

        Raises:
            ValueError: They are not those of its images, or the model cannot see images where they are.
        """
        with self.naming(index):
            if not self.digests[index]:
                self.encoder.check_text(ids)
                return np.zeros(len(ids), bool)
            config, token = self.encoder.config, self.encoder.processor.token
            is_feature = ids == config.image_token_id
            expected, found = sum(text.count(token) for text in self.texts[index]), int(is_feature.sum())
            if found != expected:
                raise ValueError(
                    f"its images have {expected} features, and {found} of its tokens stand for some; leave {token} out "
                    "of its text"
                )
            first = int(np.argmax(learned)) if learned.any() else len(ids)
            if config.sees_whole_images and is_feature[max(first - 1, 0) :].any():
                raise ValueError(
                    "it has an image after the first token to learn, and the tokens of an image see each other in this "
                    "model; give a prompt with a completion, or set assistant_only_loss, with all images before the "
                    "first answer"
                )
        return is_feature

    def of_tokens(self, token_ids: Sequence[np.ndarray]) -> ImagesOfPrompts | None:
        """Returns the images of all examples, whose tokens these are; None if all are texts."""
        return ImagesOfPrompts(self.rows, self.encoder, token_ids, self.digests) if any(self.digests) else None


def read_examples(examples: Examples, column: str, encoder: Any, name: str) -> tuple[list[Example], ExampleImages]:
    """Returns the rows of examples without their images, and these.

    Raises:
        ValueError: An image cannot be read, or the model cannot see it.
    """
    whole = ExampleRows(examples, column, name)
    rows: list[Example] = []
    texts: list[Sequence[str]] = []
    digests: list[tuple[str, ...]] = []
    found = ExampleImages(whole, encoder, texts, digests)
    for index in range(len(examples)):
        row, processed = examples[index], []
        if has_images(row):
            if column == "input_ids":
                raise ValueError(
                    f"{name} {index} has images and input_ids; give messages, or a prompt with a completion"
                )
            read = whole.read(index, row)
            with found.naming(index):
                processed = encoder.process(images_of(read))
            row = whole.text_of(row, read)
        rows.append(row)
        texts.append([sys.intern(text) for _, text in processed])
        digests.append(tuple(image.digest for image, _ in processed))
    return rows, found
