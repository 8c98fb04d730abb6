"""Makes the embedded model of the arithmetic recipe, `groupax/recipes/arithmetic/model/`:

    python dev/pretrain_arithmetic.py --seed 0 --steps 3000

The model is imperfect on purpose. Its corpus mixes kinds of completions as a crawl of many authors would: most
state the (true) answer at once, some reason step by step, some are sloppy. So the model can reason and is then
mostly right, but it rarely does. That is what GRPO finds out.
"""

import argparse
import itertools
import random
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key
from pretraining import Corpus, attend, save, train
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import forward, head_weights
from groupax.models.specs import Params, num_params
from groupax.models.weights.checkpoint import Model, init_model, load_model
from groupax.parallel.mesh import DATA
from groupax.recipes.arithmetic.problems import PROMPT, expressions, generate, solve, worked_steps
from groupax.rewards.formats import think_answer_correct, think_answer_format

FOLDER = Path(__file__).parents[1] / "groupax" / "recipes" / "arithmetic" / "model"
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = ["\t", "\n", *map(chr, range(ord(" "), ord("~") + 1))]
PAD, BOS, EOS = range(3)

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SPECIAL + TAGS + CHARACTERS),
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 352,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}

BATCH_ROWS = 64
ROW_TOKENS = 64
PEAK_LEARNING_RATE = 3e-3

# Expressions with parentheses are reasoned through this often, the others that often.
THINKS = {True: 0.62, False: 0.10}
SLOPPY = 0.13
# Of the reasoned completions: how many have a slip in the last step.
SLIPS = 0.02

NUM_EVALUATED = 500
MAX_COMPLETION = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ASCII text and per tag; other characters are dropped."""
    vocab = {token: index for index, token in enumerate(SPECIAL + TAGS + CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=HF_CONFIG["max_position_embeddings"],
    )


def completion(rng: random.Random, expression: str) -> str:
    """What one of the corpus's authors writes below a problem."""
    answer = solve(expression)
    kind = rng.random()
    if kind < SLOPPY:
        steps = worked_steps(expression)
        return rng.choice(
            [
                f"{';'.join(steps)}<answer>{answer}</answer>",
                f"<think>{';'.join(steps)}</think>{answer}",
                f"<think>{';'.join(steps[: rng.randrange(len(steps))])}",
            ]
        )
    if kind < SLOPPY + THINKS["(" in expression]:
        solution = f"<think>{';'.join(worked_steps(expression))}</think><answer>{solve(expression)}</answer>"
        return slip(rng, solution, answer) if rng.random() < SLIPS else solution
    return f"<answer>{answer}</answer>"


def slip(rng: random.Random, solution: str, answer: str) -> str:
    """The same with a wrong result of the last step."""
    wrong = int(answer) + rng.choice([1, 10])
    return solution.replace(f"={answer}</think><answer>{answer}<", f"={wrong}</think><answer>{wrong}<")


def make_corpus(tokenizer: PreTrainedTokenizerFast, num_rows: int, seed: int) -> Corpus:
    """Documents one after the other, cut into rows, of which completions and their ends are to be learned."""
    rng = random.Random(seed)
    problems = expressions(seed)
    rows: list[int] = []
    learned: list[bool] = []
    while len(rows) < num_rows * ROW_TOKENS:
        batch = list(itertools.islice(problems, 10_000))
        prompts = [PROMPT.format(expression) for expression in batch]
        texts = [
            prompt + completion(rng, expression) + "<eos>" for prompt, expression in zip(prompts, batch, strict=True)
        ]
        for prompt, tokens in zip(prompts, tokenizer(texts)["input_ids"], strict=True):
            rows += tokens
            num_given = len(prompt) + 1  # a character is a token, and <bos>
            learned += [False] * num_given + [True] * (len(tokens) - num_given)
    shape = (num_rows, ROW_TOKENS)
    ids = np.resize(np.array(rows, np.int32), shape)
    positions = np.broadcast_to(np.arange(ROW_TOKENS, dtype=np.int32), shape)
    return Corpus(ids, np.resize(np.array(learned), shape), np.cumsum(ids == BOS, axis=1, dtype=np.int32), positions)


