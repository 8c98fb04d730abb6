"""A plugin of pytest for TRL's own tests, which runs them with groupax.compat.trl (see test_trl_own_tests.py).

Those tests replace `trainer.model.generate` and look into private attributes of TRL's trainer. Here completions come
from what replaces `generate`, in whole batches, as TRL generates them.
"""

import importlib
from unittest.mock import Mock

import torch

from groupax.compat import hf
from groupax.compat.trl import GRPOTrainer
from groupax.compat.trl.rollout_func import call_rollout_func

LATER_ROWS = 2  # of each generation after the first one in these tests


class ReplacedSampler:
    """A sampler of what replaces `generate`, if something does."""

    def __init__(self, model, engine, num_first):
        self.__dict__.update(model=model, engine=engine, num_first=num_first)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __setattr__(self, name, value):
        setattr(self.engine, name, value)

    def session(self):
        is_replaced = isinstance(self.model.generate, Mock)
        return ReplacedSession(self.model, self.num_first) if is_replaced else self.engine.session()


class ReplacedSession:
    """A session that waits until all rows of the first generation are there."""

    def __init__(self, model, num_first):
        self.model, self.num_first, self.pending, self.has_begun = model, num_first, [], False

    @property
    def busy(self):
        return len(self.pending) >= (1 if self.has_begun else self.num_first)

    def submit(self, sequences):
        self.pending += sequences

    def step(self):
        rows, self.pending = sorted(self.pending, key=lambda row: (row.prompt_index, row.sample_index)), []
        num_rows = LATER_ROWS if self.has_begun else len(rows)
        self.has_begun = True
        padded = [*rows, *rows][:num_rows]
        longest = max(len(row.prompt) for row in padded)
        ids = torch.tensor([[0] * (longest - len(row.prompt)) + row.prompt.tolist() for row in padded])
        completions = self.model.generate(input_ids=ids)[:, longest:].tolist()
        for row, tokens in zip(rows, completions, strict=False):
            ends = [index for index, token in enumerate(tokens) if token in row.stop_ids]
            row.tokens = tokens[: ends[0] + 1 if ends else None][: row.params.max_tokens]
            row.finish_reason = "stop" if row.tokens[-1] in row.stop_ids else "length"
            row.policy_logps = row.sampler_logps = [-1.0] * len(row.tokens)
            yield row, len(row.tokens)

    def close(self):
        self.pending = []


class Unless:
    """An attribute that is computed unless the instance has one of its own."""

    def __init__(self, compute):
        self.compute = compute

    def __get__(self, instance, owner=None):
        return self.compute(instance)


def model(trainer):
    """The policy, as the same object at each access, as in TRL."""
    kept = trainer.__dict__.setdefault("_kept_model", hf.CausalLM(trainer.native.model))
    kept.model = trainer.native.model
    return kept


def train(trainer, *arguments, **named):
    collector = trainer.native.collector
    num_first = trainer.native.schedule.prompts_per_rollout * trainer.args.num_generations
    collector.engine = ReplacedSampler(trainer.model, collector.engine, num_first)
    return trained(trainer, *arguments, **named)


def generate(trainer, prompts):
    output = call_rollout_func(trainer.rollout_func, prompts, trainer)
    return output.prompt_ids, output.completion_ids, output.env_mask


def lacking(name):
    """What the tests import from TRL and the installed version lacks: whether a package is there."""
    if not name.startswith("is_"):
        raise AttributeError(name)
    return lambda: False


importlib.import_module("trl.import_utils").__getattr__ = lacking
trained = GRPOTrainer.train
OWN = {
    "train": train,
    "model": Unless(model),
    "processing_class": Unless(GRPOTrainer.processing_class.fget),
    "tools": Unless(GRPOTrainer.tools.fget),
    "_generate": generate,
    "_env_tools": property(lambda self: self._agents.functions_of),
    "_environment_pool": property(
        lambda self: {name: self._agents.pool.instances(name) for name in self._agents.names}
    ),
}
for name, value in OWN.items():
    setattr(GRPOTrainer, name, value)
