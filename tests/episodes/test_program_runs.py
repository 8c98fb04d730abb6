"""Runs of the trainer whose episodes are programs: log-probs, bits, traces."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from groupax import (
    GRPOConfig,
    GRPOTrainer,
    TraceFile,
    init_model,
    program,
    read_traces,
    recorded_rollouts,
    trace_reward,
)
from groupax.core.errors import RunError
from groupax.episodes.branches import SampledTurn, rollout_of
from groupax.episodes.traces import trace_of, trajectory_of, turns_of
from groupax.events import StepEnded
from tests.conftest import TINY
from tests.data.chat_tokenizers import VOCAB_SIZE

from .test_episodes import TOKENIZER, call
from .test_programs import ADD, played, said, streams, user, written

CONFIG = {**TINY, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "eos_token_id": TOKENIZER.eos_token_id}
ROWS = [{"prompt": [user("go")]}] * 4


def forking(base_url, prompt):
    """An agent that asks in parallel and then begins another conversation."""
    first = said(base_url, prompt, max_tokens=20)
    found = {}

    def ask(name):
        messages = [*prompt, first, user(name)]
        found[name] = said(base_url, messages, max_tokens=12)["content"]

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = said(base_url, [user(found["left"][:10])], max_tokens=10)
    return float(sum(map(ord, last["content"])) % 5)


def trained(folder, **settings):
    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        prompts_per_step=2,
        num_generations=2,
        max_completion_length=200,
        seed=3,
        progress_bar="none",
        report_to=(),
        **{name: settings.pop(name) for name in [*settings] if name in GRPOConfig.__dataclass_fields__},
    )
    given = {"train_dataset": ROWS, "processing_class": TOKENIZER, **settings}
    trainer = GRPOTrainer(init_model(CONFIG, seed=0), args=args, **given)
    return trainer, trainer.train()


def weights(trainer):
    import jax

    return np.concatenate([np.asarray(each).ravel() for each in jax.tree.leaves(trainer.learner.policy)])


@pytest.mark.drawn(4, "episodes")
@pytest.mark.heavy
def test_a_run_of_programs_has_the_trainers_log_probs_and_the_same_bits_and_its_traces_train(tmp_path):
    found = []
    path = tmp_path / "traces.jsonl"
    listeners = [TraceFile(path), lambda event: found.extend(getattr(event, "groups", ()))]
    first, result = trained(tmp_path / "first", environments=program(forking), listeners=listeners)
    assert result.metrics["rollout/logp_diff_max"] < 1e-5
    assert first.engine.prefixes.num_reused_tokens > 0
    episodes = [each for group in found for each in group]
    assert all(len(each.branches) == 2 for each in episodes)
    again, _ = trained(tmp_path / "again", environments=program(forking))
    assert np.array_equal(weights(first), weights(again))
    rows = read_traces(path)
    assert len(rows) == 4
    _, result = trained(
        tmp_path / "recorded",
        train_dataset=rows,
        reward_funcs=trace_reward,
        rollout_func=recorded_rollouts,
        rollout_correction="token_truncate",
    )
    assert result.metrics["rollout/logp_diff_max"] < 1e-2  # of weights that were trained otherwise since
    assert result.metrics["grad_norm"] > 0
    with pytest.raises(ValueError, match="set rollout_correction"):
        trained(tmp_path / "none", train_dataset=rows, reward_funcs=trace_reward, rollout_func=recorded_rollouts)


def an_episode():
    """A rollout with a fork."""

    def turn(prompt, tokens):
        logps = [-0.5 * token for token in tokens]
        return SampledTurn(np.asarray(prompt, np.int32), tokens, logps, logps)

    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 5], [6, 7]), turn([9], [8])]
    return rollout_of(turns, (0, 0), {"prompt": "?"}, np.zeros(1, np.int32), "done", 0.5, 3)


def test_a_trace_has_every_turn_once_and_comes_back_as_it_was():
    rollout = an_episode()
    trace = json.loads(json.dumps(trace_of(rollout)))
    assert [turn["completion_token_ids"] for turn in trace["turns"]] == [[2], [6, 7], [4], [8]]
    assert trace["turns"][1]["prompt_token_ids"] == [1, 2, 5]
    assert trace["turns"][1]["loss_mask"] == [0, 0, 0, 1, 1]
    assert trace["turns"][0]["metadata"]["reward"] == 0.5
    back = trajectory_of(trace)
    assert back.columns == {"trace_reward": 0.5}
    for mine, other in zip((rollout, *rollout.branches), (back, *back.branches), strict=True):
        assert np.array_equal(mine.prompt_ids, other.prompt_ids)
        assert np.array_equal(mine.completion_ids, other.completion_ids)
        assert np.array_equal(mine.mask, other.mask)
    assert np.array_equal(back.logprobs[back.mask], rollout.sampler_logps[rollout.mask])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"turns": [{}]}, "turn 0"),
        ({"turns": [{"per_token_logps": []}]}, "one log-prob"),
        ({"turns": [{"loss_mask": [1, 1]}]}, "mask of turn 0"),
    ],
)
def test_traces_that_are_none_are_refused(change, message):
    trace = trace_of(replace(an_episode(), branches=()))
    if change.get("turns") and change["turns"][0]:
        change = {"turns": [{**trace["turns"][0], **change["turns"][0]}]}
    with pytest.raises(ValueError, match=message):
        turns_of({**trace, **change})


def constrained(base_url, prompt):
    """An agent that wants digits, and then talks."""
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "digits", "schema": {"type": "string", "pattern": "^[0-9]{4}$"}},
    }
    first = said(base_url, prompt, response_format=schema)
    said(base_url, [*prompt, first, user("and?")], max_tokens=10)
    return float(json.loads(first["content"]) > "5")


@pytest.mark.heavy
def test_constrained_turns_of_programs_train_with_a_correction(tmp_path):
    found = []
    listeners = [lambda event: found.extend(getattr(event, "groups", ()))]
    settings = {"environments": program(constrained), "rollout_correction": "token_truncate", "max_turn_tokens": 40}
    _, result = trained(tmp_path / "run", listeners=listeners, **settings)
    episodes = [each for group in found for each in group]
    assert all(len(each.turns) == 2 for each in episodes)
    first = [np.s_[each.turns[0].start : each.turns[0].end] for each in episodes]
    assert all((e.sampler_logps[s] > e.policy_logps[s]).any() for e, s in zip(episodes, first, strict=True))
    assert np.isfinite(result.metrics["grad_norm"])
    with pytest.warns(UserWarning, match="fail"), pytest.raises(RunError, match="--rollout_correction token_truncate"):
        trained(tmp_path / "none", environments=program(constrained))


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
def test_several_passes_over_programs_are_resumed_from_a_checkpoint_between_them(tmp_path):
    settings = {"num_iterations": 2, "beta": 0.1, "save_steps": 1}
    whole, _ = trained(tmp_path / "whole", environments=program(forking), **settings)
    begun, _ = trained(
        tmp_path / "begun",
        environments=program(forking),
        listeners=[lambda event: isinstance(event, StepEnded)],
        **settings,
    )
    assert begun.cursor.step == 1
    resumed, _ = trained(tmp_path / "begun", environments=program(forking), **settings)
    assert resumed.cursor.step == 2
    assert np.array_equal(weights(whole), weights(resumed))


@pytest.mark.heavy
def test_clients_of_openai_are_answered_in_all_of_its_protocols():
    openai = pytest.importorskip("openai")

    def agent(base_url, api_key, model, prompt):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            assert [each.id for each in client.models.list()] == [model]
            chat = client.chat.completions.create(model=model, messages=prompt, tools=[ADD], temperature=0.3)
            [wanted] = chat.choices[0].message.tool_calls
            result = {"role": "tool", "tool_call_id": wanted.id, "content": "3"}
            messages = [*prompt, chat.choices[0].message, result]
            with client.chat.completions.create(model=model, messages=messages, tools=[ADD], stream=True) as chunks:
                streamed = "".join(each.choices[0].delta.content or "" for each in chunks)
            question = {"role": "user", "content": "again"}
            first = client.responses.create(model=model, input=[question], tools=[])
            client.responses.create(model=model, input=[question, *first.output, {"role": "user", "content": "more"}])
            return float(streamed == "it is 3")

    def answer(text, sample, turn):
        return call("add", a=1, b=2) if "<tool_response>" not in text and "Adds." in text else "it is 3"

    [row], _ = played(agent, answer, n=1)
    assert row.environment_reward == 1.0
    called, said = len(written(call("add", a=1, b=2))), len(written("it is 3"))
    assert sorted(sum(mask) for _, mask in streams(row)) == sorted([called + said, 2 * said])
