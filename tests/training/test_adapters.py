"""Several adapters of one base, trained in one run and decoded in one batch."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

from groupax import Engine, LoRAConfig, SamplingParams, add_adapter, init_model, load_model, program, save_model
from groupax.engine.prefix_cache import Place
from groupax.models.adapted import changes_of, stack_adapters
from tests.conftest import assert_trees_match
from tests.episodes.test_program_runs import CONFIG, trained
from tests.episodes.test_programs import user
from tests.models.test_lora import a_base, leaves, trained_randomly
from tests.runs.test_resume import stopped_at

from .test_trainer import a_trainer, lines_of

NAMES = ("planner", "solver")
TEXTS = ("abc", "bcd", "ca", "dabc", "ef", "fed", "ge", "hi")
STEPS = {"max_steps": 3, "prompt_order": "dataset", "num_generations": 4, "temperature": 4.0}


def letters(completion_ids, adapter, **_):
    """Rewards the planner for the letter a, and the solver for b."""
    wanted = {"planner": 3, "solver": 4}
    return [ids.count(wanted[name]) / len(ids) for ids, name in zip(completion_ids, adapter, strict=True)]


def rows_of(name, number):
    return [{"prompt": text, "adapter": name} for text in TEXTS[:number]]


def a_run(folder, dataset, adapters=NAMES, **settings):
    model = settings.pop("model", None) or a_base()
    given = {**STEPS, "lora_r": 4, "model": model, **settings}
    return a_trainer(folder, letters, dataset, adapters=adapters, **given)


@pytest.mark.drawn(4, "adapters")
@pytest.mark.heavy
def test_an_adapter_is_trained_as_in_a_run_of_its_own(tmp_path):
    """Here the first prompts are the planner's in both, so that their randomness is the same too."""
    both = a_run(tmp_path / "both", rows_of("planner", 2) + rows_of("solver", 2), prompts_per_step=4)
    both.train()
    alone = a_run(tmp_path / "alone", rows_of("planner", 2), adapters=(), prompts_per_step=2)
    alone.train()
    planner, solver = (both.learner.each[name].state for name in NAMES)
    assert_trees_match(leaves(planner), leaves(alone.learner.state))
    assert any(np.any(a != b) for a, b in zip(leaves(planner.params), leaves(solver.params), strict=True))
    own = lines_of(tmp_path / "alone")[-1]
    line = lines_of(tmp_path / "both")[-1]
    for name in ("loss", "grad_norm", "entropy", "loss_tokens", "reward"):
        assert line[f"adapters/planner/{name}"] == own[name], name
    assert line["loss_tokens"] == own["loss_tokens"] + line["adapters/solver/loss_tokens"]
    assert line["rollout/logp_diff_max"] < 1e-5


