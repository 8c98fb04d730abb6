"""GSM8K with a LoRA adapter on a 4-bit base, from loading to the hub.

    python examples/gsm8k_qlora.py --model meta-llama/Llama-3.1-8B-Instruct --output_dir runs/gsm8k_qlora

Ten parts: load the base in 4 bits, put an adapter on it, data, rewards, train, evaluate, merge, save, quantize, push.
docs/coming_from_trl.md walks through them.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from groupax import GRPOConfig, GRPOTrainer, SamplingParams, load_model, save_model
from groupax.core.storage.hub import push_folder
from groupax.data.tokenizer import load_tokenizer

SYSTEM_PROMPT = """Respond in the following format, with nothing outside of the tags:
<thinking>
your reasoning
</thinking>
<answer>
a whole number
</answer>"""
FORMAT = re.compile(r"<thinking>\n.*?\n</thinking>\n<answer>\n.*?\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
WHOLE_NUMBER = re.compile(r"[+-]?\d[\d,]*")


def examples_in(source: str, split: str, num: int | None = None) -> list[dict[str, Any]]:
    """Prompts with their gold answers, from a folder with {train,test}.jsonl or from a hub id.

    Args:
        source: each row has a `question`, and an `answer` that ends with "#### number".
        split: train or test.
        num: the first so many rows; None for all.
    """
    file = Path(source) / f"{split}.jsonl"
    if file.is_file():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    else:
        from datasets import load_dataset

        rows = list(load_dataset(source, "main", split=split))
    return [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": row["question"].strip()},
            ],
            "answer": row["answer"].rpartition("####")[2].strip(),
        }
        for row in rows[:num]
    ]


def number_in(text: str) -> int | None:
    """The whole number between the answer tags."""
    match = ANSWER.search(text)
    if match is None or not WHOLE_NUMBER.fullmatch(match[1]):
        return None
    return int(match[1].replace(",", ""))


def strict_format(completions: list[Any], **_: Any) -> list[float]:
    """1 for exactly the form that was asked for, else -1."""
    return [1.0 if FORMAT.fullmatch(text[0]["content"]) else -1.0 for text in completions]


def nothing_after_the_answer(completions: list[Any], **_: Any) -> list[float]:
    """0 if the completion ends with the answer, else -0.5."""
    return [0.0 if text[0]["content"].rstrip().endswith("</answer>") else -0.5 for text in completions]


def is_number(completions: list[Any], **_: Any) -> list[float]:
    """1 for a whole number as answer, else -1."""
    return [1.0 if number_in(text[0]["content"]) is not None else -1.0 for text in completions]


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number, else 0."""
    golds = [int(gold.replace(",", "")) for gold in answer]
    return [float(number_in(text[0]["content"]) == gold) for text, gold in zip(completions, golds, strict=True)]


REWARDS = (strict_format, nothing_after_the_answer, is_number, correct)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run all parts; returns the evaluations' results."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct")
    flags.add_argument(
        "--dataset", default="openai/gsm8k", help="a hub id, or a folder with train.jsonl and test.jsonl"
    )
    flags.add_argument("--output_dir", default="runs/gsm8k_qlora")
    flags.add_argument("--max_steps", type=int, default=-1, help="optimizer steps; by default one pass over the data")
    flags.add_argument("--num_train", type=int, help="use the first so many problems")
    flags.add_argument("--num_test", type=int, help="likewise, of the test problems")
    flags.add_argument("--max_completion_length", type=int, default=256)
    flags.add_argument("--prompts_per_step", type=int, default=8)
    flags.add_argument("--chat_template", help="for a base model's tokenizer: chatml, plain, or a file")
    flags.add_argument("--push_to", help="a repository of the hub, owner/name; HF_TOKEN has to be set")
    args = flags.parse_args(argv)
    output = Path(args.output_dir)

    # 1, 2: the base in 4 bits while it is loaded, and an adapter beside all matrices of its layers
    config = GRPOConfig(
        output_dir=str(output),
        base_weights="nf4",
        lora_r=8,
        lora_alpha=32.0,
        lora_dropout=0.05,
        prompts_per_step=args.prompts_per_step,
        num_generations=4,
        num_train_epochs=1.0,
        max_steps=args.max_steps,
        max_prompt_length=512,
        prompt_overflow="truncate_left",
        max_completion_length=args.max_completion_length,
        chat_template=args.chat_template,
        temperature=0.7,
        top_p=0.9,
        beta=0.02,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        weight_decay=0.01,
        logging_steps=10,
        correctness_reward="correct",
    )
    # 3, 4: data and rewards
    trainer = GRPOTrainer(
        args.model,
        list(REWARDS),
        config,
        examples_in(args.dataset, "train", args.num_train),
        examples_in(args.dataset, "test", args.num_test),
    )
    trainer.print_trainable_parameters()
    greedy = SamplingParams(max_tokens=args.max_completion_length, temperature=0.0)
    results = {"before": trainer.evaluate(greedy).metrics["rewards/correct/mean"]}
    # 5, 6: train and evaluate; the adapter is in model/
    trainer.train()
    results["after"] = trainer.evaluate(greedy).metrics["rewards/correct/mean"]
    num_test = sum(map(len, trainer.eval_prompts.values()))
    print(f"right on {num_test:,} test problems: {results['before']:.1%} -> {results['after']:.1%}")
    # 7, 8: the adapter on the base in full precision, added up and saved
    tokenizer = load_tokenizer(output / "model", args.chat_template)
    merged = save_model(load_model(output / "model"), output / "merged", tokenizer)
    # 9: the same in 4 bits, as bitsandbytes has it
    save_model(load_model(merged), output / "merged_4bit", tokenizer, weights="nf4")
    # 10
    if args.push_to:
        print(push_folder(merged, args.push_to, private=False))
    return results


if __name__ == "__main__":
    main()
