"""Turns images and text into what a model reads, with the image processors of transformers that use PIL and numpy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from groupax.core.errors import require
from groupax.core.storage.folders import read_json, write_json
from groupax.core.terminal.printable import short_repr
from groupax.core.types import Image, PromptImages
from groupax.data.tokenizer import token_ids
from groupax.models.vision.config import AveragePool, PatchMerger, PixelShuffle, VisionConfig
from groupax.models.vision.placement import make_image, num_features, place_images

FILES = ("preprocessor_config.json", "processor_config.json")  # settings of the image processor


@dataclass(frozen=True, eq=False)
class ImageProcessor:
    """Turns the images of a model's prompts into patches and tokens.

    Attributes:
        config: The part of the model that sees images.
        processor: An image processor of transformers.
        placeholder: Text in a prompt that stands for an image, as chat templates write it.
        token: Text of the token that stands for one feature.
    """

    config: VisionConfig
    processor: Any
    placeholder: str
    token: str


def write_processor(source: Path | None, folder: Path) -> None:
    """Copies the settings of the image processor, if there are any, from the folder that a model was read from."""
    if source is None:
        return
    for name in FILES:
        if (source / name).is_file():
            write_json(folder / name, read_json(source / name))


def load_image_processor(folder: Path, config: VisionConfig, tokenizer: Any) -> ImageProcessor:
    """Loads the image processor of a model's folder.

    Its class is that of the model's family, whatever the folder says, and no code of the folder is run.

    Args:
        folder: Folder of the model, with `preprocessor_config.json` or `processor_config.json`.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: The folder has no settings of an image processor, or they do not fit the model.
    """
    require("vision", "a model that sees images")
    family, settings = _FAMILIES[type(config.projector)], _settings(folder)
    if settings.get("do_pan_and_scan"):
        raise ValueError(
            f"{folder} has do_pan_and_scan, by which an image is also shown in crops; groupax shows it whole: set "
            "do_pan_and_scan to false"
        )
    module = import_module(f"transformers.models.{family.name}.image_processing_pil_{family.name}")
    try:
        processor = getattr(module, family.processor_class).from_dict(settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the image processor of {folder} cannot be loaded: {error}") from error
    token = tokenizer.convert_ids_to_tokens(config.image_token_id)
    if not isinstance(token, str):
        raise ValueError(f"the tokenizer of {folder} has no token {config.image_token_id}, the model's image token")
    placeholder = token if family.placeholder is None else family.placeholder
    return ImageProcessor(config, processor, placeholder, token)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of an image processor, which newer folders have in those of the whole processor."""
    whole, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    found = read_json(whole).get("image_processor") if whole.is_file() else None
    if found is None and not own.is_file():
        raise ValueError(f"{folder} has no {own.name}, which says how its model sees images")
    found = read_json(own) if found is None else found
    if not isinstance(found, dict):
        raise ValueError(f"image_processor of {whole} is {short_repr(found)}; it must be an object")
    return found


def process_image(processor: ImageProcessor, image: Any) -> tuple[Image, str]:
    """Returns an image as patches, and the text that takes the place of its placeholder in a prompt.

    Args:
        image: PIL image, of any mode and size.

    Raises:
        ValueError: The model cannot see an image of this shape.
    """
    return _FAMILIES[type(processor.config.projector)].process(processor, image)


def process_images(
    processor: ImageProcessor, tokenizer: Any, text: str, images: Sequence[Any], add_special_tokens: bool = False
) -> tuple[Int[np.ndarray, "S"], PromptImages]:
    """Returns the tokens of a prompt with images, and where they stand for the images' features.

    Args:
        text: Prompt, as rendered by the chat template, with one placeholder per image.
        add_special_tokens: Whether to add the tokenizer's special tokens, as to a prompt without a chat template.

    Raises:
        ValueError: The text has more or fewer placeholders than there are images, or other image tokens.
    """
    processed = [each if isinstance(each, tuple) else process_image(processor, each) for each in images]
    text, _ = fill_placeholders(processor, text, [own for _, own in processed])
    [ids] = token_ids(tokenizer, [text], add_special_tokens)
    ids = np.asarray(ids, np.int32)
    return ids, place_images(processor.config, ids, [image for image, _ in processed])


