"""Trains TRL for one step on written turns with a tool, and prints what it trained on (see test_trl_own_tests.py).

Arguments: a folder with a tokenizer, a folder for the model, which it makes, and one for the run.
"""

import importlib
import json
import sys
from typing import Any

TURNS = [
    ['<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>', "It is 12.<|im_end|>"],
    ['<tool_call>\n{"name": "multiply", "arguments": {"a": 0, "b": 4}}\n</tool_call><|im_end|>', "No<|im_end|>"],
    ["Twelve, I would say<|im_end|>"],
    [
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 5, "b": 5}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 25, "b": 2}}\n</tool_call><|im_end|>',
        "50<|im_end|>",
    ],
]
ROWS = [{"prompt": [{"role": "user", "content": "What is 3 * 4?"}]}]
REWARDS = [1.0, 0.25, 0.5, 0.0]
SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 200,
    "max_steps": 1,
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    if a == 0:
        raise ValueError("nothing to multiply")
    return a * b


def reward(completions, **_):
    return REWARDS


def make_model(tokenizer, folder):
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, **heads}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokens), eos_token_id=tokens.eos_token_id, **sizes))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def main(tokenizer, model, folder):
    from datasets import Dataset

    trl: Any = importlib.import_module("trl")
    make_model(tokenizer, model)
    args = trl.GRPOConfig(folder, use_cpu=True, bf16=False, gradient_checkpointing=False, **SETTINGS)
    args.model_init_kwargs = {"dtype": "float32"}
    trainer = trl.GRPOTrainer(model, reward, args, Dataset.from_list(ROWS * 4), tools=[multiply])
    encode = trainer.processing_class.encode
    turns, seen = [0] * len(TURNS), []

    def generate(prompt_ids, *_, **__):
        waiting = [row for row, turn in enumerate(turns) if turn < len(TURNS[row])]
        assert len(waiting) == len(prompt_ids)
        ids = [encode(TURNS[row][turns[row]]) for row in waiting]
        for row in waiting:
            turns[row] += 1
        return ids, None

    compute = trainer._compute_loss

    def loss(model, inputs):
        names = "prompt_ids", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch"
        seen.append({name: inputs[name].tolist() for name in names})
        return compute(model, inputs)

    trainer._generate_single_turn, trainer._compute_loss = generate, loss
    trainer.train()
    line = next(line for line in trainer.state.log_history if "grad_norm" in line)
    print(json.dumps({"inputs": seen, "line": line}))


if __name__ == "__main__":
    main(*sys.argv[1:])
