"""Folders of small models that see images, images, and runs that train on them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax.models.families import read_config
from groupax.models.params import init_params
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import save_model
from groupax.parallel.mesh import make_mesh
from tests.models.vision_models import DELTA, MIXTURE, SIGLIP

QWENS = ("qwen3_5", "qwen3_vl", "qwen3_vl_moe")
SPECIAL = {
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
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
TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
QWEN = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
}
QWEN_TEXT = {"qwen3_vl": {}, "qwen3_vl_moe": MIXTURE, "qwen3_5": {**DELTA, "layer_types": DELTA["layer_types"][:2]}}


def a_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the family's special tokens and a chat template."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL[family]])
    end = SPECIAL[family][-1]
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    made.chat_template = TEMPLATE.replace("PLACE", PLACE[family])
    return made


def _image_processor(family: str) -> Any:
    if family == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
        return SmolVLMImageProcessorPil(do_image_splitting=False, **sizes)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": 1024}
    return Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)


def hf_config(family: str, tokenizer: Any) -> dict[str, Any]:
    """Returns the `config.json` of a small model."""
    image, video = (tokenizer.convert_tokens_to_ids(name) for name in SPECIAL[family][:2])
    if family == "smolvlm":
        own = {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SIGLIP}
        return {"model_type": family, **own, "image_token_id": image, "tie_word_embeddings": True}
    if family == "gemma3":
        text = {**TEXT, "sliding_window": 24, "query_pre_attn_scalar": 8, "model_type": "gemma3_text"}
        own = {"text_config": text, "vision_config": {**SIGLIP, "vision_use_head": False}}
        return {"model_type": family, **own, "image_token_index": image, "mm_tokens_per_image": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    levels = {} if family == "qwen3_5" else {"deepstack_visual_indexes": [0]}
    text = {**TEXT, "rope_parameters": rope, **QWEN_TEXT[family]}
    own = {"text_config": text, "vision_config": {**QWEN, **levels}}
    return {"model_type": family, **own, "image_token_id": image, "video_token_id": video}


def model_folder(family: str, folder: Path, scale: float = 5.0) -> Path:
    """Writes a small model with random weights, its tokenizer and the settings of its image processor."""
    tokenizer = a_tokenizer(family)
    hf = hf_config(family, tokenizer)
    config, mesh = read_config(hf), make_mesh((1, 1, 1, 1, 1), jax.devices()[:1])
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, init_params(config, jax.random.key(0), mesh))
    save_model(Model(config, params, mesh, hf, {}), folder, tokenizer)
    _image_processor(family).save_pretrained(folder)
    return folder


def an_image(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """Returns an image of random pixels."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (*size, 3)).astype(np.uint8))
