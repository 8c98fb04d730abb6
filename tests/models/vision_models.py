"""Small models that see images, theirs and ours, and their logits for the same prompts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.models.attention import attend
from groupax.models.decoder import ImageInputs, PassOptions, forward, head_weights
from groupax.models.layers import vocabulary_logits
from groupax.models.recurrent import empty_state
from groupax.models.vision.placement import image_blocks, make_image, place_images
from groupax.models.vision.processing import cut_patches
from groupax.models.vision.tower import batch_images, encode_images

VOCAB, IMAGE, VIDEO = 96, 95, 94
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIGLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": {},
    "qwen3_vl_moe": MIXTURE,
    "qwen3_5": {**DELTA, "head_dim": 16},
    "qwen3_5_moe": {**DELTA, "head_dim": 16, **MIXTURE, "shared_expert_intermediate_size": 20},
}
QWEN = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
}


def config_of(family: str, text: dict[str, Any], vision: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of a small model."""
    if family in ("smolvlm", "idefics3"):
        own = {"text_config": {"model_type": "llama", **TEXT, **text}, "vision_config": {**SIGLIP, **vision}}
        return {"model_type": family, **own, "image_token_id": IMAGE, **whole}
    if family == "gemma3":
        own = {"text_config": {**TEXT, **text}, "vision_config": {**SIGLIP, "vision_use_head": False, **vision}}
        return {"model_type": family, **own, "image_token_index": IMAGE, "mm_tokens_per_image": 4, **whole}
    levels = {"deepstack_visual_indexes": [0, 2]} if family.startswith("qwen3_vl") else {}
    own_text = {**TEXT, "rope_parameters": {**QWEN_ROPE}, **QWEN_TEXT[family], **text}
    own = {"text_config": own_text, "vision_config": {**QWEN, **levels, **vision}}
    return {"model_type": family, **own, "image_token_id": IMAGE, "video_token_id": VIDEO, **whole}


def torch_model(hf: dict[str, Any], seed: int = 0) -> Any:
    """Returns their model with random weights, none of which is zero."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = {key: value for key, value in hf.items() if key != "model_type"}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(hf["model_type"], **settings)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape))
    return model.eval()


def random_image(config: Any, rng: np.random.Generator, side: int | None = None) -> Any:
    """Returns an image of random patches: tiles of the model's size, or of a random grid."""
    tower, merge = config.tower, config.projector.merge
    if config.has_grid_positions:
        rows, columns = merge * rng.integers(1, 4, 2)
        return make_image(rng.normal(size=(1, rows * columns, tower.patch_dims)), (int(rows), int(columns)))
    tiles = 1 if config.sees_whole_images else int(rng.integers(1, 3))
    side = side or tower.positions_per_side * tower.patch_size
    return cut_patches(config, rng.normal(size=(tiles, tower.channels, side, side)).astype(np.float32))


