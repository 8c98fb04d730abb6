"""Models, prompts and settings of the steps that dev/trl_images.py records of TRL, and test_trl_images.py compares.

Models are tiny and have weights by name (`weight`), so that both sides have the same without storing them.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.vision_models import config_of

GOLDEN = Path(__file__).parents[1] / "golden"
MARKS = ["<pad>", "<s>", "<|im_end|>"]
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SIZES = {"vocab_size": 160, "num_hidden_layers": 2}


def config(family: str, text: dict[str, Any], vision: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of a model whose first special token after MARKS is that of images."""
    return config_of(family, {**SIZES, **text}, vision, {"image_token_id": 3, **whole})


def qwen(
    family: str, name: str, text: dict[str, Any], vision: dict[str, Any], processor: str = "Qwen3VL"
) -> dict[str, Any]:
    """Returns all that makes a small Qwen that sees images."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower = {"model_type": family, "depth": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, **vision}
    whole = {"architectures": [f"{name}ForConditionalGeneration"], "tie_word_embeddings": False}
    whole |= {"video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 64, "longest_edge": 1024}
    return {
        "marks": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "config": config(family, {"model_type": f"{family}_text", "rope_parameters": rope, **text}, tower, whole),
        "processor": {"processor_class": f"{processor}Processor"},
        "images": {**HALF, "image_processor_type": "Qwen2VLImageProcessor", **sizes},
        "video": {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 4},
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
    }


# Special tokens after MARKS, the image's first; config.json; settings of the processors; how an image is written.
FAMILIES: dict[str, dict[str, Any]] = {
    "idefics3": {
        "marks": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)],
        "config": config(
            "idefics3",
            {"tie_word_embeddings": False},
            {"model_type": "idefics3_vision"},
            {"scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0}
            | {"architectures": ["Idefics3ForConditionalGeneration"]},
        ),
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "images": {
            **HALF,
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
        "image": "<image>",
    },
    "gemma3": {
        "marks": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "config": config(
            "gemma3",
            {
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 8,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            {"model_type": "siglip_vision_model"},
            {"image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5, "pad_token_id": 0}
            | {"tie_word_embeddings": True, "architectures": ["Gemma3ForConditionalGeneration"]},
        ),
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "images": {**HALF, "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        "tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "image": "<start_of_image>",
    },
    "qwen2_5_vl": qwen("qwen2_5_vl", "Qwen2_5_VL", {}, {}, "Qwen2_5_VL"),
    "qwen2_vl": qwen("qwen2_vl", "Qwen2VL", {}, {}, "Qwen2VL"),
    "qwen3_vl": qwen("qwen3_vl", "Qwen3VL", {}, {"deepstack_visual_indexes": [0]}),
    "qwen3_5": qwen(
        "qwen3_5",
        "Qwen3_5",
        {
            "head_dim": 8,
            "partial_rotary_factor": 1.0,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {},
    ),
}
CHARACTERS = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]

# Widths and heights of each prompt's images, its question, and its completions with their rewards.
PROMPTS = [([(16, 16)], "What is it?"), ([(24, 16), (16, 16)], "And these two?")]
NUM_GENERATIONS = 4
COMPLETIONS = [
    "a cat",
    "a dog<|im_end|>",
    "nothing<|im_end|>",
    "",
    "two",
    "both are cats<|im_end|>",
    "x<|im_end|>",
    "yes",
]
REWARDS = [1.0, 0.25, 0.5, 0.0, 0.0, 2.0, 0.5, 0.25]
SETTINGS = {
    "per_device_train_batch_size": len(COMPLETIONS),
    "num_generations": NUM_GENERATIONS,
    "max_completion_length": 32,
    "max_steps": 1,
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "shuffle_dataset": False,
    "temperature": 0.9,
    "loss_type": "dapo",
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a weight, which its name and shape determine."""
    uniform = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32) * 2 - 1
    is_norm = "norm" in name.rpartition(".")[0].rpartition(".")[2] and name.endswith("weight")
    return uniform * np.float32(0.1) + 1 if is_norm else uniform * np.float32(0.3)


def pictures() -> list[list[Any]]:
    """Returns the images of each prompt, PIL, with random pixels."""
    from PIL import Image

    rng = np.random.default_rng(0)
    return [
        [Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]
        for sizes, _ in PROMPTS
    ]


def rows() -> list[dict[str, Any]]:
    """Returns the prompts as rows of a dataset."""
    return [
        {"prompt": [{"role": "user", "content": question}], "images": images}
        for images, (_, question) in zip(pictures(), PROMPTS, strict=True)
    ]


def make_folder(family: str, folder: Path) -> None:
    """Writes everything of a model but its weights."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    parts = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    marks = [*MARKS, *parts["marks"]]
    vocab = {token: index for index, token in enumerate([*marks, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(marks)
    tokenizer.decoder = decoders.Fuse()
    template = (
        "<s>{% for message in messages %}{{ message.role }}:"
        "{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}"
        "{{ IMAGE if part.type == 'image' else part.text }}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ).replace("IMAGE", repr(parts["image"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=template,
        extra_special_tokens=parts.get("tokens", {}),
    ).save_pretrained(folder)
    for name, content in {
        "config.json": {**parts["config"], "model_type": family},
        "processor_config.json": parts["processor"],
        "preprocessor_config.json": parts["images"],
        **({"video_preprocessor_config.json": parts["video"]} if "video" in parts else {}),
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2))
