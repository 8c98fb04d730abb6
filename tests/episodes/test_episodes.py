"""Episodes: turns of a scripted model, answered by tools and environments; and those of a real one."""

import asyncio
import itertools
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from groupax import GRPOConfig, GRPOTrainer, init_model
from groupax.core.errors import RunError
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.episodes.custom import RolloutFunction, Trajectory
from groupax.episodes.environment import with_observation
from groupax.episodes.play import Prompts
from groupax.episodes.rules import make_rules
from groupax.rollouts.collector import sample_groups
from groupax.tools.tool import Step, tool, tools_from
from tests.conftest import TINY
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer
from tests.engine.samplers import TurnsSampler, WrittenTurns

TOKENIZER = chat_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PARAMS = SamplingParams(n=2, max_tokens=2000)
PROMPT = [{"role": "user", "content": "go"}]


class Script(WrittenTurns):
    """A sampler whose turns are written in advance: `answer(prompt text, sample index, turn)` returns each text."""

    def __init__(self, answer):
        super().__init__(END)
        self.answer, self.prompts = answer, []

    def turn(self, sequence):
        text = TOKENIZER.decode(sequence.prompt)
        self.prompts.append(text)
        written = self.answer(text, sequence.sample_index, text.count("<|im_start|>assistant") - 1)
        return [*TOKENIZER.encode(written), END]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def played(
    answer, tools=(), environments=None, num_prompts=1, params=PARAMS, example=None, max_prompt_tokens=None, **settings
):
    """The groups of episodes, and the script with the prompts that it saw."""
    rules = make_rules(TOKENIZER, EpisodeSettings(**settings), tools, environments)
    rules = replace(rules, max_prompt_tokens=max_prompt_tokens)
    script = Script(answer)
    examples = [{"prompt": PROMPT, **(example or {})}] * num_prompts
    schemas = rules.setup_of(examples[0]).schemas
    text = TOKENIZER.apply_chat_template(PROMPT, tools=schemas or None, add_generation_prompt=True, tokenize=False)
    ids = np.asarray(TOKENIZER.encode(text), np.int32)
    groups = list(sample_groups(script, TOKENIZER, Prompts(examples, [ids] * num_prompts), params, 0, rules=rules))
    groups.sort(key=lambda group: group[0].prompt_index)
    return groups, script


def test_a_call_is_run_and_its_result_is_read_by_the_next_turn():
    def answer(text, sample, turn):
        return call("add", a=2, b=3 + sample) if turn == 0 else f"it is {5 + sample}"

    [[first, second]], script = played(answer, [add])
    assert [row.finish_reason for row in (first, second)] == ["stop", "stop"]
    assert "<tool_response>\n5\n</tool_response>" in script.prompts[2] + script.prompts[3]
    assert "<tool_response>\n6\n</tool_response>" in script.prompts[2] + script.prompts[3]
    assert [message["role"] for message in first.completion] == ["assistant", "tool", "assistant"]
    assert first.completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert first.completion[1]["content"] == "5"
    assert [record.result for turn in first.turns for record in turn.calls] == ["5"]
    schema = tools_from([add])["add"].schema
    for row in (first, second):  # prompts are those that the template writes; sampled tokens count, and no others
        whole = TOKENIZER.decode(np.concatenate([row.prompt_ids, row.completion_ids]))
        assert sum(whole.startswith(text) for text in script.prompts) >= 2
        canonical = TOKENIZER.apply_chat_template([*PROMPT, *row.completion], tools=[schema], tokenize=False)
        assert whole == canonical.removesuffix("\n")
        spans = [row.completion_ids[turn.start : turn.end].tolist() for turn in row.turns]
        assert row.mask.sum() == sum(map(len, spans))
        assert all(span[-1] == END for span in spans)
        assert np.all(row.policy_logps == np.where(row.mask, -1, 0))


def test_limits_end_an_episode_with_their_own_reasons():
    def forever(text, sample, turn):
        return call("add", a=1, b=1)

    def reasons(**settings):
        [group], _ = played(forever, [add], **settings)
        return {row.finish_reason for row in group}, len(group[0].turns), sum(len(t.calls) for t in group[0].turns)

    assert reasons(max_turns=3) == ({"max_turns"}, 3, 3)
    assert reasons(max_tool_calls=2) == ({"max_tool_calls"}, 3, 2)
    assert reasons(max_tool_turns=2) == ({"max_tool_calls"}, 3, 2)
    assert reasons(max_turn_tokens=20) == ({"turn_length"}, 1, 0)
    [group], _ = played(forever, [add], params=SamplingParams(n=2, max_tokens=150), max_turns=100)
    assert {row.finish_reason for row in group} <= {"length", "tool_result_too_long"}
    assert all(len(row.completion_ids) <= 150 for row in group)


