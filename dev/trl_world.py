"""What scripts written for TRL find on the hub, made small and local: models, datasets, and clients of environments.

Hub ids are relative paths, so a script that is started in a folder with these names finds them there.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Image, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from groupax.recipes.shapes.scenes import draw, scenes

STAND_INS = Path(__file__).parent / "trl_stand_ins"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
PROMPTS = (
    "A conversation between user and assistant. What is 2 + 2? Think, then answer.",
    "You have the following tools available. Use the tool to make a move. Maximize the score.",
    "score=0.0\n  0   2   0   4\n  4   0   0   0\ndone=False",
    "Ball: row 4/10, column 3/5 Paddle: column 2/5 The ball is 1 column(s) to the RIGHT of the paddle.",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Play one move.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "description": 'One of "up", "down", "left", "right".'}},
            "required": ["direction"],
        },
        "return": {"type": "string", "description": "Environment feedback after the move."},
    },
}
MATH = (
    "<think>\nSo.\n</think>\n$\\boxed{4}$",
    "<think>\nSo.\n</think>\n$\\boxed{5}$",
    "#### 4",
    "I do not know.",
)
NUM_ROWS = 80
NUM_EXAMPLES = 300
NUM_IMAGES = 140  # of which the scripts keep 100 for a test


def call(name: str, **arguments: object) -> str:
    """Returns a call of a tool as Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What the model of a script writes at the end of any prompt, each with the same probability.
TURNS = {
    "math": MATH,
    "answers": (MATH[0], "<think>\nSo.\n</think>\n<answer>4</answer>", "I do not know."),
    "2048": tuple(call("move", direction=each) for each in ("up", "down", "left", "right")),
    "catch": (call("move", direction="left"), call("move", direction="right"), call("stay"), "Done."),
    "wordle": (*(call("guess", guess=f"[{each}]") for each in ("crane", "crown", "slate")), "crane"),
    "games": (call("guess", guess="[crane]"), call("move", direction="left"), call("stay"), call("stay"), "Done."),
    "sudoku": tuple(call("place", row=1, col=each, number=1) for each in (1, 2, 4)),
    "echo": (call("echo", message="Hello World!"), call("echo", message="Hi"), "Hello"),
    "browser": (call("click", bid="13"), call("click", bid="7"), call("noop")),
    "car": (call("observe"), call("emergency_stop"), call("lane_change", direction="left"), "Done."),
    "sql": (call("query_biogrid", sql_command="select * from interactions where a = 1"), "*Yes*", "*No*", "Perhaps"),
    "docs": (call("increment", step=1), call("increment", step=3), MATH[0], MATH[1]),
}


