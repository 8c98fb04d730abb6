"""Samplers of tests, whose completions are known in advance."""

from groupax.engine.engine import new_sequences


class FinishedSession:
    """A session whose sequences are finished when they are submitted."""

    def __init__(self):
        self.pending = []

    @property
    def busy(self):
        return bool(self.pending)

    def submit(self, sequences):
        self.pending += sequences

    def step(self):
        pending, self.pending = self.pending, []
        for sequence in pending:
            yield sequence, len(sequence.tokens)

    def close(self):
        self.pending = []


class TurnsSampler:
    """A sampler with the same turn again and again, whose cost does not depend on the prompt.

    Args:
        text: Text of all turns but the last.
        num_turns: Number of turns before the last, which is empty.
        tokenizer: Tokenizer of the texts.
        end: Token that ends a turn.
    """

    def __init__(self, text, num_turns, tokenizer, end):
        self.ids, self.end, self.num_left, self.pending = tokenizer.encode(text), end, num_turns, []

    def sequences(self, prompts, params, step=0, first_prompt=0):
        return new_sequences(prompts, params, (self.end,), step, first_prompt)

    def session(self):
        return self

    @property
    def busy(self):
        return bool(self.pending)

    def submit(self, sequences):
        self.pending += sequences

    def step(self):
        pending, self.pending = self.pending, []
        for sequence in pending:
            sequence.tokens = [*(self.ids if self.num_left > 0 else ()), self.end]
            sequence.policy_logps = sequence.sampler_logps = [-1.0] * len(sequence.tokens)
            sequence.finish_reason = "stop"
            self.num_left -= 1
            yield sequence, len(sequence.tokens)

    def close(self):
        self.pending = []