@pytest.mark.parametrize("parallel", [False, True])
def test_calls_of_a_turn_run_in_order_unless_all_may_run_at_once(parallel):
    log = []

    @tool(parallel=True)
    def slow() -> Step:
        """Ends the episode, after some time."""
        time.sleep(0.2)
        log.append("slow")
        return Step("end", done=True)

    @tool(parallel=parallel)
    def fast() -> str:
        """Does something."""
        log.append("fast")
        return "done"

    [[row]], _ = played(
        lambda *_: call("slow") + call("fast"), [slow, fast], params=SamplingParams(n=1, max_tokens=900)
    )
    assert row.finish_reason == "done"
    first, second = row.turns[0].calls
    assert first.result == "end"
    assert log == (["fast", "slow"] if parallel else ["slow"])
    assert "has ended the episode" in second.result or parallel


def test_a_turn_that_is_cut_off_runs_none_of_its_calls():
    ran = []

    def note() -> str:
        """Notes that it ran."""
        ran.append(1)
        return "ran"

    complete = call("note")
    size = len(TOKENIZER.encode(complete)) + 4
    for settings, params, end in (
        ({"max_turn_tokens": size}, PARAMS, "turn_length"),
        ({}, SamplingParams(n=2, max_tokens=size), "length"),
    ):
        [group], _ = played(lambda *_: f"{complete} and so on and on", [note], params=params, **settings)
        assert [row.finish_reason for row in group] == [end] * 2
        assert all(complete in TOKENIZER.decode(row.completion_ids) for row in group)
    assert not ran


def test_a_malformed_call_is_told_or_ends_the_episode():
    def answer(text, sample, turn):
        return "<tool_call>\n{broken\n</tool_call>" if turn == 0 else "sorry"

    [[row, _]], _ = played(answer, [add])
    assert row.finish_reason == "stop"
    assert row.turns[0].calls[0].error
    assert "error" in row.completion[1]["content"]
    [[row, _]], _ = played(answer, [add], malformed_calls="end")
    assert row.finish_reason == "parse_error"
    assert len(row.turns) == 1


def large(size: int) -> str:
    """Returns much text.

    Args:
        size: Its length.
    """
    return "x" * size


def test_a_result_that_does_not_fit_is_an_error_or_the_end():
    def answer(text, sample, turn):
        return call("large", size=5000) if turn == 0 else "oh"

    [[row, _]], script = played(answer, [large])
    assert row.finish_reason == "stop"
    assert "more tokens than are left" in script.prompts[-1]
    [[row, _]], _ = played(answer, [large], overlong_results="end")
    assert row.finish_reason == "tool_result_too_long"
    [[row, _]], script = played(answer, [large], max_result_kb=0.1)
    assert row.finish_reason == "stop"
    assert script.prompts[-1].count("x") <= 110


def test_tools_of_many_episodes_run_at_the_same_time_while_others_decode():
    async def slow(number: int) -> int:
        """Waits.

        Args:
            number: Any number.
        """
        await asyncio.sleep(0.5)
        return number

    def answer(text, sample, turn):
        return call("slow", number=turn) if turn < 3 else "done"

    began_s = time.perf_counter()
    groups, _ = played(answer, [slow], num_prompts=8, params=SamplingParams(n=4, max_tokens=4000))
    took_s = time.perf_counter() - began_s
    assert sum(len(turn.calls) for group in groups for row in group for turn in row.turns) == 96
    assert took_s < 6, took_s  # one after the other they take 48 s


def test_the_workers_of_a_run_limit_the_calls_of_all_its_episodes():
    running, most = [], []

    async def busy() -> str:
        """Waits a little."""
        running.append(1)
        most.append(len(running))
        while len(most) < 3:  # until all workers are busy
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        return str(running.pop())

    played(lambda text, sample, turn: call("busy") if turn == 0 else "so", [busy], num_prompts=4, tool_workers=3)
    assert (len(most), max(most)) == (8, 3)


class Guess:
    """A number to guess."""

    made, closed, lock = 0, 0, threading.Lock()

    def __init__(self):
        with Guess.lock:
            Guess.made += 1
        self.used = False

    def reset(self, row, seed):
        assert not self.used, "one episode each"
        self.used, self.number, self.seed = True, row["number"], seed
        return " a number"

    @tool
    def guess(self, number: int) -> Step:
        """Guesses.

        Args:
            number: The guess.
        """
        right = number == self.number
        return Step("right" if right else "wrong", reward=0.5 if right else -0.25, done=right)

    def score(self):
        return 1.0

    async def close(self):
        Guess.closed += 1