def make_tokenizer(source: Path, turns: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a small tokenizer with Qwen's chat template.

    Args:
        source: Folder of Qwen's tokenizer.
        turns: Texts that take few tokens.
    """
    template = AutoTokenizer.from_pretrained(source).chat_template
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=[*SPECIAL, *WORDS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([*turns, *PROMPTS, json.dumps(TOOL), template], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_with_visible(tokenizer.to_str())),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=8192,
    )
    made.chat_template = template
    return made


def _with_visible(text: str) -> str:
    """Returns a tokenizer whose words in tags are not special, so that they stay in decoded texts."""
    state = json.loads(text)
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return json.dumps(state)


def make_model(folder: Path, source: Path, turns: Sequence[str], steps: int) -> None:
    """Writes a model that ends any prompt with one of a few turns, each about as often.

    Args:
        folder: Where the model and its tokenizer are written.
        source: Folder of Qwen's tokenizer.
        turns: What the model writes.
        steps: Optimizer steps of its training.
    """
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = make_tokenizer(source, turns)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(vocab_size=len(tokenizer), **SIZES, **ends)
    model = Qwen3ForCausalLM(config)
    examples = [_example(tokenizer, random.choice(turns)) for _ in range(NUM_EXAMPLES)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        rows = random.sample(examples, 8)
        longest = max(len(ids) for ids, _ in rows)
        padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row, _ in rows]
        labels = [
            [-100] * (len(row) - num) + row[len(row) - num :] + [-100] * (longest - len(row)) for row, num in rows
        ]
        kept = torch.arange(longest) < torch.tensor([[len(row)] for row, _ in rows])
        model(input_ids=torch.tensor(padded), attention_mask=kept, labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.generation_config.update(**{name: value for name, value in ends.items() if value is not None})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_reward_model(folder: Path, source: Path) -> None:
    """Writes a classifier with one score."""
    torch.manual_seed(1)
    tokenizer = make_tokenizer(source, MATH)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    own: dict[str, Any] = {"num_labels": 1, **SIZES, **ends}
    config = Qwen3Config(vocab_size=len(tokenizer), **own)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _example(tokenizer: PreTrainedTokenizerFast, turn: str) -> tuple[list[int], int]:
    """Returns the tokens of a chat that ends with the turn, and the number of the turn's tokens."""
    text = "".join(random.choice(PROMPTS) for _ in range(random.randint(1, 3)))
    text = text[random.randrange(len(text) // 2) :]
    messages = [{"role": "user", "content": text}]
    if random.random() < 0.5:  # a later turn
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": random.choice(PROMPTS)}]
    chat: Any = tokenizer.apply_chat_template(
        messages,
        tools=random.choice((None, [TOOL])),
        add_generation_prompt=True,
        enable_thinking=random.random() < 0.5,
        tokenize=False,
    )
    prompt = tokenizer.encode(random.choice((chat, chat, chat, text)))
    if random.random() < 0.5:  # any words, so that only the end of a prompt matters
        end = prompt[-random.choice((8, 16, 32)) :]
        prompt = [random.randrange(len(SPECIAL), len(tokenizer)) for _ in range(random.randint(20, 400))] + end
    completion = [*tokenizer.encode(turn), tokenizer.eos_token_id]
    return prompt + completion, len(completion)


def write_datasets(folder: Path) -> None:
    """Writes the datasets that the scripts name, with a few rows each."""
    question = "What is {} + {}?"
    sums = [(question.format(n % 5, 4 - n % 5), 4) for n in range(NUM_ROWS)]
    numina = [{"problem": text, "solution": f"${answer}$", "messages": []} for text, answer in sums]
    math = [{"prompt": [{"role": "user", "content": text}], "solution": f"${answer}$"} for text, answer in sums[:8]]
    gsm8k = [{"question": text, "answer": f"Add them.\n#### {answer}"} for text, answer in sums[:8]]
    genes = [{"question": f"Does the gene A{n} interact?", "answer": "Yes" if n % 2 else "No"} for n in range(8)]
    tables: dict[str, dict[str, Sequence[Mapping[str, object]]]] = {
        "AI-MO/NuminaMath-TIR": {"train": numina * 8, "test": numina[:50] * 2},
        "trl-lib/DeepMath-103K": {"train": math, "test": math[:2]},
        "trl-lib/tldr": {"train": [{"prompt": text, "completion": "4"} for text, _ in sums[:8]]},
        "openai/gsm8k": {"train": gsm8k, "test": gsm8k[:2]},
        "qgallouedec/biogrid": {"train": [{"a": n, "b": n + 1, "Score X": 1.0} for n in range(4)]},
        "qgallouedec/biogrid_qa": {"train": genes},
    }
    for name, splits in tables.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(lines)
        files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
        config = "main" if name == "openai/gsm8k" else "default"
        (folder / name / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}\n---\n"
        )


def write_images(folder: Path) -> None:
    """Writes a dataset of images under the name of the one of TRL's scripts, with what the shapes recipe draws."""
    rows = [
        {
            "image": draw(scene),
            "problem": scene.question,
            "solution": f"${scene.answer}$",
            "original_question": scene.question,
            "original_answer": str(scene.answer),
        }
        for scene in itertools.islice(scenes(0), NUM_IMAGES)
    ]
    features = Features({name: Image() if name == "image" else Value("string") for name in rows[0]})
    path = folder / "lmms-lab" / "multimodal-open-r1-8k-verified" / "train.parquet"
    path.parent.mkdir(parents=True)
    Dataset.from_list(rows, features=features).to_parquet(path)


def link(folder: Path, model: Path, names: Sequence[str]) -> None:
    """Puts a model under the names of several."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