@pytest.mark.drawn(4, "adapters")
@pytest.mark.heavy
def test_results_are_folders_that_are_read_together(tmp_path):
    save_model(a_base(), tmp_path / "base")
    model = load_model(tmp_path / "base")
    trainer = a_run(tmp_path, rows_of("planner", 4) + rows_of("solver", 4), model=model, learning_rate=3e-2)
    trainer.train()
    folders = {name: tmp_path / "run" / "model" / name for name in NAMES}
    config = json.loads((folders["planner"] / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    trainer.tokenizer.save_pretrained(tmp_path / "base")
    engine = Engine.load(tmp_path / "base", adapters=folders)
    params = SamplingParams(n=4, max_tokens=8, seed=5)
    trainer.engine.params = trainer.learner.policy
    prompts = trainer.prompts.token_ids[:3]
    for name in NAMES:
        found, expected = (each.generate(prompts, params, adapter=name) for each in (engine, trainer.engine))
        for one, other in zip(found, expected, strict=True):
            assert [each.tokens for each in one] == [each.tokens for each in other]
        expected = jax.tree.leaves(trainer.adapters[name].adapter.trained)
        loaded = load_model(folders[name]).adapter
        assert_trees_match(leaves(loaded.trained), expected)
    with pytest.raises(ValueError, match=r"use adapters\['planner'\]"):
        _ = trainer.model
    [table, *_] = sorted((tmp_path / "run" / "rollouts").iterdir())
    rows = pyarrow.parquet.read_table(table).to_pylist()
    assert {row["adapter"] for row in rows} <= set(NAMES)


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"max_staleness": 1, "rollout_correction": "token_truncate"}, marks=pytest.mark.long)]
)
def test_a_stopped_run_continues_exactly(tmp_path, settings):
    rows = [{"prompt": text, "adapter": name} for text in TEXTS[:6] for name in NAMES]
    given = {"prompts_per_step": 3, "updates_per_rollout": 2, "max_steps": 6, "beta": 1e-2, **settings}
    whole = a_run(tmp_path / "whole", rows, **given)
    whole.train()
    stopped_at(a_run(tmp_path / "again", rows, **given), 3)
    again = a_run(tmp_path / "again", rows, **given)
    again.train()
    assert_trees_match(leaves(again.learner.state), leaves(whole.learner.state))
    assert lines_of(tmp_path / "again") == lines_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_r": 0}, "set lora_r"),
        ({"lora_bias": "all"}, "low-rank changes alone"),
        ({"adapters": ("a", "a")}, "different names"),
        ({"adapters": ("../a",)}, "letters, digits"),
        ({"adapters": ("planner", "solve")}, "column adapter has 'solver'.*did you mean solve"),
        ({"scale_rewards": "batch"}, "one standard deviation"),
        ({"rollout_servers": ("http://localhost:1",)}, "single adapter"),
        ({"model": add_adapter(a_base(), LoRAConfig(r=2))}, "has one already"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_at_the_start(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        a_run(tmp_path, rows_of("solver", 4), **settings)


def roles(base_url, prompt):
    """A planner, a solver that gets the same messages and then the plan, and the base, which judges."""
    plan = ask(base_url, "planner", prompt)
    first = ask(base_url, "solver", prompt)
    answer = ask(base_url, "solver", [*prompt, first, user(plan["content"][:10])])
    verdict = ask(base_url, "base", [user(answer["content"][:10])])
    return float(len(plan["content"] + verdict["content"]) % 3)


def ask(base_url, model, messages):
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 12}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())["choices"][0]["message"]


@pytest.mark.drawn(4, "episodes")
@pytest.mark.heavy
def test_roles_of_a_program_train_adapters_of_their_own(tmp_path):
    trainer, _ = trained(tmp_path, environments=program(roles), adapters=NAMES, lora_r=4, learning_rate=1e-2)
    start = add_adapter(init_model(CONFIG, seed=0), LoRAConfig(r=4, lora_alpha=32), seed=3).adapter.trained
    for name in NAMES:
        trained_now = trainer.learner.each[name].state.params
        assert any(np.any(a != b) for a, b in zip(leaves(start), leaves(trained_now), strict=True))
    [table, *_] = sorted((tmp_path / "rollouts").iterdir())
    for row in pyarrow.parquet.read_table(table).to_pylist():
        found = [row["adapter"], *(branch.get("adapter") for branch in json.loads(row["branches"]))]
        assert sorted(map(str, found)) == ["None", "planner", "solver"]
        assert found[0] == "solver", "which has the most turns"
    [*_, line] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["rollout/logp_diff_max"] < 1e-4
    assert line["adapters/planner/loss_tokens"] < line["adapters/solver/loss_tokens"]
    again, _ = trained(tmp_path / "again", environments=program(roles), adapters=NAMES, lora_r=4, learning_rate=1e-2)
    assert_trees_match(leaves(again.learner.state), leaves(trainer.learner.state))


# -- several adapters of one base in one batch


SHAPES = {
    "one": LoRAConfig(r=4, lora_alpha=8),
    "two": LoRAConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]),
}
PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2, 3], [4, 5, 6, 7, 8], [9], [1, 2, 3])]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=3, temperature=3.0)


def adapters_of(base, seed=0):
    """Adapters of one base with different settings and weights."""
    return {
        name: trained_randomly(add_adapter(base, lora), seed + index)
        for index, (name, lora) in enumerate(SHAPES.items())
    }


