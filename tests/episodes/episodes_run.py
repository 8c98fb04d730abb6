"""A run with tools and an environment: python episodes_run.py FOLDER NUM_DEVICES SETTINGS_AS_JSON.

The model and its tokenizer, which has whole calls as tokens so that random weights make some, lie in FOLDER/../model.
GROUPAX_... variables say which process it is. The first one leaves the trained weights in FOLDER/final.npz.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from groupax import GRPOConfig, GRPOTrainer, Step, init_model, save_model, tool
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer

CALLS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"number": {number}}}}}\n</tool_call>'
    for name in ("look", "square", "unknown")
    for number in range(15)
]
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE + len(CALLS),
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 1536,
    "tie_word_embeddings": True,
    "eos_token_id": 258,
}
SETTINGS = {
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 400,
    "max_turn_tokens": 32,
    "max_turns": 5,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "optimizer": "sgd",
    "save_interval_minutes": 0.0,
    "progress_bar": "none",
    "stop": tuple("abcdefghijklmnop"),  # a turn has about 20 tokens in the mean
    "eval_stop": tuple("abcdefghijklmnop"),
    "eval_temperature": 1.0,
}
ROWS = [{"prompt": [{"role": "user", "content": "play"}], "topic": topic} for topic in ("cats", "dogs", "fish")]


async def square(number: int) -> int:
    """Squares a number, in its own time.

    Args:
        number: Any number.
    """
    await asyncio.sleep(0.01 * (number % 3))
    if number == 13:
        raise ValueError("an unlucky number")
    return number * number


class Game:
    """Answers what the model says, likes the letter a, and is not always there."""

    def reset(self, row, seed):
        self.turn, self.made_by = 0, process_index()
        self.fails = False
        return f" with {row['topic']} and {seed % 7}"

    @tool
    def look(self, number: int) -> Step:
        """Looks somewhere.

        Args:
            number: The place.
        """
        time.sleep(0.01)
        assert self.made_by == process_index()
        return Step(f"place {number}", reward=number / 10, done=number >= 12)

    def act(self, message):
        self.turn += 1
        if len(message["content"]) % 7 == 6:
            raise OSError("the game is gone")
        return Step(f"{len(message['content'])}?", reward=message["content"].count("a") / 10)

    def score(self):
        return 0.5 * self.turn


def process_index():
    from groupax.parallel import processes

    return processes.process_index()


def calls(completions, log_extra):
    """The number of calls in each completion."""
    log_extra("scored_by", [process_index()] * len(completions))
    return [float(sum(len(each.get("tool_calls", ())) for each in messages)) for messages in completions]


def save_start(folder):
    """Saves the model of all runs."""
    save_model(init_model(CONFIG, seed=0), folder, chat_tokenizer(*CALLS))
    return folder


def make_trainer(model, folder, **settings):
    """A trainer whose episodes have tools and an environment."""
    args = GRPOConfig(**{**SETTINGS, "output_dir": str(folder), **settings})
    return GRPOTrainer(str(model), calls, args, ROWS, ROWS[:1], tools=[square], environments=Game)


def main(folder, num_devices, settings):
    from groupax.parallel import processes
    from groupax.parallel.collectives import to_host_on_primary

    jax.config.update("jax_num_cpu_devices", num_devices)
    trainer = make_trainer(folder.parent / "model", folder / "run", **settings)
    trainer.train()
    state = to_host_on_primary({"state": trainer.learner.state})
    if processes.is_primary():
        flat = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
        np.savez(folder / "final.npz", **flat)


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