def random_prompts(config: Any, seed: int = 0, counts: tuple[int, ...] = (1, 4, 0, 2), side: int | None = None) -> Any:
    """Returns prompts with these numbers of images, as pairs of token ids and images."""
    rng = np.random.default_rng(seed)
    prompts = []
    for count in counts:
        images = [random_image(config, rng, side) for _ in range(count)]
        ids: list[int] = rng.integers(3, 90, int(rng.integers(1, 5))).tolist()
        for image in images:
            tiles, patches, _ = image.patches.shape
            ids += [IMAGE] * (tiles * patches // config.patches_per_feature)
            ids += rng.integers(3, 90, int(rng.integers(1, 5))).tolist()
        prompts.append((np.array(ids), place_images(config, np.array(ids), images)))
    return prompts


def pixels_of(config: Any, image: Any) -> np.ndarray:
    """Returns the pixels of an image's tiles, the inverse of `cut_patches`."""
    (rows, columns), side, merge = image.grid, config.tower.patch_size, config.projector.merge
    shape = (rows // merge, columns // merge, merge, merge, config.tower.channels, side, side)
    blocks = image.patches.reshape(-1, *shape).transpose(0, 5, 1, 3, 6, 2, 4, 7)
    return blocks.reshape(len(image.patches), config.tower.channels, rows * side, columns * side)


def torch_inputs(config: Any, ids: np.ndarray, images: tuple[Any, ...]) -> dict[str, Any]:
    """Returns what their model reads for one prompt."""
    import torch

    inputs = {"input_ids": torch.tensor(ids)[None]}
    if not images:
        return inputs
    types = torch.tensor(ids == IMAGE)[None].long()
    if config.has_grid_positions:
        patches = np.concatenate([image.patches[0] for image in images])
        grids = torch.tensor([(1, *image.grid) for image in images])
        return {**inputs, "pixel_values": torch.tensor(patches), "image_grid_thw": grids, "mm_token_type_ids": types}
    pixels = torch.tensor(np.concatenate([pixels_of(config, image) for image in images]))
    if config.sees_whole_images:
        return {**inputs, "pixel_values": pixels, "token_type_ids": types}
    return {**inputs, "pixel_values": pixels[None]}


def torch_logits(model: Any, config: Any, prompts: Any) -> list[np.ndarray]:
    """Returns their logits of each prompt, computed by itself."""
    import torch

    with torch.no_grad():
        inputs = [torch_inputs(config, ids, placed.images) for ids, placed in prompts]
        return [model(**each).logits[0].float().numpy() for each in inputs]


@partial(jax.jit, static_argnums=0)
def _features(config: Any, params: Any, batch: Any) -> jax.Array:
    return encode_images(config.vision, params["vision"], batch)


@partial(jax.jit, static_argnums=0)
def _logits(config: Any, params: Any, tokens: Any, positions: Any, starts: Any, blocks: Any, images: Any) -> jax.Array:
    B, T = tokens.shape

    def attend_rows(attn: Any, cache: None, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, starts, attn, blocks).reshape(B * T, *q.shape[2:]), cache

    def recur(recurrence: Any, cache: None, inputs: Any) -> Any:
        inputs = jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), inputs)
        out, _ = recurrence.scan(empty_state(config, B), inputs, jnp.arange(T)[None] >= starts[:, None])
        return out.reshape(B * T, *out.shape[2:]), cache

    flat = positions.reshape(*positions.shape[:-2], -1)
    options = PassOptions(images=images, recur=recur)
    hidden = forward(config, params, tokens.reshape(-1), flat, attend_rows, options=options).hidden
    return vocabulary_logits(hidden.reshape(B, T, -1), head_weights(params), config.logit_softcap)


def our_logits(model: Any, prompts: Any, length: int | None = None) -> list[np.ndarray]:
    """Returns our logits of each prompt, all in one left-padded rectangle, with all their images in one batch."""
    vision = model.config.vision
    batch, firsts = batch_images(vision, [image for _, placed in prompts for image in placed.images])
    firsts = iter(firsts)
    B, T = len(prompts), length or max(len(ids) for ids, _ in prompts)
    tokens, index, blocks = np.zeros((B, T), np.int32), np.full((B, T), -1, np.int32), np.full((B, T), -1, np.int32)
    positions = np.zeros((3, B, T), np.int32)
    for row, (ids, placed) in enumerate(prompts):
        of = [
            first + np.arange(num)
            for first, num in zip([next(firsts) for _ in placed.images], placed.num_tokens, strict=True)
        ]
        rows = np.concatenate([np.zeros(0, np.int32), *of]).astype(np.int32)
        own = slice(T - len(ids), T)
        tokens[row, own] = ids
        index[row, own] = np.where(placed.feature_index < 0, -1, np.append(rows, 0)[placed.feature_index])
        blocks[row, own] = image_blocks(placed.feature_index)
        positions[:, row, own] = np.arange(len(ids)) if placed.positions is None else placed.positions
    features = _features(model.config, model.params, batch)
    images = ImageInputs(features, jnp.asarray(index.reshape(-1)))
    starts = jnp.asarray([T - len(ids) for ids, _ in prompts])
    own_positions = jnp.asarray(positions if vision.has_grid_positions else positions[0])
    own_blocks = jnp.asarray(blocks) if vision.sees_whole_images else None
    out = _logits(model.config, model.params, jnp.asarray(tokens), own_positions, starts, own_blocks, images)
    return [np.asarray(each)[T - len(ids) :] for each, (ids, _) in zip(out, prompts, strict=True)]
