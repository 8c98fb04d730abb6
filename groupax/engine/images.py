"""Prompts and their images: what they are encoded to, their features and the places of their tokens."""

from collections.abc import Sequence as Many
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from groupax.core.types import PromptImages
from groupax.data.chat import render
from groupax.data.images import has_images, images_of, with_images, without_images
from groupax.data.tokenizer import encode_prompts
from groupax.engine.scheduler import Admission
from groupax.engine.sequence import Sequence
from groupax.models.attention import same_image
from groupax.models.decoder import ImageInputs
from groupax.models.vision.config import VisionConfig
from groupax.models.vision.placement import continued, image_blocks
from groupax.models.vision.processing import PromptEncoder
from groupax.models.vision.tower import FeatureCache
from groupax.parallel.pytree import pytree


def encoded_prompts(
    prompts: Any, tokenizer: Any, encoder: PromptEncoder | None
) -> tuple[list[np.ndarray], list[PromptImages | None]]:
    """Returns the token ids and the images of one prompt or a list of them: texts, lists of messages, or token ids.

    Raises:
        ValueError: Prompts are of several kinds, or need a tokenizer.
    """
    given = [prompts] if _is_one_prompt(prompts) else list(prompts)
    images: list[PromptImages | None] = [None] * len(given)
    texts = [p for p in given if isinstance(p, str) or (isinstance(p, list) and p and isinstance(p[0], dict))]
    if not texts:
        return [np.asarray(prompt, np.int32) for prompt in given], images
    if tokenizer is None:
        raise ValueError("a prompt that is a text or a list of messages needs a tokenizer; give the Engine one")
    if len(texts) < len(given):
        raise ValueError("give all prompts as text or messages, or all as token ids")
    shown = {} if encoder is None else {i: p for i, p in enumerate(given) if has_images({"prompt": p})}
    plain = iter(encode_prompts(tokenizer, [p for index, p in enumerate(given) if index not in shown]))
    ids = []
    for index in range(len(given)):
        if index in shown and encoder is not None:
            name, row = f"prompt {index}", with_images({"prompt": shown[index]}, f"prompt {index}")
            text = render(tokenizer, without_images(row["prompt"]), name, may_be_empty=True, with_images=True)
            encoded, images[index] = encoder.encode(text, images_of(row), is_rendered=True)
            ids.append(encoded)
        else:
            ids.append(next(plain))
    return ids, images


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (np.ndarray, jax.Array)):
        return prompts.ndim < 2
    if isinstance(prompts, (list, tuple)):
        return bool(prompts) and isinstance(prompts[0], (dict, int, np.integer))
    return isinstance(prompts, str)


@pytree
class AdmittedImages:
    """The images of P prompts that are admitted, and the places of their tokens; sharded over the data axes."""

    # features of each level (see `decoder.ImageInputs`); padding follows those of each shard
    features: Float[Any, "F levels D"]
    feature_index: Int[Any, "P S"]  # index on its device of each token's feature; -1 for text
    positions: Int[Any, "P S 3"] | None = None  # coordinates of each token's position; None where positions are columns
    # image of each token, of a model that sees whole images (`placement.image_blocks`); None for others
    blocks: Int[Any, "P S"] | None = None

    def inputs(self, row: Array, first: Array, size: tuple[int, int], positions: Array) -> tuple[ImageInputs, Array]:
        """Returns the image inputs of a piece of the prompts: `size` rows and columns from `row` and `first` on.

        Args:
            positions: Positions of its tokens in the sequence, which are returned where the images have no others.
        """
        index = lax.dynamic_slice(self.feature_index, (row, first), size).reshape(-1)
        if self.positions is not None:
            coordinates = lax.dynamic_slice(self.positions, (row, first, jnp.int32(0)), (*size, 3))
            positions = coordinates.reshape(-1, 3).T
        return ImageInputs(jnp.swapaxes(self.features, 0, 1), index), positions

    def in_same_image(self, row: Array, first: Array, size: tuple[int, int]) -> Bool[Array, "R M S"]:
        """Returns which columns belong to the same image as each column of a piece (see `inputs`)."""
        assert self.blocks is not None, "the model sees whole images"
        blocks = lax.dynamic_slice_in_dim(self.blocks, row, size[0])
        return same_image(lax.dynamic_slice_in_dim(blocks, first, size[1], axis=1), blocks)


