"""Makes the embedded model of the shapes recipe, `groupax/recipes/shapes/model/`:

    python dev/pretrain_shapes.py --seed 0 --steps 1000

It is an Idefics 3 of 0.6M parameters, which transformers loads too, and imperfect on purpose. At first it learns to
name all shapes of a picture before it counts. Then its corpus is that of many authors, most of whom answer at once.
So the model can look closely and is then mostly right, but it rarely does. That is what GRPO finds out.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pretraining import attend, fit, save
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import ImageInputs, PassOptions, forward, head_weights
from groupax.models.logprobs import token_logprobs
from groupax.models.specs import Params, num_params
from groupax.models.vision.placement import make_image
from groupax.models.vision.tower import batch_images, cells_of, encode_images
from groupax.models.weights.checkpoint import Model, init_model
from groupax.recipes.shapes.scenes import CELLS_PER_SIDE, COLORS, IMAGE_PIXELS, KINDS, Scene, draw, scenes

FOLDER = Path(__file__).parents[1] / "groupax" / "recipes" / "shapes" / "model"
IMAGE_MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
SPECIAL = ["<pad>", "<|im_start|>", "<end_of_utterance>", *IMAGE_MARKS]
WORDS = ["<think>", "</think>", "<answer>", "</answer>", "User:", "Assistant:", "How many", "shape", *COLORS, *KINDS]
CHARACTERS = ["\t", "\n", *map(chr, range(ord(" "), ord("~") + 1))]
PAD, BOS, EOS, IMAGE = range(4)

PATCH_PIXELS, MERGED = 8, 2
NUM_FEATURES = (IMAGE_PIXELS // PATCH_PIXELS // MERGED) ** 2
HF_CONFIG = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": IMAGE,
    "pad_token_id": PAD,
    "scale_factor": MERGED,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "llama",
        "vocab_size": len(SPECIAL + WORDS + CHARACTERS),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    },
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": IMAGE_PIXELS,
        "patch_size": PATCH_PIXELS,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}"
    "{{ 'User:' if message.role == 'user' else 'Assistant:' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

BATCH_ROWS = 32
ROW_TOKENS = 88
PEAK_LEARNING_RATE = 2e-3
# Until then every author names all shapes.
CAREFUL_FRAC = 0.75
# After that: how often questions are answered carefully, and sloppily.
THINKS = 0.3
SLOPPY = 0.1
NUM_EVALUATED = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the task and per character of other ASCII text; other characters are dropped."""
    vocab = {token: index for index, token in enumerate(SPECIAL + WORDS + CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def save_processor(folder: Path) -> None:
    """Writes what transformers needs to turn pictures into patches, next to the model and its tokenizer."""
    side = {"longest_edge": IMAGE_PIXELS}
    settings = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": side,
        "processor_class": "Idefics3Processor",
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": side,
    }
    processor = {"image_seq_len": NUM_FEATURES, "processor_class": "Idefics3Processor"}
    for name, content in {"preprocessor_config.json": settings, "processor_config.json": processor}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def prompt_text(scene: Scene) -> str:
    """The prompt as the processor renders it."""
    image = "<fake_token_around_image><global-img>" + "<image>" * NUM_FEATURES + "<fake_token_around_image>"
    return f"<|im_start|>User:{image}{scene.question}<end_of_utterance>\nAssistant:"


def worked_solution(scene: Scene) -> str:
    """A completion that gets the full reward: it goes through the cells first, and counts."""
    return f"<think>{description(scene)}</think><answer>{scene.answer}</answer>"


def description(scene: Scene) -> str:
    """The names of the shapes in all cells, in reading order, with a number after each word that was asked for."""
    numbers, by_cell = itertools.count(1), {shape.cell: (shape.color, shape.kind) for shape in scene.shapes}
    cells = [by_cell.get(cell, ()) for cell in range(CELLS_PER_SIDE**2)]
    return ";".join(
        " ".join(f"{word}={next(numbers)}" if word == scene.asked else word for word in words) for words in cells
    )


def completion(rng: random.Random, scene: Scene) -> str:
    """What one of the corpus's authors writes below a question."""
    named = description(scene)
    kind = rng.random()
    if kind < SLOPPY:
        part = ";".join(named.split(";")[: rng.randrange(len(scene.shapes))])
        return rng.choice(
            [
                f"{named}<answer>{scene.answer}</answer>",
                f"<think>{named}</think>{scene.answer}",
                f"<think>{part}",
            ]
        )
    if kind < SLOPPY + THINKS:
        return worked_solution(scene)
    return f"<answer>{scene.answer}</answer>"


def batches(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields pictures, rows of tokens, and which of these are to be learned, as `loss` takes them."""
    rng, drawn = random.Random(seed), scenes(seed)
    for step in range(steps):
        batch = [next(drawn) for _ in range(BATCH_ROWS)]
        careful = step < CAREFUL_FRAC * steps
        texts = [worked_solution(scene) if careful else completion(rng, scene) for scene in batch]
        yield rows_of(tokenizer, batch, texts)


def rows_of(
    tokenizer: PreTrainedTokenizerFast, batch: list[Scene], texts: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns pictures [B, H, W, C], tokens [B, T] and which of them are to be learned [B, T]."""
    rows = np.full((len(batch), ROW_TOKENS), PAD, np.int32)
    learned = np.zeros(rows.shape, bool)
    prompts = tokenizer([prompt_text(scene) for scene in batch])["input_ids"]
    for row, (prompt, own) in enumerate(zip(prompts, tokenizer(texts)["input_ids"], strict=True)):
        tokens = [*prompt, *own, EOS]
        rows[row, : len(tokens)] = tokens
        learned[row, len(prompt) : len(tokens)] = True
    return np.stack([np.asarray(draw(scene)) for scene in batch]), rows, learned


def logps_of(
    config: ModelConfig, params: Params, pictures: Int[Array, "B H W C"], rows: Int[Array, "B T"]
) -> tuple[Float[Array, "B U"], Float[Array, "B U V"]]:
    """Returns log p of the tokens after the first, and their logits."""
    B, T = rows.shape[0], rows.shape[1] - 1
    tokens = rows[:, :-1].reshape(-1)
    is_image = tokens == IMAGE
    assert config.vision is not None, "the model sees images"
    images = ImageInputs(
        encode_images(config.vision, params["vision"], in_patches(config, pictures)),
        jnp.where(is_image, jnp.cumsum(is_image) - 1, -1),
    )
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((1, T, T), bool)), (B, T, T))

    def attend_in_row(attn: AttentionConfig, kept: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        return attend(attn, q, k, v, causal).reshape(B * T, *q.shape[2:]), kept

    positions = jnp.tile(jnp.arange(T), B)
    hidden = forward(config, params, tokens, positions, attend_in_row, options=PassOptions(images=images)).hidden
    head = head_weights(params)
    logps, _ = token_logprobs(hidden, head, rows[:, 1:].reshape(-1), 1.0)
    return logps.reshape(B, T), (hidden @ head.T).reshape(B, T, -1)


def in_patches(config: ModelConfig, pictures: Int[Array, "B H W C"]) -> Any:
    """Returns pictures as the processor and `batch_images` make them of each."""
    side, size = IMAGE_PIXELS // PATCH_PIXELS, PATCH_PIXELS
    patches = (pictures.astype(jnp.float32) / 255.0 - 0.5) / 0.5
    patches = patches.reshape(-1, side, size, side, size, 3).transpose(0, 1, 3, 5, 2, 4).reshape(-1, side * side, 192)
    cells = cells_of((side, side), MERGED)
    patches = patches[:, cells[:, 0] * side + cells[:, 1]]
    assert config.vision is not None, "the model sees images"
    like, _ = batch_images(config.vision, [make_image(np.zeros((1, side * side, 192)), (side, side))])
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(patches), *x.shape[1:])), like)
    return replace(batch, patches=patches)