def test_an_environment_starts_answers_and_rewards_an_episode():
    Guess.made = Guess.closed = 0

    def answer(text, sample, turn):
        assert "go a number" in text
        return call("guess", number=turn)

    [group, _], _ = played(answer, environments=Guess, num_prompts=2, example={"number": 2})
    assert Guess.made == Guess.closed == 4
    for row in group:
        assert row.finish_reason == "done"
        assert [turn.reward for turn in row.turns] == [-0.25, -0.25, 1.5]
        assert row.environment_reward == 1.0
        assert row.example["prompt"][-1]["content"] == "go a number"


class Echo:
    """Answers any message."""

    def reset(self):
        return None

    async def act(self, message):
        if "bye" in message["content"]:
            return Step("gone", reward=2.0, done=True)
        return message["content"] + "!"


class Judge:
    """Ends an episode at its first message, and scores the length of a message that it has not answered."""

    def reset(self):
        return None

    def act(self, message):
        return Step(None, done=True)

    def score(self, message):
        return 0.0 if message is None else float(len(message["content"]))


def test_an_environment_scores_a_message_that_was_cut_off():
    [[row, cut]], _ = played(
        lambda _, sample, turn: "x" * 300 if sample else "end", environments=Judge, max_turn_tokens=200
    )
    assert (row.finish_reason, row.environment_reward) == ("done", 0.0)
    assert (cut.finish_reason, cut.environment_reward) == ("turn_length", len(cut.turns[0].text))


class GivenUp(Script):
    """A script whose first turn is given up by the engine after some tokens, as where a constraint is too complex."""

    def __init__(self, answer, size):
        super().__init__(answer)
        self.size, self.is_first = size, True

    def step(self):
        for sequence, _ in super().step():
            if self.is_first:
                sequence.tokens, sequence.finish_reason = sequence.tokens[: self.size], "abort"
                sequence.policy_logps = sequence.sampler_logps = [-1.0] * self.size
                sequence.fault = "the constraint cannot be kept any longer: it became too complex"
            self.is_first = False
            yield sequence, len(sequence.tokens)


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("kind", ["completions", "tools", "function"])
def test_a_constraint_that_cannot_be_kept_leaves_one_rollout_out_and_not_the_run(size, kind):
    def function(request):
        ids = request.encode([row["prompt"] for row in request.examples for _ in range(2)])
        made = request.generate(ids)
        return [Trajectory(each.prompt, each.tokens, each.policy_logps, failure=each.fault) for each in made]

    rules = make_rules(TOKENIZER, EpisodeSettings(), [add] if kind == "tools" else ())
    if kind == "function":
        rules = replace(rules, rollout_func=RolloutFunction(function))
    script = GivenUp(lambda *_: "fine", size)
    ids = np.asarray(TOKENIZER.encode("go"), np.int32)
    with pytest.warns(UserWarning, match="the constraint cannot be kept any longer: it became too complex"):
        [[lost, kept]] = sample_groups(script, TOKENIZER, Prompts([{"prompt": PROMPT}], [ids]), PARAMS, 0, rules=rules)
    assert (lost.finish_reason, lost.is_failure, lost.num_sampled_tokens) == ("env_error", True, size)
    assert (kept.finish_reason, kept.text) == ("length" if kind == "function" else "stop", "fine")


def long_episode(num_turns):
    """An episode of so many turns with a result of 200 characters each; its processor time."""

    def read(page: int) -> str:
        """Reads a page.

        Args:
            page: Its number.
        """
        return "x" * 200

    rules = make_rules(TOKENIZER, EpisodeSettings(max_turns=1000), [read])
    sampler = TurnsSampler(call("read", page=1), num_turns, TOKENIZER, END)
    ids = np.asarray(TOKENIZER.encode("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"), np.int32)
    params = SamplingParams(n=1, max_tokens=10**7)
    began_s = time.process_time()
    [[row]] = sample_groups(sampler, TOKENIZER, Prompts([{"prompt": PROMPT}], [ids]), params, 0, rules=rules)
    seconds = time.process_time() - began_s
    assert len(row.turns) == num_turns + 1
    assert len(row.completion_ids) > 200 * num_turns
    return seconds


@pytest.mark.long
def test_two_hundred_turns_take_linear_time():
    long_episode(5)
    few_s, more_s, most_s = (min(long_episode(num_turns) for _ in range(3)) for num_turns in (50, 100, 200))
    assert more_s < 2.4 * few_s  # twice, and what the machine does besides
    assert most_s < 2.4 * more_s


