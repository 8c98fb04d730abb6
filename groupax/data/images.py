"""Images in rows of datasets: in columns, and as parts of messages. Imports no jax.

A row may have a column `image` or `images`, and its messages parts like {"type": "image"}. An image is a PIL image, the
bytes of a file, a path, a mapping with `bytes` and `path` as `datasets` stores it, or a `data:` URL. Nothing is fetched
from a network.
"""

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.core.errors import require
from groupax.core.storage.folders import read_file
from groupax.core.terminal.printable import error_line, short_repr

COLUMNS = ("image", "images")
# Formats of files that are decoded.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 1 << 26  # of a file
MAX_PIXELS = 50_000_000
MAX_IMAGES = 256  # of a prompt
TALKS = ("prompt", "messages", "completion")  # columns of messages
PARTS = ("image", "image_url")  # types of the parts of a message that are images
URL = "data:"
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # of PIL images that are written as they are


def has_images(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has an image in a column or in a message of its prompt or example."""
    if any(is_filled(row.get(column)) for column in COLUMNS):
        return True
    return any(_is_image(part) for column in TALKS for part in _all_parts(_messages(row.get(column))))


def is_filled(value: Any) -> bool:
    """Returns whether the value of a column is something other than nothing."""
    return value is not None and not (isinstance(value, (str, bytes, list, tuple, dict)) and len(value) == 0)


def with_images(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a row whose images are PIL images, in its columns and as parts of its prompt's messages.

    As in TRL, the images of a column take the places {"type": "image"} of the messages, in their order. If there are no
    such places, they come before the text of the first message of the user, unless the messages have the same images.
    Raises a ValueError if an image cannot be read, or if there are more or fewer of them than places.
    """
    given, columns = _column(row, where)
    row = {**row, **columns}
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return row
    messages = [_read_parts(message, where) for message in _messages(prompt)]
    own = _images_in(messages)
    if len(own) == len(given) and [*map(image_name, own)] == [*map(image_name, given)]:
        given = []
    if given and not any(map(_is_place, _all_parts(messages))):
        messages = _with_places(messages, len(given))
    num_places = sum(map(_is_place, _all_parts(messages)))
    if num_places != len(given):
        raise ValueError(
            f"{where} has {len(given)} images in its column and {num_places} parts {{'type': 'image'}} without an "
            "image in its messages; give one such part for each image, or none, so that they come before the text of "
            "the first message of the user"
        )
    rest = iter(given)
    filled = _with_parts(messages, lambda part: {**part, "image": next(rest)} if _is_place(part) else part)
    num = sum(map(_is_image, _all_parts(filled)))
    if num > MAX_IMAGES:
        raise ValueError(f"{where} has {num} images, at most {MAX_IMAGES} are read")
    return {**row, "prompt": filled}


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Returns the PIL images of a row of `with_images`, in the order in which its prompt shows them."""
    if isinstance(row["prompt"], str):
        value = next((row[column] for column in COLUMNS if is_filled(row.get(column))), None)
        return [] if value is None else list(value) if isinstance(value, list) else [value]
    return _images_in(row["prompt"])


def without_images(prompt: Any) -> Any:
    """Returns a prompt of `with_images` whose image parts are {"type": "image"}."""
    if isinstance(prompt, str):
        return prompt
    return _with_parts(prompt, lambda part: {"type": "image"} if _is_image(part) else part)


def save_png(image: Any, file: Any) -> None:
    """Writes a PIL image as a PNG file, to a path or a file object; in RGB if PNG does not have its mode."""
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(file, "PNG")


def read_image(value: Any, where: str) -> Any:
    """Returns an image (see `open_image`), decoded and upright, as a PIL image.

    An image whose EXIF data asks for it, such as a photo of a phone, is rotated, as `datasets` and transformers do.
    """
    image = open_image(value, where)
    from PIL import ExifTags, ImageOps

    try:
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
    except Exception as error:  # decoders raise what they like
        raise ValueError(f"{where} is damaged: {error_line(error)}") from error
    return image


def open_image(value: Any, where: str, max_pixels: int = MAX_PIXELS) -> Any:
    """Returns an image as a PIL image, after reading its header alone.

    Of a photo with further pictures in its file (MPO, with a preview or a depth map) this is the first.
    """
    require("vision", "reading images")
    from PIL import Image, UnidentifiedImageError

    image = value
    if not isinstance(value, Image.Image):
        data = _data_of(value, where)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{where} has {len(data):,} bytes, at most {MAX_BYTES:,} are read")
        try:
            with warnings.catch_warnings():  # of sizes, which are checked below
                warnings.simplefilter("ignore")
                image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise ValueError(f"{where} is not an image in one of the formats {', '.join(FORMATS)}") from error
        except Exception as error:  # a damaged header may fail in many ways
            raise ValueError(f"{where} cannot be read: {error_line(error)}") from error
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        raise ValueError(f"{where} has {width:,} x {height:,} pixels, at most {max_pixels:,} in all are read")
    if (num_frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":
        raise ValueError(f"{where} has {num_frames} frames, and a model sees still images; give one of them")
    return image


def is_image(value: Any) -> bool:
    """Returns whether a value is a PIL image, without importing PIL."""
    return hasattr(value, "getbands") and hasattr(value, "tobytes")


def image_name(image: Any) -> str:
    """Returns the name of a PIL image's file in a run folder, by its pixels."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode())
    digest.update(image.tobytes())
    if image.mode == "P":
        digest.update(repr(image.getpalette()).encode())
    return f"images/{digest.hexdigest()}.png"


def named(value: Any) -> Any:
    """Returns a row, or a part of one, with names in place of PIL images (see `image_name`)."""
    if is_image(value):
        return image_name(value)
    if isinstance(value, Mapping):
        return {key: named(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [named(each) for each in value]
    return value


def unnamed(value: Any, images: Sequence[Any]) -> Any:
    """Returns plain data with PIL images in place of their names; names of others stay (see `named`)."""
    known = {image_name(image): image for image in images}

    def with_known(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: with_known(each) for key, each in part.items()}
        if isinstance(part, list):
            return [*map(with_known, part)]
        return known.get(part, part) if isinstance(part, str) else part

    return with_known(value) if known else value


def absolute_paths(rows: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns rows whose images' paths are absolute; those of the dataset are relative to the folder of its file."""
    return [_absolute_row(row, folder) if has_images(row) else row for row in rows]


def _absolute_row(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    def absolute(part: Any) -> Any:
        is_one = isinstance(part, Mapping) and "image" in part
        return {**part, "image": _absolute(part["image"], folder)} if is_one else part

    columns = {column: _absolute(row[column], folder) for column in COLUMNS if column in row}
    talks = {name: row[name] for name in TALKS if isinstance(row.get(name), list)}
    return {**row, **columns, **{name: _with_parts(talk, absolute) for name, talk in talks.items()}}


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, (list, tuple)):
        return [_absolute(each, folder) for each in value]
    if isinstance(value, Mapping) and value.get("path") and not value.get("bytes"):
        return {**value, "path": _absolute(value["path"], folder)}
    is_path = isinstance(value, str) and value and not value.startswith(URL) and "://" not in value
    if isinstance(value, os.PathLike) or (isinstance(value, str) and is_path):
        return str(folder / value)
    return value


def _column(row: Mapping[str, Any], where: str) -> tuple[list[Any], dict[str, Any]]:
    """Returns the images of a row's column, and the column with them."""
    filled = [column for column in COLUMNS if is_filled(row.get(column))]
    if len(filled) > 1:
        raise ValueError(f"{where} has images in both columns image and images; leave one of them out")
    if not filled:
        return [], {}
    [column] = filled
    value = row[column]
    if isinstance(value, (list, tuple)):
        images = [read_image(each, f"{where}: image {index}") for index, each in enumerate(value)]
        return images, {column: images}
    image = read_image(value, f"{where}: the image")
    return [image], {column: image}


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    return [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list) else []


def _images_in(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    parts = filter(_is_image, _all_parts(messages))
    return [part["image"] for part in parts if part.get("image") is not None]


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _all_parts(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [part for message in messages for part in _parts(message)]


def _with_parts(messages: Sequence[Any], of: Callable[[Any], Any]) -> list[Any]:
    """Returns messages with what a function returns in place of each of their parts."""
    return [{**each, "content": [*map(of, each["content"])]} if _parts(each) else each for each in messages]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def _is_place(part: Any) -> bool:
    return _is_image(part) and part.get("image") is None


def _read_parts(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a message whose image parts have PIL images, except places without an image."""
    if not isinstance(message.get("content"), list):
        return dict(message)
    role = message.get("role")
    parts: list[Any] = []
    for number, part in enumerate(message["content"], 1):
        if not _is_image(part):
            parts.append({key: value for key, value in part.items() if key != "image" or value is not None})
            continue
        name = f"{where}: part {number} of a message of the role {role!r:.20}"
        value = part.get("image")
        if part["type"] == "image_url" or (value is None and part.get("image_url") is not None):
            value = part.get("image_url")
            value = value.get("url") if isinstance(value, Mapping) else value
            if not isinstance(value, str) or not value.startswith(URL):
                raise ValueError(
                    f"{name} has the URL {short_repr(value)}; only data: URLs are read, and nothing is fetched from a "
                    "network: download the image"
                )
        for key in ("path", "bytes", "url", "base64"):
            if value is None and part.get(key) is not None:
                raise ValueError(f"{name} has its image under {key!r}; give it under 'image'")
        if role not in ("user", "system"):
            raise ValueError(f"{name} is an image; only messages of the user and the system may have some")
        parts.append({"type": "image"} if value is None else {"type": "image", "image": read_image(value, name)})
    return {**message, "content": parts}


def _with_places(messages: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Returns messages with places for images before the text of the first message of the user, if it is a text."""
    for index, message in enumerate(messages):
        if message.get("role") == "user" and isinstance(message["content"], str):
            parts = [*({"type": "image"} for _ in range(number)), {"type": "text", "text": message["content"]}]
            return [*messages[:index], {**message, "content": parts}, *messages[index + 1 :]]
    return list(messages)


def _data_of(value: Any, where: str) -> bytes:
    """Returns the bytes of an image's file."""
    if isinstance(value, Mapping) and (value.get("bytes") is not None or value.get("path") is not None):
        return _data_of(value["bytes"] if value.get("bytes") is not None else value["path"], where)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str) and value.startswith(URL):
        return _decoded(value, where)
    if isinstance(value, str) and "://" in value[:16]:
        raise ValueError(f"{where} is the URL {short_repr(value)}, and nothing is fetched from a network; download it")
    if isinstance(value, (str, os.PathLike)):
        try:
            return read_file(Path(value), MAX_BYTES)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} is the path {str(value)!r}, which cannot be read: {error}") from error
    raise ValueError(
        f"{where} must be a PIL image, bytes, a path, a mapping with bytes or a path, or a data: URL, got "
        f"{type(value).__name__} {short_repr(value)}"
    )


def _decoded(url: str, where: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64") or len(text) > 2 * MAX_BYTES:
        raise ValueError(f"{where} is not a data: URL with base64 of at most {MAX_BYTES:,} bytes: {short_repr(url)}")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where} is a data: URL whose base64 is damaged: {error}") from error