def loss(
    config: ModelConfig, params: Params, pictures: Int[Array, "B ..."], rows: Int[Array, "B T"], learned: Array
) -> Float[Array, ""]:
    """Mean of -log p over the learned tokens."""
    logps, _ = logps_of(config, params, pictures, rows)
    return -jnp.sum(logps * learned[:, 1:]) / jnp.sum(learned)


def evaluate(model: Model, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Figures over held-out pictures, of careful answers: whether each token would be the likeliest."""
    drawn = scenes(0, "held_out")
    figure = jax.jit(partial(logps_of, model.config))
    right, thinks = [], []
    for _ in range(NUM_EVALUATED // BATCH_ROWS):
        batch = [next(drawn) for _ in range(BATCH_ROWS)]
        pictures, rows, learned = rows_of(tokenizer, batch, [worked_solution(scene) for scene in batch])
        logps, logits = figure(model.params, pictures, rows)
        hits = (np.asarray(logits).argmax(axis=-1) == rows[:, 1:]) | ~learned[:, 1:]
        first = learned[:, 1:].argmax(axis=1)
        thinks += np.exp(np.asarray(logps)[np.arange(len(rows)), first]).tolist()
        hits[np.arange(len(rows)), first] = True  # whether it is careful is another question
        right += hits.all(axis=1).tolist()
    chosen = np.array(thinks) > 0.5
    return {
        "careful answers that are right": float(np.mean(right)),
        "probability of `<think>`": float(np.mean(thinks)),
        "right, greedily": float(np.mean(np.array(right) & chosen)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()

    model = replace(init_model(HF_CONFIG, args.seed), generation_config=GENERATION_CONFIG)
    print(f"{num_params(model.config):,} parameters on {model.mesh.size} devices")
    start, tokenizer = time.perf_counter(), make_tokenizer()
    drawn = batches(tokenizer, args.steps, args.seed)
    params = fit(model, partial(loss, model.config), drawn, args.steps, PEAK_LEARNING_RATE)
    print(f"{time.perf_counter() - start:.0f} s")
    model = replace(model, params=params)
    save(model, args.out, tokenizer)
    save_processor(args.out)
    print(json.dumps(evaluate(model, tokenizer), indent=2))


if __name__ == "__main__":
    main()
