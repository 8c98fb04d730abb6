"""A run with tools in a process of its own, for tests that kill it: python stopped_agent.py FOLDER SETTINGS_AS_JSON.

A tiny model samples, whose configuration is in FOLDER/../model.json. Each of its turns is replaced by one with calls
whose arguments come from what was sampled, so that any other bit would show. Tool and environment write the start and
the end of each of their calls to FOLDER/calls.log. What the run ends with is in FOLDER/final.npz.
"""

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import jax
import numpy as np

from tests.data.chat_tokenizers import chat_tokenizer
from tests.runs.stopped_run import final_state

SETTINGS = {
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 700,
    "max_turn_tokens": 12,
    "max_steps": 6,
    "save_steps": 2,
    "learning_rate": 1e-2,
    "progress_bar": "none",
}
TOKENIZER = chat_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


class Logged:
    """Appends lines to a file, each in one piece, so that they survive the process."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def during(self, what, call, seconds):
        os.write(self.file, f"begin {what} {call}\n".encode())
        time.sleep(seconds)
        os.write(self.file, f"end {what} {call}\n".encode())


class ForcedSession:
    """A session whose finished turns are replaced by turns with calls."""

    def __init__(self, session):
        self.session, self.submit, self.close = session, session.submit, session.close

    @property
    def busy(self):
        return self.session.busy

    def step(self):
        for sequence, count in list(self.session.step()):
            if sequence.finish_reason:
                force(sequence)
            yield sequence, count


def force(sequence):
    """Replaces a finished turn: two calls, then a message to the environment, then the last call."""
    turn = TOKENIZER.decode(sequence.prompt).count("<|im_start|>assistant") - 1
    of = hashlib.sha256(sequence.key.tobytes() + sequence.prompt.tobytes()).hexdigest()[:12]
    value = sum(sequence.tokens) % 97
    texts = (call("note", of, value) + call("move", of, value), f"well {value}", call("move", of, value))
    ids = TOKENIZER.encode(texts[min(turn, 2)])
    sequence.tokens, sequence.finish_reason = [*ids, END], "stop"
    sequence.policy_logps = sequence.sampler_logps = [-1.0 - value / 97] * len(sequence.tokens)


def call(name, of, value):
    arguments = {"call": of, "value": value}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def main(folder, settings, pause_s):
    from groupax import GRPOConfig, GRPOTrainer, Step, init_model, tool

    folder = Path(folder)
    log, pauses = Logged(folder / "calls.log"), random.Random()

    def note(call: str, value: int) -> str:
        """Notes a number, and takes a while.

        Args:
            call: Name of the call.
            value: The number.
        """
        log.during("note", call, pause_s * pauses.random())
        return f"{call} {value * 7 % 10}"

    class Walk:
        """A walk along a line: what it answers depends on all steps so far."""

        def reset(self, row, seed):
            self.at = seed % 5
            return f" from {self.at}"

        @tool
        def move(self, call: str, value: int):
            """Walks.

            Args:
                call: Name of the call.
                value: Distance.
            """
            log.during("move", call, pause_s * pauses.random())
            self.at = (3 * self.at + value) % 11
            return Step(f"at {self.at}", reward=self.at / 11)

        async def act(self, message):
            self.at += len(message["content"])
            return f"now {self.at}, again"

        def score(self):
            return self.at % 3

    args = GRPOConfig(**{**SETTINGS, "output_dir": str(folder / "run"), "max_turns": 3, **settings})
    model = init_model(json.loads((folder.parent / "model.json").read_text()), seed=0)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("go", "walk", "run", "crawl")]
    trainer = GRPOTrainer(model, None, args, rows, processing_class=TOKENIZER, tools=[note], environments=Walk)
    session = trainer.engine.session
    trainer.engine.session = lambda: ForcedSession(session())
    trainer.train()
    np.savez(folder / "final.npz", **final_state(trainer))


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
