"""Images in requests: checked, and decoded from `data:` URLs. Nothing is fetched. Imports no jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from groupax.data.images import URL, open_image, read_image
from groupax.serve.errors import ApiError

MAX_IMAGES = 16  # of a request
MAX_PIXELS = 1 << 24  # of an image
MAX_ALL_PIXELS = 1 << 25  # of the images of a request: each takes 4 bytes decoded, and up to 24 as patches
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
DETAILS = ("auto", "low", "high")  # without an effect here


def image_url(part: Mapping[str, Any], where: str) -> str:
    """Returns the `data:` URL of an image part in OpenAI's format.

    Args:
        part: {"type": "image_url", "image_url": {"url": ...}}.
        where: Name of the part in an error.

    Raises:
        ApiError: It has another form or another URL.
    """
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or (isinstance(given, Mapping) and given.get("detail", "auto") not in DETAILS):
        message = f"{where} must be {{'type': 'image_url', 'image_url': {{'url': 'data:image/png;base64,...'}}}}"
        raise ApiError(400, message, "messages")
    if not url.startswith(URL):
        message = f"{where} has the URL {url[:80]!r}, and this server fetches none; send the image as a data: URL"
        raise ApiError(400, message, "messages", "unsupported_value")
    return url


def source_url(block: Mapping[str, Any], where: str) -> str:
    """Returns the image of a block in Anthropic's format as a `data:` URL.

    Args:
        block: {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}.
        where: Name of the block in an error.

    Raises:
        ApiError: It has another form or another source.
    """
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind in ("url", "file"):
        message = f"{where} has a source of type {kind}, and this server fetches none; send the image as base64"
        raise ApiError(400, message, "messages", "unsupported_value")
    if not isinstance(source, Mapping) or kind != "base64" or not isinstance(source.get("data"), str):
        message = f"{where} must have a source with type base64, media_type and data"
        raise ApiError(400, message, "messages")
    if source.get("media_type") not in MEDIA_TYPES:
        message = f"{where} must have one of the media types {', '.join(MEDIA_TYPES)}"
        raise ApiError(400, message, "messages", "unsupported_value")
    return f"{URL}{source['media_type']};base64,{source['data']}"


def decoded_images(urls: Sequence[str]) -> list[Any]:
    """Returns the PIL images of `data:` URLs.

    Raises:
        ApiError: One cannot be decoded or is too large, there are too many, or they are too large together.
    """
    if len(urls) > MAX_IMAGES:
        raise ApiError(400, f"the chat has {len(urls)} images; a request may have {MAX_IMAGES}", "messages")
    try:
        opened = [open_image(url, f"image {number} of the chat", MAX_PIXELS) for number, url in enumerate(urls, 1)]
        num_pixels = sum(image.width * image.height for image in opened)
        if num_pixels > MAX_ALL_PIXELS:
            raise ValueError(
                f"the images of the chat have {num_pixels:,} pixels together, at most {MAX_ALL_PIXELS:,} are read; "
                "send smaller images"
            )
        return [read_image(image, f"image {number} of the chat") for number, image in enumerate(opened, 1)]
    except ValueError as error:
        raise ApiError(400, str(error), "messages", "invalid_image") from error
