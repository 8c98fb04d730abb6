"""Samplers of tests, whose completions are known in advance."""


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