def an_engine(model, adapters=None, **settings):
    given = {"kv_bytes": 1 << 24, "chunk_steps": 4, **settings}
    if not adapters:
        return Engine(model.config, model.params, model.mesh, (0,), **given)
    changes = [changes_of(each.adapter.trained, each.adapter.config.scale, jnp.float32) for each in adapters.values()]
    params = stack_adapters(model.params, changes)
    return Engine(model.config, params, model.mesh, (0,), adapters=tuple(adapters), **given)


def together(engine, names=(None, "one", "two"), params=PARAMS):
    """What the prompts become with each adapter, all decoded in one batch."""
    requests = {name: engine.sequences(PROMPTS, params, adapter=name) for name in names}
    session = engine.session()
    for sequences in requests.values():
        session.submit(sequences)
    while session.busy:
        list(session.step())
    return requests


def flat(groups):
    return [sequence for group in groups for sequence in group]


def of_attention():
    base = a_base()
    return base, adapters_of(base)


def of_latent_attention():
    dims = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    hf = {**dims, **sizes, "model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 2}
    base = init_model(hf, seed=1)
    return base, {
        name: trained_randomly(add_adapter(base, LoRAConfig(r=rank, target_modules=targets)), rank)
        for name, rank, targets in (
            ("one", 4, ["kv_b_proj", "o_proj"]),
            ("two", 2, ["kv_a_proj_with_mqa", "kv_b_proj"]),
        )
    }


@pytest.mark.drawn(4, "adapters")
@pytest.mark.heavy
@pytest.mark.parametrize("models", [of_attention, of_latent_attention])
def test_rows_of_several_adapters_in_one_batch_are_those_of_each_alone(models):
    base, adapters = models()
    found = together(an_engine(base, adapters))
    for name, model in {None: base, **adapters}.items():
        alone = flat(an_engine(model).generate(PROMPTS, PARAMS))
        assert [each.tokens for each in found[name]] == [each.tokens for each in alone]
        for one, other in zip(found[name], alone, strict=True):
            np.testing.assert_allclose(one.policy_logps, other.policy_logps, atol=1e-5)
    texts = {name: [each.tokens for each in sequences] for name, sequences in found.items()}
    assert texts[None] != texts["one"] != texts["two"]


@pytest.mark.long
def test_stored_beginnings_are_those_of_the_same_adapter():
    base = a_base()
    adapters = adapters_of(base)
    params = replace(PARAMS, n=1, ignore_eos=True)
    engine, place = an_engine(base, adapters, prefix_bytes=1 << 20), Place(100)

    def turn(prompt, name):
        [sequence] = engine.sequences([prompt], params, adapter=name)
        sequence.place = place
        return next(engine.stream([sequence]))

    first = turn(PROMPTS[0], "one")
    prefix, longer = place.prefix, np.array([*first.prompt, *first.tokens, 5], np.int32)
    for name, model in {"two": adapters["two"], None: base, "one": adapters["one"]}.items():
        reused, place.prefix = engine.prefixes.num_reused_tokens, prefix
        found = turn(longer, name)
        [[alone]] = an_engine(model).generate([longer], params)
        assert found.tokens == alone.tokens
        assert (engine.prefixes.num_reused_tokens > reused) == (name == "one")


@pytest.mark.heavy
def test_what_a_batch_cannot_share_is_refused():
    base = a_base(attention_bias=True)
    full = add_adapter(base, LoRAConfig(r=2, bias="all"))
    with pytest.raises(ValueError, match="low-rank changes alone"):
        Engine.of(base, object(), {"full": full})
    with pytest.raises(ValueError, match="another is not an adapter of the same model"):
        Engine.of(base, object(), {"another": add_adapter(a_base(seed=1), LoRAConfig(r=2))})


@pytest.mark.long
def test_sharded_weights_and_fewer_bits():
    base = a_base(num_attention_heads=4, num_key_value_heads=4)
    adapters = adapters_of(base)
    expected = together(an_engine(base, adapters))
    sharded = together(an_engine(base, adapters, tp=2))
    for name, sequences in expected.items():
        assert [each.tokens for each in sharded[name]] == [each.tokens for each in sequences]
    in_half = together(an_engine(base, adapters, weights="bfloat16"))
    assert all(len(each.tokens) for sequences in in_half.values() for each in sequences)


def texts_of(engine, name):
    return [each.tokens for each in flat(engine.generate(PROMPTS, PARAMS, adapter=name))]
