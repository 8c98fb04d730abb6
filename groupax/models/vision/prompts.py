"""Encodes the prompts of a dataset for a model that sees images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from groupax.models.vision.config import VisionConfig
from groupax.models.vision.placement import place_images
from groupax.models.vision.processing import ImageProcessor, load_image_processor, process_image, process_images
from groupax.types import PromptImages


@dataclass(eq=False)
class PromptEncoder:
    """Encodes prompts with images (see `data.prompts.ImageEncoder`).

    Attributes:
        config: The part of the model that sees images.
        source: Folder of the model, with the settings of its image processor; None for a model that was made in memory.
        tokenizer: Tokenizer of the model.
        max_bytes: Size of the processed images that may be kept in memory, in bytes.
    """

    config: VisionConfig
    source: Path | None
    tokenizer: Any
    max_bytes: int

    @cached_property
    def processor(self) -> ImageProcessor:
        """The image processor, loaded when the first image is encoded.

        Raises:
            ImportError: Pillow is not installed.
            ValueError: There is no folder, or it has no settings of an image processor.
        """
        if self.source is None:
            raise ValueError("the model was made in memory and has no image processor; save it to a folder and load it")
        return load_image_processor(self.source, self.config, self.tokenizer)

    def encode(self, text: str, images: Sequence[Any], is_rendered: bool) -> tuple[Int[np.ndarray, "S"], PromptImages]:
        """Returns the token ids of a prompt with placeholders for its PIL images, and these images.

        Raises:
            ValueError: There are more or fewer placeholders than images, or the model cannot see an image.
        """
        ids, placed = process_images(self.processor, self.tokenizer, text, images, not is_rendered)
        if len(ids) and ids[-1] in self.config.placeholder_ids:
            raise ValueError("it ends with an image; a text must follow, such as the start of the answer")
        return ids, placed

    def place(self, token_ids: Int[np.ndarray, "S"], images: Sequence[Any]) -> PromptImages:
        """Returns the images of a prompt that was encoded before."""
        processed = [process_image(self.processor, image)[0] for image in images]
        return place_images(self.config, token_ids, processed)

    def check_text(self, token_ids: Int[np.ndarray, "S"]) -> None:
        """Raises a ValueError if a prompt without images has tokens that stand for images."""
        found = token_ids[np.isin(token_ids, self.config.placeholder_ids)]
        if len(found):
            raise ValueError(
                f"it has no images, and its text has {len(found)} tokens that stand for images "
                f"({self.tokenizer.convert_ids_to_tokens(int(found[0]))}); remove them, or give the images"
            )


def prompt_encoder(
    config: VisionConfig | None, source: Path | None, tokenizer: Any, max_bytes: int
) -> PromptEncoder | None:
    """Returns the encoder of a model's prompts (see `PromptEncoder`); None for a model of text."""
    return None if config is None else PromptEncoder(config, source, tokenizer, max_bytes)
