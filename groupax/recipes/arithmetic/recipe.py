"""The arithmetic recipe: a small model inside the package learns to think before it answers.

The model was pretrained on answers of mixed quality (see `model/README.md`). It can work a problem out step by step,
but mostly guesses. The rewards pay for an answer in the form `<think>...</think><answer>...</answer>`, and far more for
a right one.
"""

from pathlib import Path

from groupax.recipes import Recipe
from groupax.recipes.arithmetic.problems import generate

NUM_TRAIN = 4096
NUM_HELD_OUT = 500

RECIPE = Recipe(
    model=str(Path(__file__).parent / "model"),
    train_dataset=lambda: generate(NUM_TRAIN, seed=1),
    eval_dataset=lambda: generate(NUM_HELD_OUT, seed=0, split="held_out"),
    reward_funcs=("think_answer_format", "think_answer_correct"),
    config={
        "output_dir": "runs/arithmetic",
        "reward_weights": (0.2, 1.0),
        "solved_by": "think_answer_correct",
        "max_steps": 120,
        "prompts_per_step": 16,
        "num_generations": 8,
        "max_completion_length": 64,
        "learning_rate": 2e-4,
    },
)
