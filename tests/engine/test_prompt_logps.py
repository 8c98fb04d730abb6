"""Log-probs of prompts against the model's logits, for prompts of several lengths, whatever else is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.engine.prompt_logps import compile_for, score
from groupax.models.decoder import logits

from .test_engine import engine_for


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probs_of_prompts_are_those_of_the_model(tiny_model, temperature):
    engine = engine_for(tiny_model, 2 if temperature else 1)
    prompts = [np.random.default_rng(size).integers(0, 96, size).astype(np.int32) for size in (1, 5, 128, 129, 200)]
    compile_for(engine, 200)
    for prompt, found in zip(prompts, score(engine, prompts, temperature, 3, max_pieces=1), strict=True):
        expected = logits(tiny_model.config, tiny_model.params, jnp.asarray(prompt[None]))[0, :-1] / (
            temperature or 1.0
        )
        expected = np.asarray(jax.nn.log_softmax(expected))
        assert len(found.logps) == len(found.ranks) == len(found.alternatives) == len(prompt) - 1
        of_tokens = expected[np.arange(len(prompt) - 1), prompt[1:]]
        assert np.allclose(found.logps, of_tokens, atol=1e-5)
        for row, own, rank, pairs in zip(expected, found.logps, found.ranks, found.alternatives, strict=True):
            assert np.allclose([logp for _, logp in pairs], np.sort(row)[::-1][:3], atol=1e-5)
            assert rank <= 3 or own <= pairs[-1][1]
            assert rank > 3 or own == pairs[rank - 1][1]