def admitted_images(
    config: VisionConfig, cache: FeatureCache, params: dict[str, Any], admission: Admission, shape: tuple[int, int]
) -> AdmittedImages | None:
    """Returns the images of the prompts that are admitted, on the host; None if all of them are text.

    Args:
        shape: Number of rows for each shard's prompts, and number of columns.
    """
    num_prompts, num_columns = shape
    if not any(first.images for own in admission.firsts for first in own):
        return None
    num_shards = len(admission.firsts)
    index = np.full((num_shards * num_prompts, num_columns), -1, np.int32)
    positions = np.zeros((*index.shape, 3), np.int32) if config.has_grid_positions else None
    blocks = np.full(index.shape, -1, np.int32) if config.sees_whole_images else None
    features: list[list[np.ndarray]] = [[] for _ in range(num_shards)]
    counts = [0] * num_shards
    for row, first in admission.rows(num_prompts):
        size, shard = len(first.prompt) - 1, row // num_prompts
        own = slice(num_columns - size, None)
        if first.images is None:
            if positions is not None:
                positions[row, own] = np.arange(size)[:, None]
            continue
        placed = continued(first.images, size)
        index[row, own] = np.where(placed.feature_index < 0, -1, placed.feature_index + counts[shard])
        features[shard] += cache.features(params, first.images.images)
        counts[shard] += sum(first.images.num_tokens)
        if positions is not None:
            assert placed.positions is not None, "the model has positions in a grid"
            positions[row, own] = placed.positions.T
        if blocks is not None:
            blocks[row, own] = image_blocks(placed.feature_index)
    return AdmittedImages(joined_features(features), index, positions, blocks)


def joined_features(features: Many[Many[Float[np.ndarray, "levels _ D"]]]) -> Float[np.ndarray, "F levels D"]:
    """Returns the features of several shards as one array, of which each has an equal part with padding.

    The size of a part is a power of two, so that there are few programs.
    """
    counts = [sum(each.shape[1] for each in own) for own in features]
    size = 1 << max(0, max(counts) - 1).bit_length()
    first = next(each for own in features for each in own)
    joined = np.zeros((len(features) * size, first.shape[0], first.shape[2]), first.dtype)
    for shard, (own, count) in enumerate(zip(features, counts, strict=True)):
        if own:
            joined[shard * size : shard * size + count] = np.concatenate(own, axis=1).swapaxes(0, 1)
    return joined


def lookup_tokens(sequence: Sequence) -> Int[np.ndarray, "S"]:
    """Returns what the prompt of a sequence is looked up by: its tokens, and numbers below 0 for those of images.

    The numbers are those of the image's digest, so that equal tokens of different images are different.
    """
    tokens = np.asarray(sequence.prompt, np.int64)
    if sequence.images is None:
        return tokens
    tokens = tokens.copy()
    index = sequence.images.feature_index
    places = np.flatnonzero(index >= 0)
    for image, num in zip(sequence.images.images, sequence.images.num_tokens, strict=True):
        words = -1 - (np.frombuffer(bytes.fromhex(image.digest), ">i8").astype(np.int64) & np.int64(2**63 - 1) >> 1)
        tokens[places[:num]] = np.resize(words, num)
        places = places[num:]
    return tokens


def check_images(config: VisionConfig | None, sequence: Sequence) -> None:
    """Checks that a sequence has the images that its prompt's tokens stand for.

    Raises:
        ValueError: It has others, the model sees no images, or the prompt ends within an image.
    """
    images, prompt = sequence.images, np.asarray(sequence.prompt)
    if config is None:
        if images is not None:
            raise ValueError("a prompt has images, and the model reads text only; give a model that sees images")
        return
    is_image = np.isin(prompt, config.placeholder_ids)
    num, expected = int(is_image.sum()), 0 if images is None else sum(images.num_tokens)
    if num != expected:
        raise ValueError(
            f"a prompt has {num} tokens that stand for images ({', '.join(map(str, config.placeholder_ids))}), and its "
            f"{0 if images is None else len(images.images)} images have {expected} features"
        )
    if images is not None and not np.array_equal(continued(images, len(prompt)).feature_index >= 0, is_image):
        raise ValueError("the tokens of a prompt that stand for images are not where its images are")
    if is_image[-1]:
        raise ValueError("a prompt ends with an image; a text must follow it, such as the start of the answer")


def text_tokens(config: VisionConfig | None, logits: Float[Array, "B V"]) -> Bool[Array, "B V"] | None:
    """Returns which tokens may be sampled: none that stands for an image; None if there are no such tokens."""
    if config is None:
        return None
    text = np.ones(logits.shape[1], bool)
    text[[token for token in config.placeholder_ids if token < len(text)]] = False
    return jnp.broadcast_to(text[None], logits.shape)