class Conversation:
    """Repeats the length of what it hears, three times; likes the letter a."""

    def reset(self, row, seed):
        self.heard = 0
        return f" {row['topic']} {seed % 7}"

    def act(self, message):
        self.heard += 1
        return Step(f"{len(message['content'])}?", reward=message["content"].count("a") / 10, done=self.heard == 3)


CHATTY = TINY | {"vocab_size": VOCAB_SIZE, "eos_token_id": END, "max_position_embeddings": 512}


ROWS = [{"prompt": [{"role": "user", "content": "talk"}], "topic": topic} for topic in ("cats", "dogs")]


def train(folder, reward_funcs=None, environments=Conversation, rows=ROWS, **settings):
    """The metrics of three steps with conversations, and the trainer."""
    given = {
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 128,
        "max_turn_tokens": 40,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "progress_bar": "none",
        "stop": tuple("abcdefghijklmnop"),  # a turn has 15 tokens in the mean
    }
    args = GRPOConfig(output_dir=str(folder), **{**given, **settings})
    processing = {"processing_class": chat_tokenizer(), "environments": environments}
    trainer = GRPOTrainer(init_model(CHATTY, seed=0), reward_funcs, args, rows, **processing)
    trainer.train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], trainer


def check_five_steps(folder, rows, environments):
    """Trains five steps in others' environments, in which every episode must count and engine and trainer agree."""
    settings = {"num_generations": 8, "max_turn_tokens": 24, "max_steps": 5, "stop": tuple("bcdfghjklmnp")}
    lines, _ = train(folder, environments=environments, rows=rows, **settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["rollout/logp_diff_max"] < 1e-5 and line["stop/env_error"] == 0 for line in lines)
    assert any(line["reward"] > 0 for line in lines)


@pytest.mark.drawn(4, "episodes")
@pytest.mark.heavy
def test_training_on_conversations_agrees_with_the_engine_and_repeats(tmp_path):
    lines, _ = train(tmp_path / "one")
    again, _ = train(tmp_path / "two")
    assert [line["loss"] for line in lines] == [line["loss"] for line in again]
    assert all(line["rollout/logp_diff_max"] < 1e-5 for line in lines)
    assert lines[0]["episodes/turns"] > 2
    assert lines[0]["rewards/Conversation/mean"] > 0
    assert lines[0]["rewards/unscorable_frac"] == 0


def test_what_an_environment_starts_with_is_added_to_the_last_message():
    text, other = {"type": "text", "text": "go"}, {"type": "text", "text": "!"}
    in_parts, message = [{"role": "user", "content": [text]}], {"role": "user", "content": "x"}
    for prompt, observation, content in (
        (PROMPT, "!", "go!"),
        (PROMPT, [other], [text, other]),
        (in_parts, "!", [text, other]),
        (in_parts, [other], [text, other]),
    ):
        assert with_observation(prompt, observation) == [{"role": "user", "content": content}]
    assert with_observation("go", "!") == "go!"
    assert with_observation(PROMPT, [message]) == [*PROMPT, message]
    with pytest.raises(ValueError, match="return a text, or make the prompt a list"):
        with_observation("go", [message])


def starts(returned):
    """A class of environments whose `reset` returns what this returns for the numbers from 0."""
    numbers = itertools.count()
    return type("Starts", (Echo,), {"reset": lambda self: returned(next(numbers))})


SHARED = Echo()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (7, "give a class"),
        ({"x": type("A", (), {})}, "no method reset"),
        ({"x": type("B", (), {"reset": lambda self: None})}, "neither a tool"),
        (starts(str), "started differently"),
        (starts(lambda _: 1 / 0), "'Starts' failed to start for all 2 episodes of a prompt, 2 times each.*division"),
        (starts(lambda _: b"bytes"), "must return a text, a list of messages, or None"),
        (starts(lambda _: "x" * 30_000), r"the prompt has \d+ tokens with what reset returned, and 9000 are allowed"),
        (lambda: SHARED, "returned an environment that another episode uses; let it return a new one"),
        (lambda made=[SHARED]: made.pop() if made else None, "returned None"),
    ],
)
@pytest.mark.filterwarnings("ignore:environment")
def test_environments_that_cannot_be_used_are_refused(environment, message):
    with pytest.raises((ValueError, RunError), match=message):
        played(lambda *_: "bye", environments=environment, environment_retries=1, max_prompt_tokens=9000)


def test_rows_name_environments():
    with pytest.raises(
        ValueError, match=r"which is not an environment of the run; choose from echo, other; did you mean echo"
    ):
        make_rules(TOKENIZER, EpisodeSettings(), (), {"echo": Echo, "other": Echo}).setup_of({"environment": "ech"})
