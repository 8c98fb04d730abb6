"""Keys and values of conversations between their turns: stored, stored in part, and computed again."""

import random
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax import Engine, SamplingParams, init_model
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.types import Row
from groupax.engine.prefix_cache import Place
from groupax.episodes.play import Prompts
from groupax.episodes.rules import make_rules
from groupax.parallel.mesh import make_mesh
from groupax.rollouts.collector import sample_groups
from groupax.tools.tool import Step
from tests.conftest import TINY, rest_heavy
from tests.training.test_agreement import trainer_logps

from .chat_tokenizers import VOCAB_SIZE, chat_tokenizer

PROMPT = np.arange(3, 60, dtype=np.int32)
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, seed=5)


def turn(session, prompt, place, params=PARAMS):
    """A turn that is sampled in a session, whose keys and values are stored in this place."""
    [sequence] = session.engine.sequences([prompt], params)
    sequence.place = place
    session.submit([sequence])
    while session.busy:
        list(session.step())
    return sequence


@pytest.fixture(scope="module")
def engine():
    model = init_model({**TINY, "head_dim": 8}, mesh=make_mesh(devices=jax.devices()[:1]), seed=1)
    return Engine(model.config, model.params, model.mesh, eos_ids=(2,), prefix_bytes=1 << 22, chunk_steps=8)


# nothing; a token; around the pieces in which prompts are computed; all of the turn before
@pytest.mark.drawn(3)
@pytest.mark.heavy
@pytest.mark.parametrize("max_tokens", rest_heavy([0, 33, 1000, 1, 31, 32, len(PROMPT), 85], quick=3))
def test_the_next_turn_is_the_same_however_much_is_stored(engine, max_tokens):
    session = engine.session()
    before = engine.prefixes.num_reused_tokens

    def conversation(place):
        first = turn(session, PROMPT, place)
        stream = np.concatenate([PROMPT, first.tokens, [7, 8, 9]])
        return turn(session, stream.astype(np.int32), place)

    again, stored = conversation(Place(0)), conversation(Place(max_tokens))
    # the last sampled token was not fed
    assert engine.prefixes.num_reused_tokens - before == min(max_tokens, len(PROMPT) + 29)
    assert stored.tokens == again.tokens
    np.testing.assert_allclose(stored.policy_logps, again.policy_logps, atol=1e-5, rtol=0)
    if not max_tokens:
        assert stored.policy_logps == again.policy_logps


@pytest.mark.heavy
def test_places_are_for_one_set_of_weights_and_divide_the_memory(engine):
    session = engine.session()
    [place] = session.converse(1, 100, 30)
    first = turn(session, PROMPT, place)
    assert place.prefix is not None
    num_bytes, reused = place.prefix.num_bytes, engine.prefixes.num_reused_tokens
    assert num_bytes == (len(PROMPT) + 29) * engine.bytes_per_token
    engine.params = jax.tree.map(lambda x: x * 1.5, engine.params)
    turn(session, np.concatenate([PROMPT, first.tokens]).astype(np.int32), place)
    assert engine.prefixes.num_reused_tokens == reused
    assert sum(each.max_tokens for each in engine.session().converse(7, 100, 30)) * engine.bytes_per_token <= 1 << 22


class Conversation:
    """Answers three times, more and more, and sometimes late."""

    delays = random.Random(0)
    longest_s = 0.0

    def reset(self, row, seed):
        self.heard = 0
        return f" {seed % 7}" * (1 + seed % 5)

    def act(self, message):
        time.sleep(self.delays.random() * self.longest_s)
        self.heard += 1
        return Step(f"{len(message['content'])}?" * self.heard, done=self.heard == 4)


def rows_of_episodes(model, num_prompts, prefix_bytes, max_slots=256):
    """Episodes of a random model, as rows of the trainer, and the number of tokens that were not computed again."""
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(end, int)
    settings = {"chunk_steps": 8, "tokenizer": tokenizer, "prefix_bytes": prefix_bytes, "max_slots": max_slots}
    engine = Engine(model.config, model.params, model.mesh, (end,), **settings)
    rules = make_rules(tokenizer, EpisodeSettings(max_turn_tokens=60), (), Conversation)
    prompt = [{"role": "user", "content": "talk"}]
    text = str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
    ids = np.asarray(tokenizer.encode(text), np.int32)
    # a turn has 15 tokens in the mean
    params = SamplingParams(n=4, max_tokens=300, stop=tuple("abcdefghijklmnop"), seed=2)
    examples = [{"prompt": prompt}] * num_prompts
    groups = sample_groups(engine, tokenizer, Prompts(examples, [ids] * num_prompts), params, 0, rules=rules)
    rollouts = [each for group in sorted(groups, key=lambda group: group[0].prompt_index) for each in group]
    rows = [
        Row(
            group=index,
            prompt=each.prompt_ids,
            completion=each.completion_ids,
            mask=each.mask,
            advantages=np.ones(len(each.mask)),
            rollout_logp=each.policy_logps,
        )
        for index, each in enumerate(rollouts)
    ]
    return rows, engine.prefixes.num_reused_tokens


LONG_CASES = [("llama", 0), ("llama", 5 * 100 * 512), ("gemma2", 0), ("gemma2", 1 << 30)]


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "num_bytes"),
    [
        ("llama", 1 << 30),
        ("gemma2", 5 * 100 * 512),
        *(pytest.param(*each, marks=pytest.mark.long) for each in LONG_CASES),
    ],
)
def test_the_order_of_answers_changes_no_bit(family, num_bytes, monkeypatch):
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "head_dim": 8}
    model = init_model({**TINY, "model_type": family, **sizes}, seed=1)
    model = replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))
    played = []
    for longest_s in (0.0, 0.05, 0.1):
        monkeypatch.setattr(Conversation, "longest_s", longest_s)
        rows, _ = rows_of_episodes(model, 3, num_bytes)
        played.append([(row.completion.tolist(), row.rollout_logp.tobytes()) for row in rows])
    assert played[1] == played[0]
    assert played[2] == played[0]
    assert max(len(tokens) for tokens, _ in played[0]) > 128, "the number of columns has grown"


FAMILIES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("gemma2", {"sliding_window": 24, "attn_logit_softcapping": 2.0}, id="window", marks=pytest.mark.long),
]
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # in two layers


@pytest.mark.heavy
@pytest.mark.optimized
@pytest.mark.parametrize(("family", "change"), FAMILIES)
def test_engine_and_trainer_agree_over_episodes_stored_in_part_and_computed_again(family, change):
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "head_dim": 8}
    model = init_model({**TINY, "model_type": family, **sizes, **change}, seed=1)
    model = replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))
    cases = {"stored": (1 << 30, 256), "part": (80 * 100 * TOKEN_BYTES, 256), "none": (0, 256)}
    if not change:
        cases["few slots"] = 1 << 30, 64
    results = {}
    for name, (num_bytes, slots) in cases.items():
        rows, reused = rows_of_episodes(model, 20, num_bytes, slots)
        assert len(rows) == 80
        pairs = zip(rows, trainer_logps(model, rows, 1.0, 4096), strict=True)
        worst = max(np.abs(row.rollout_logp - logp)[row.mask].max() for row, logp in pairs)
        print(f"{family}, {name}: {reused} tokens reused, log-probs at most {worst:.2g} apart")
        assert worst < 1e-5
        results[name] = [row.completion.tolist() for row in rows], reused
    assert results["stored"][1] > results["part"][1] > results["none"][1] == 0
    assert all(tokens == results["stored"][0] for tokens, _ in results.values())
