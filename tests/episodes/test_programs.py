"""Programs that ask the model over HTTP: their requests are the turns of episodes, token for token as sampled."""

import asyncio
import http.client
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from urllib.parse import urlsplit

import numpy as np
import pytest

from groupax import program
from groupax.core.errors import RunError
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.episodes.play import Prompts
from groupax.episodes.program import Listening
from groupax.episodes.program_server import server_at
from groupax.episodes.record import Record
from groupax.episodes.rules import make_rules
from groupax.rollouts.collector import sample_groups
from groupax.tools.tool import Tool

from .test_episodes import END, PROMPT, TOKENIZER, Script, call

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def post(base_url, path="chat/completions", headers=None, **body):
    """The response to a request."""
    headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def said(base_url, messages, headers=None, **more):
    """The assistant's message."""
    return post(base_url, messages=messages, headers=headers, **more)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def rendered(messages, tools=None):
    text = TOKENIZER.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return TOKENIZER.encode(str(text))


def written(text):
    return [*TOKENIZER.encode(text), END]


def played(run, answer=lambda *_: "yes", n=2, max_tokens=2000, example=None, record=None, script=None, **settings):
    """The episodes of a group, and the script that the model follows."""
    of_program = {name: settings.pop(name) for name in [*settings] if name not in EpisodeSettings.__dataclass_fields__}
    rules = make_rules(TOKENIZER, EpisodeSettings(**settings), environments=program(run, **of_program))
    script, params = script or Script(answer), SamplingParams(n=n, max_tokens=max_tokens)
    examples = [{"prompt": PROMPT, **(example or {})}]
    ids = [np.asarray(rendered(PROMPT), np.int32)]
    [group] = sample_groups(script, TOKENIZER, Prompts(examples, ids), params, 0, rules=rules, record=record)
    return group, script


def streams(rollout):
    """The streams of an episode: token ids, and which of them count."""
    return [
        (np.concatenate([each.prompt_ids, each.completion_ids]).tolist(), each.mask.tolist())
        for each in (rollout, *rollout.branches)
    ]


def stream(*parts):
    """A stream by hand: token ids of a prompt, then of parts with whether they count."""
    (prompt, _), *rest = parts
    return [*prompt, *(token for ids, _ in rest for token in ids)], [flag for ids, flag in rest for _ in ids]


def adding(base_url, prompt):
    """An agent with a tool, whose client writes ids of its own."""
    messages = list(prompt)
    while True:
        message = said(base_url, messages, tools=[ADD])
        messages.append(message)
        if not message.get("tool_calls"):
            return float(message["content"] == "it is 6")
        for each in message["tool_calls"]:
            numbers = json.loads(each["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": each["id"], "content": str(sum(numbers.values()))})


def test_requests_become_turns_of_an_episode_token_for_token():
    def answer(text, sample, turn):
        return "so " + call("add", a=2, b=3 + sample) if turn == 0 else f"it is {5 + sample}"

    group, script = played(adding, answer)
    assert [row.environment_reward for row in group] == [0.0, 1.0]
    assert {row.finish_reason for row in group} == {"done"}
    for sample, row in enumerate(group):
        assert len(row.turns) == 2
        assert not row.branches
        assert row.turns[0].calls[0].result == str(5 + sample)
        assert [message["role"] for message in row.messages or ()] == ["assistant", "tool", "assistant"]
        whole = np.concatenate([row.prompt_ids, row.completion_ids])
        tokens = [row.completion_ids[turn.start : turn.end].tolist() for turn in row.turns]
        assert tokens == [written(answer("", sample, turn)) for turn in (0, 1)]
        assert row.mask.sum() == sum(map(len, tokens))
        first = whole[: len(row.prompt_ids)].tolist()
        assert first == rendered(PROMPT, [ADD])
        assert whole[: row.turns[1].start + len(first)].tolist() in [TOKENIZER.encode(text) for text in script.prompts]


