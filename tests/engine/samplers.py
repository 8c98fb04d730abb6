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


class WrittenTurns(FinishedSession):
    """A sampler and its session, whose turns are written by `turn(sequence)`: token ids, of which `end` ends a turn."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def sequences(self, prompts, params, step=0, first_prompt=0):
        return new_sequences(prompts, params, (self.end,), step, first_prompt)

    def session(self):
        self.pending = []
        return self

    def step(self):
        for sequence, _ in super().step():
            ids = self.turn(sequence)[: sequence.params.max_tokens]
            sequence.tokens, sequence.finish_reason = ids, "stop" if ids[-1] == self.end else "length"
            sequence.policy_logps = sequence.sampler_logps = [-1.0] * len(ids)
            yield sequence, len(ids)


class TurnsSampler(WrittenTurns):
    """A sampler with the same turn again and again, whose cost does not depend on the prompt.

    Args:
        text: Text of all turns but the last.
        num_turns: Number of turns before the last, which is empty.
        tokenizer: Tokenizer of the texts.
        end: Token that ends a turn.
    """

    def __init__(self, text, num_turns, tokenizer, end):
        super().__init__(end)
        self.ids, self.num_left = tokenizer.encode(text), num_turns

    def turn(self, sequence):
        self.num_left -= 1
        return [*(self.ids if self.num_left >= 0 else ()), self.end]
