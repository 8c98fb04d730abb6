"""A small model inside the package learns to use a calculator, in minutes on 2 CPU cores.

python examples/calculator.py
"""

from groupax import GRPOConfig, GRPOTrainer
from groupax.recipes import load_recipe
from groupax.recipes.agents.calculator import evaluate, generate


def calculator(expression: str) -> int:
    """Calculates.

    Args:
        expression: Like 12*34.
    """
    return evaluate(expression)


def is_right(completions, answer):
    """Returns 1 for a last message that is the answer, otherwise 0."""
    return [float(messages[-1]["content"] == gold) for messages, gold in zip(completions, answer, strict=True)]


# [{"prompt": [{"role": "user", "content": "What is 348*27+951?"}], "answer": "10347"}, ...]
rows = generate(4096, seed=1)
args = GRPOConfig(
    output_dir="runs/calculator_example",
    max_steps=50,
    prompts_per_step=16,
    max_completion_length=128,
    learning_rate=2e-4,
)
GRPOTrainer(load_recipe("calculator").model, is_right, args, rows, tools=[calculator]).train()
