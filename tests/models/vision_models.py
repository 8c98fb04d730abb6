"""Small models that see images, theirs and ours, their folders, and their logits for the same prompts."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax import init_model, save_model
from groupax.models.attention import attend
from groupax.models.decoder import ImageInputs, PassOptions, forward, head_weights
from groupax.models.layers import vocabulary_logits
from groupax.models.recurrent import empty_state
from groupax.models.vision.placement import image_blocks, make_image, place_images
from groupax.models.vision.processing import cut_patches
from groupax.models.vision.tower import batch_images, encode_images
from tests.conftest import one_device_mesh

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
    "qwen2_5_vl": {},
    "qwen2_vl": {},
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
QWEN2 = {"depth": 3, "num_heads": 3, "patch_size": 4}
QWEN_TOWER: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN2,
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen2_vl": {**QWEN2, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    "qwen3_vl": {**QWEN, "deepstack_visual_indexes": [0, 2]},
    "qwen3_vl_moe": {**QWEN, "deepstack_visual_indexes": [0, 2]},
}


def config_of(family: str, text: dict[str, Any], vision: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of a small model."""
    if family in ("smolvlm", "idefics3"):
        own = {"text_config": {"model_type": "llama", **TEXT, **text}, "vision_config": {**SIGLIP, **vision}}
        return {"model_type": family, **own, "image_token_id": IMAGE, **whole}
    if family == "gemma3":
        own = {"text_config": {**TEXT, **text}, "vision_config": {**SIGLIP, "vision_use_head": False, **vision}}
        return {"model_type": family, **own, "image_token_index": IMAGE, "mm_tokens_per_image": 4, **whole}
    own_text = {**TEXT, "rope_parameters": {**QWEN_ROPE}, **QWEN_TEXT[family], **text}
    own = {"text_config": own_text, "vision_config": {**QWEN_TOWER.get(family, QWEN), **vision}}
    return {"model_type": family, **own, "image_token_id": IMAGE, "video_token_id": VIDEO, **whole}


QWENS = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = {
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", *ROWS, "<end_of_utterance>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>", "<end_of_turn>"],
    **{qwen: ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>"] for qwen in QWENS},
}
PLACE = {
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    **dict.fromkeys(QWENS, "<|vision_start|><|image_pad|><|vision_end|>"),
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def a_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the family's special tokens and a chat template."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL[family]])
    end, named = SPECIAL[family][-1], {"image_token": SPECIAL[family][0]}
    if family == "gemma3":
        named |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, extra_special_tokens=named)
    made.chat_template = TEMPLATE.replace("PLACE", PLACE[family])
    return made


def an_image_processor(family: str, *, splits: bool = False) -> Any:
    """Returns their image processor, which cuts images of SmolVLM into tiles if it splits them."""
    if family == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        sizes = {"size": {"longest_edge": 48 if splits else 16}, "max_image_size": {"longest_edge": 16}}
        return SmolVLMImageProcessorPil(do_image_splitting=splits, **sizes)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": 1024}
    return Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)


def two_layers(family: str, tokenizer: Any = None) -> dict[str, Any]:
    """Returns the `config.json` of a model with two layers and the tokenizer's vocabulary."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if family == "qwen3_5" else {}
    if tokenizer is None:
        return config_of(family, {"num_hidden_layers": 2, **kinds}, {}, {})
    image, video = (tokenizer.convert_tokens_to_ids(name) for name in SPECIAL[family][:2])
    ids = {"image_token_index" if family == "gemma3" else "image_token_id": image, "video_token_id": video}
    text = {"num_hidden_layers": 2, "vocab_size": 320, "tie_word_embeddings": True, **kinds}
    return config_of(family, text, {}, ids)


def model_folder(family: str, folder: Path, scale: float = 5.0) -> Path:
    """Writes a small model with random weights, its tokenizer and the settings of its image processor."""
    tokenizer, mesh = a_tokenizer(family), one_device_mesh()
    model = init_model(two_layers(family, tokenizer), 0, mesh=mesh)
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, model.params)
    save_model(replace(model, params=params), folder, tokenizer)
    an_image_processor(family).save_pretrained(folder)
    return folder


def an_image(seed: int, size: tuple[int, int] = (16, 16)) -> Any:
    """Returns an image of random pixels."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3)).astype(np.uint8))


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