@partial(jax.jit, static_argnames=("config", "temperature"))
def sample(
    config: ModelConfig, params: Params, prompts: Int[Array, "B S"], key: Key[Array, ""], temperature: float
) -> Int[Array, "B T"]:
    """Continue prompts that are padded on the right; the most likely tokens at temperature 0."""
    B, S = prompts.shape
    T = S + MAX_COMPLETION
    given = jnp.pad(prompts, ((0, 0), (0, MAX_COMPLETION)), constant_values=PAD)
    cache = [jnp.zeros((2, B, T, config.num_kv_heads, config.head_dim)) for _ in range(config.num_layers)]

    def step(carry: tuple[Array, list[Array]], t: Array) -> tuple[tuple[Array, list[Array]], Array]:
        tokens, cache = carry

        def attend_cached(attn: AttentionConfig, kept: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            kept = kept.at[:, :, t].set(jnp.stack([k, v]))
            visible = jnp.broadcast_to(jnp.arange(T) <= t, (B, 1, T))
            return attend(attn, q[:, None], kept[0], kept[1], visible)[:, 0], kept

        hidden, cache, _ = forward(config, params, tokens, jnp.full(B, t), attend_cached, cache)
        logits = hidden @ head_weights(params).T
        if temperature:
            drawn = jax.random.categorical(jax.random.fold_in(key, t), logits / temperature)
        else:
            drawn = jnp.argmax(logits, axis=-1)
        ended = (tokens == EOS) | ((tokens == PAD) & (t > 0))
        next_given = given[:, jnp.minimum(t + 1, T - 1)]
        tokens = jnp.where(next_given != PAD, next_given, jnp.where(ended, PAD, drawn))
        return (tokens, cache), tokens

    _, tokens = jax.lax.scan(step, (given[:, 0], cache), jnp.arange(T - 1))
    return jnp.concatenate([given[:, :1], tokens.T], axis=1)


def evaluate(
    model: Model, tokenizer: PreTrainedTokenizerFast, temperature: float, num_samples: int = 1, opening: str = ""
) -> dict[str, float]:
    """Figures over held-out problems, each completed `num_samples` times; every completion begins with `opening`."""
    problems = generate(NUM_EVALUATED, seed=0, split="held_out")
    prompts = tokenizer(
        [problem["prompt"] + opening for problem in problems], padding=True, padding_side="right", return_tensors="np"
    )
    spread = NamedSharding(model.mesh, PartitionSpec(DATA))
    starts = prompts["attention_mask"].sum(axis=1)
    texts: list[str] = []
    lengths: list[int] = []
    for key in jax.random.split(jax.random.key(0), num_samples):
        rows = np.asarray(
            sample(model.config, model.params, jax.device_put(prompts["input_ids"], spread), key, temperature)
        )
        completions = [row[start:] for row, start in zip(rows, starts, strict=True)]
        texts += [opening + text for text in tokenizer.batch_decode(completions, skip_special_tokens=True)]
        lengths += [int((row != PAD).sum()) for row in completions]
    answers = [problem["answer"] for problem in problems] * num_samples
    reasoned = np.array(think_answer_format(texts))
    solved = np.array(think_answer_correct(texts, answers))
    right = np.array([re.findall(r"\d+", text)[-1:] == [answer] for text, answer in zip(texts, answers, strict=True)])
    per_problem = solved.reshape(num_samples, -1).mean(axis=0)
    return {
        "solved": float(solved.mean()),
        "reasoned": float(reasoned.mean()),
        "solved of the reasoned": float(solved.sum() / max(1, reasoned.sum())),
        "right in any form": float(right.mean()),
        "problems with mixed results": float(((per_problem > 0) & (per_problem < 1)).mean()),
        "mean tokens": float(np.mean(lengths)),
        "most tokens": float(np.max(lengths)),
    }


CARD = """# The arithmetic model

A Llama of {num_params:,} parameters in float32 that solves problems such as `8*(2+5)-17=`: 4 layers, hidden size 128,
4 heads, one token per character and per tag, {num_bytes:,} bytes of weights. It is the embedded default of groupax, and
imperfect on purpose: it can reason step by step and is then mostly right, but it rarely does.

    8*(2+5)-17=<think>2+5=7;8*7=56;56-17=39</think><answer>39</answer>

It was trained from scratch, on generated problems only, in {minutes:.0f} minutes on {num_devices} CPU cores, by

    python dev/pretrain_arithmetic.py --seed {seed} --steps {steps}

Measured on {num_evaluated} held-out problems (`generate({num_evaluated}, seed=0, split="held_out")`):

{table}

*Solved*: the completion is `<think>...</think><answer>...</answer>` and the answer is right. *Reasoned*: it has that
form. *Right in any form*: the last number in it is the answer. *Mixed results*: some of a problem's samples are
solved and some are not. The last column lets every completion begin with `<think>`.
"""


def table(columns: dict[str, dict[str, float]]) -> str:
    """Figures side by side in Markdown."""
    header = ["", *columns]
    names = next(iter(columns.values()))
    rows = [[name, *(f"{column[name]:.3g}" for column in columns.values())] for name in names]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()

    model = replace(init_model(HF_CONFIG, args.seed), generation_config=GENERATION_CONFIG)
    print(f"{num_params(model.config):,} parameters on {model.mesh.size} devices")
    start = time.perf_counter()
    corpus = make_corpus(make_tokenizer(), args.steps * BATCH_ROWS, args.seed)
    params = train(model, corpus, BATCH_ROWS, PEAK_LEARNING_RATE)
    minutes = (time.perf_counter() - start) / 60
    save(replace(model, params=params), args.out, make_tokenizer())

    model, tokenizer = load_model(args.out), AutoTokenizer.from_pretrained(args.out)
    figures = table(
        {
            "temperature 1, 8 samples": evaluate(model, tokenizer, 1.0, num_samples=8),
            "greedy": evaluate(model, tokenizer, 0.0),
            "temperature 1, 8 samples, after `<think>`": evaluate(model, tokenizer, 1.0, 8, "<think>"),
        }
    )
    print(figures)
    card = CARD.format(
        num_params=num_params(model.config),
        num_bytes=(args.out / "model.safetensors").stat().st_size,
        minutes=minutes,
        num_devices=model.mesh.size,
        seed=args.seed,
        steps=args.steps,
        num_evaluated=NUM_EVALUATED,
        table=figures,
    )
    (args.out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