class Unruly:
    """An agent that retries, asks in parallel, rewrites its history, streams and gives up."""

    def __init__(self):
        self.gave_up = threading.Event()

    def __call__(self, base_url):
        plan = said(base_url, [user("plan")])
        both = [user("plan"), plan]
        threads = [threading.Thread(target=said, args=(base_url, [*both, user(name)])) for name in ("left", "right")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        title = said(base_url, [{"role": "system", "content": "Name it."}, user("plan")])
        history = [user(f"So far: {title['content']}")]  # its history, in its own words
        first = said(base_url, history)
        self.give_up(base_url, [user("nobody reads this")])
        events = self.stream(base_url, [*history, first, user("go on")])
        return float("".join(each["choices"][0]["delta"].get("content") or "" for each in events) == "on it")

    def asked(self, base_url, **body):
        url = urlsplit(base_url)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        return closing(connection)

    def give_up(self, base_url, messages):
        """Asks, and closes the connection before the answer."""
        with self.asked(base_url, messages=messages):
            time.sleep(0.1)  # for the request to arrive
        time.sleep(0.1)
        self.gave_up.set()

    def stream(self, base_url, messages):
        with self.asked(base_url, messages=messages, stream=True) as connection:
            lines = connection.getresponse().read().decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class SlowFor(Script):
    """A script that does not finish turns after a certain text before an event is set."""

    def __init__(self, answer, text, event):
        super().__init__(answer)
        self.text, self.event, self.held = text, event, []

    def step(self):
        waits = [each for each in self.pending if self.text in TOKENIZER.decode(each.prompt)]
        if waits and not self.event.is_set():
            self.pending = [each for each in self.pending if each not in waits]
            if not self.pending:
                time.sleep(0.01)
            yield from super().step()
            self.pending += waits
            return
        yield from super().step()


UNRULY = {"plan": "think", "left": "west", "right": "east", "Name it.": "a title", "So far": "fine", "nobody": "lost"}
UNRULY["go on"] = "on it"


def test_the_streams_of_an_unruly_agent_are_those_built_by_hand():
    def answer(text, *_):
        return UNRULY[max(UNRULY, key=text.rfind)] if "Name it." not in text else "a title"

    agent = Unruly()
    script = SlowFor(answer, "nobody", agent.gave_up)
    [row], _ = played(agent, n=1, script=script)
    assert row.environment_reward == 1.0
    system = {"role": "system", "content": "Name it."}
    plan = (rendered([user("plan")]), None), (written("think"), True)
    history = (rendered([user("So far: a title")]), None), (written("fine"), True)

    def bridge(text):
        return TOKENIZER.encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    found = streams(row)
    lone = [
        stream(*history, (bridge("go on"), False), (written("on it"), True)),
        stream((rendered([system, user("plan")]), None), (written("a title"), True)),
    ]
    forks = [stream(*plan, (bridge(asked), False), (written(UNRULY[asked]), True)) for asked in ("left", "right")]
    once = [(ids, [False] * len(written("think")) + mask[len(written("think")) :]) for ids, mask in forks]
    # the turn that both continue counts once, in one of the two
    assert sorted(found) in (sorted([*lone, forks[0], once[1]]), sorted([*lone, once[0], forks[1]]))
    assert row.num_sampled_tokens == sum(len(written(text)) for name, text in UNRULY.items() if name != "nobody")


def test_equal_requests_are_different_turns_with_their_own_randomness():
    keys = []

    class WithKeys(Script):
        def turn(self, sequence):
            keys.append(tuple(sequence.key))
            return super().turn(sequence)

    def twice(base_url):
        said(base_url, [user("?")])
        return float(len(post(base_url, messages=[user("?")], n=2)["choices"]))

    [row], _ = played(twice, n=1, script=WithKeys(lambda *_: "yes"))
    assert row.environment_reward == 2.0
    assert len(set(keys)) == len(keys) == 3


def test_coroutine_functions_and_commands_are_programs_too():
    async def agent(base_url, word):
        message = await asyncio.to_thread(said, base_url, [user(word)])
        return float(message["content"] == "yes")

    [row], _ = played(agent, n=1, example={"word": "go"})
    assert row.environment_reward == 1.0
    assert row.prompt == [user("go")]
    code = (
        "import json, os, sys, urllib.request as r; "
        "body = json.dumps({'messages': [{'role': 'user', 'content': sys.argv[1]}]}).encode(); "
        "assert sys.argv[2] == os.environ['OPENAI_BASE_URL']; "
        "url = sys.argv[2] + '/chat/completions'; "
        "q = r.Request(url, body, {'content-type': 'application/json'}); "
        "text = json.loads(r.urlopen(q).read())['choices'][0]['message']['content']; "
        "print('noise'); print(0.25); sys.exit(text != json.loads(os.environ['GROUPAX_ROW'])['word'])"
    )
    for word, score, reward in (("yes", "exit", 1.0), ("no", "exit", 0.0), ("yes", "stdout", 0.25)):
        command = [sys.executable, "-c", code, "{word}{other}", "{base_url}"]
        [row], _ = played(command, n=1, example={"word": word}, score=score)
        assert row.environment_reward == reward
        assert row.prompt == [user(f"{word}{{other}}")]


@pytest.mark.heavy
def test_a_program_that_fails_begins_again_and_is_left_out_in_the_end():
    attempts = []

    def once(base_url, seed):
        said(base_url, [user("?")])
        attempts.append(seed)
        if len(attempts) < 2:
            raise ConnectionError("no network")
        return 1.0

    with pytest.warns(UserWarning, match="begins again"):
        [row], _ = played(once, n=1)
    assert (row.environment_reward, row.finish_reason) == (1.0, "done")
    assert len(set(attempts)) == 1

    def never(base_url):
        said(base_url, [user("?")])
        raise ConnectionError("no network")

    with pytest.warns(UserWarning, match="left out"):
        [row], _ = played(never, n=1, environment_retries=0)
    assert (row.environment_reward, row.finish_reason) == (None, "env_error")
    [row], _ = played(never, n=1, error_reward=-1.0)
    assert (row.environment_reward, row.finish_reason) == (-1.0, "done")
    with pytest.warns(UserWarning, match="failed"), pytest.raises(RunError, match="ended without a turn of the model"):
        played(lambda: 1.0)
    with pytest.warns(UserWarning, match="longer than"):
        [row], _ = played(
            lambda base_url: (said(base_url, [user("?")]), time.sleep(1)), n=1, timeout_s=0.3, environment_retries=0
        )
    assert row.finish_reason == "timeout"


def test_limits_refuse_requests_and_end_the_episode():
    def stubborn(base_url):
        messages = [user("?")]
        while True:
            messages += [said(base_url, messages), user("more")]

    [row], _ = played(stubborn, n=1, max_turns=3)
    assert (row.finish_reason, len(row.turns), row.environment_reward) == ("max_turns", 3, 0.0)
    [row], _ = played(stubborn, n=1, max_tokens=150)
    assert row.finish_reason == "length"
    assert len(row.completion_ids) <= 150

    def strict(base_url):
        if post(base_url, messages=[user("?")])["choices"][0]["finish_reason"] == "length":
            raise EOFError

    [row], _ = played(strict, n=1, max_turn_tokens=2)
    assert (row.finish_reason, row.environment_reward) == ("turn_length", 0.0)
    codes = []

    def careful(base_url):
        try:
            stubborn(base_url)
        except urllib.error.HTTPError as error:
            with error:
                codes.append(json.loads(error.read())["error"]["code"])
        return 0.5

    [row], _ = played(careful, n=1, max_tokens=150)
    assert (row.finish_reason, row.environment_reward, codes) == ("length", 0.5, ["context_length_exceeded"])


def test_a_resumed_run_does_not_run_a_program_again_that_had_ended(tmp_path):
    runs = []

    def agent(base_url, prompt):
        runs.append(1)
        return adding(base_url, prompt)

    def answer(text, sample, turn):
        return call("add", a=1, b=2) if turn == 0 else "it is 3"

    first, _ = played(agent, answer, record=Record(tmp_path, "rollout_000000"))
    again, _ = played(agent, answer, record=Record(tmp_path, "rollout_000000"))
    assert len(runs) == 2
    assert [streams(row) for row in first] == [streams(row) for row in again]
    assert [row.environment_reward for row in first] == [row.environment_reward for row in again]
    other, _ = played(agent, lambda *_: "no call", record=Record(tmp_path, "rollout_000000"))
    assert len(runs) == 4  # the model says something else, so the record does not count
    assert all(len(row.turns) == 1 for row in other)


def test_sessions_that_others_reach_need_their_key():
    codes = []

    def agent(base_url, anthropic_base_url, api_key):
        bearer, header = {"authorization": f"Bearer {api_key}"}, {"x-api-key": api_key}
        for wrong in ({}, {"authorization": "Bearer groupax"}, {"x-api-key": api_key[1:]}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                said(base_url, [user("?")], wrong)
            with refused.value:  # which holds the connection
                codes.append(refused.value.code)
        first = said(base_url, [user("?")], bearer)["content"]
        more = {"max_tokens": 9, "messages": [user("!")]}
        second = post(f"{anthropic_base_url}/v1", "messages", header, **more)["content"][0]["text"]
        return float(first == second == "yes")

    group, _ = played(agent, n=2, host="0.0.0.0", public_url="http://127.0.0.1:{port}/")
    assert [row.environment_reward for row in group] == [1.0, 1.0]
    assert codes == [401] * 6
    assert all(row.num_sampled_tokens == 2 * len(written("yes")) for row in group)


def test_programs_reach_this_machine_by_its_name_or_its_public_url():
    assert Listening().url(5) == "http://127.0.0.1:5"
    assert Listening("0.0.0.0", 8100).url(8100) == f"http://{socket.gethostname()}:8100"
    assert Listening("fd00::1").url(7) == "http://[fd00::1]:7"
    assert Listening("0.0.0.0", 8100, "https://trainer.example/").url(8100) == "https://trainer.example"


def test_rollouts_of_a_process_share_a_server():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port}"):
            server_at(Listening(port=port))
    assert server_at(Listening(port=port)) is server_at(Listening(port=port))
    socket.create_connection(("127.0.0.1", port)).close()


NOTHING = Tool("nothing", len, {"type": "function", "function": {**ADD["function"], "name": "nothing"}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: program(len, score="exit"), "score must be"),
        (lambda: program(len, timeout_s=0), "timeout_s"),
        (lambda: program(len, env={"A": "b"}), "env is for commands"),
        (lambda: program(len, port=70000), "port must be"),
        (lambda: program(len, host="0.0.0.0", public_url="trainer:8100"), "public_url must be"),
        (lambda: make_rules(TOKENIZER, EpisodeSettings(), [NOTHING], program(len)), "tools=nothing"),
    ],
)
def test_programs_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