def fill_placeholders(
    processor: ImageProcessor, text: str, own: Sequence[str], spans: Sequence[tuple[int, int]] = ()
) -> tuple[str, list[tuple[int, int]]]:
    """Returns a text with those of its images in place of their placeholders, and where spans of it are then.

    Raises:
        ValueError: The text has more or fewer placeholders than there are images.
    """
    place = processor.placeholder
    between = text.split(place)
    if len(between) != len(own) + 1:
        raise ValueError(
            f"the text has {len(between) - 1} placeholders ({place}) for {len(own)} images; give each image its place: "
            "as a part {'type': 'image'} of a message, or as the placeholder in a text"
        )

    def moved(index: int) -> int:
        num = text.count(place, 0, index)
        return index + sum(map(len, own[:num])) - num * len(place)

    filled = between[0] + "".join(each + after for each, after in zip(own, between[1:], strict=True))
    return filled, [(moved(start), moved(end)) for start, end in spans]


def cut_patches(config: VisionConfig, pixels: Float[np.ndarray, "I C H W"]) -> Image:
    """Returns the tiles of an image as patches; what is left of a tile at the right and below is cut off.

    Args:
        pixels: Processed tiles, all of the same size.

    Raises:
        ValueError: The patches of a tile cannot be merged to features.
    """
    tiles, C, H, W = pixels.shape
    side, merge = config.tower.patch_size, config.projector.merge
    rows, columns = H // side, W // side
    if config.tower.channels != C or rows % merge or columns % merge or not rows * columns:
        raise ValueError(
            f"an image became {C} channels of {H} x {W} pixels; the model sees {config.tower.channels} channels in "
            f"patches of {side} x {side}, which it merges in squares of {merge} x {merge}"
        )
    blocks = pixels[:, :, : rows * side, : columns * side]
    blocks = blocks.reshape(tiles, C, rows // merge, merge, side, columns // merge, merge, side)
    return make_image(blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(tiles, rows * columns, -1), (rows, columns))


def _process_tiles(processor: ImageProcessor, image: Any) -> tuple[Image, str]:
    """Cuts an image into tiles, after which comes the whole image as one (Idefics 3, SmolVLM)."""
    found = processor.processor([[image]], return_row_col_info=True, return_tensors="np")
    tiles = cut_patches(processor.config, np.asarray(found["pixel_values"][0], np.float32))
    rows, columns = found["rows"][0][0], found["cols"][0][0]
    tokens = processor.token * (num_features(processor.config, tiles) // len(tiles.patches))
    around = "<fake_token_around_image>"
    text = "".join(
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return tiles, text + "\n" * (rows > 0) + f"{around}<global-img>{tokens}{around}"


def _process_whole(processor: ImageProcessor, image: Any) -> tuple[Image, str]:
    """Resizes an image to one size (Gemma 3)."""
    found = processor.processor([image], return_tensors="np")
    whole = cut_patches(processor.config, np.asarray(found["pixel_values"], np.float32))
    tokens = processor.token * num_features(processor.config, whole)
    return whole, f"\n\n{processor.placeholder}{tokens}<end_of_image>\n\n"


def _process_patches(processor: ImageProcessor, image: Any) -> tuple[Image, str]:
    """Resizes an image to a multiple of the patches' size (Qwen 3 VL)."""
    found = processor.processor([image], return_tensors="np")
    [(frames, rows, columns)] = found["image_grid_thw"].tolist()
    patches = found["pixel_values"].reshape(frames, rows * columns, -1)
    own = make_image(patches, (rows, columns))
    return own, processor.token * num_features(processor.config, own)


@dataclass(frozen=True)
class _Family:
    """The processing of a family's images; without a placeholder it is the image token."""

    name: str
    processor_class: str
    process: Callable[[ImageProcessor, Any], tuple[Image, str]]
    placeholder: str | None = None


_FAMILIES: Mapping[type, _Family] = {
    PixelShuffle: _Family("idefics3", "Idefics3ImageProcessorPil", _process_tiles),
    AveragePool: _Family("gemma3", "Gemma3ImageProcessorPil", _process_whole, "<start_of_image>"),
    PatchMerger: _Family("qwen2_vl", "Qwen2VLImageProcessorPil", _process_patches),
}


@dataclass(eq=False)
class PromptEncoder:
    """Encodes prompts with images.

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
        return place_images(self.config, token_ids, [image for image, _ in self.process(images)])

    def process(self, images: Sequence[Any]) -> list[tuple[Image, str]]:
        """Returns PIL images as patches, and the text that takes the place of each placeholder."""
        return [process_image(self.processor, image) for image in images]

    def fill(
        self, text: str, own: Sequence[str], spans: Sequence[tuple[int, int]] = (), is_start: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns a text, or its start, with the texts of its images (see `fill_placeholders`)."""
        own = own[: text.count(self.processor.placeholder)] if is_start else own
        return fill_placeholders(self.processor, text, own, spans)

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
