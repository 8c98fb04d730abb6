"""Protocols of the server, asked by the clients' own packages: tools, reasoning, streams."""

import json
from contextlib import contextmanager

import openai
import pytest

from groupax import Engine, init_model
from groupax.serve.app import Limits, create_app
from groupax.serve.loop import EngineLoop

from .chat_tokenizers import chat_tokenizer
from .conftest import TINY
from .test_bridge import LOOKUP
from .test_server import KEY, listening

pytestmark = pytest.mark.heavy

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"value": "word"}}\n</tool_call>'
REST = 'arguments": {"value": "x"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\nYes"
TOKENIZER = chat_tokenizer(CALL, REST, THOUGHT)
TOKENIZER.chat_template += "{% if quick %}<think></think>{% endif %}"
USER = [{"role": "user", "content": "What is a word?"}]


def saying(text, **more):
    """Settings with which any model says a text that is one token, and stops."""
    token = TOKENIZER.convert_tokens_to_ids(text)
    extra = {"logit_bias": {str(token): 100}, "stop_token_ids": [token], **more}
    return {"temperature": 0.0, "max_tokens": 20, "extra_body": extra}


@contextmanager
def served(**limits):
    model = init_model({**TINY, "vocab_size": len(TOKENIZER), "max_position_embeddings": 2048}, seed=0)
    engine = Engine.of(model, TOKENIZER, chunk_steps=8, kv_bytes=1 << 26)
    loop = EngineLoop({"tiny": engine}).start()
    try:
        with listening(create_app(loop, Limits(api_keys=(KEY,), **limits))) as address:
            yield address
    finally:
        loop.close()


@pytest.fixture(scope="module")
def address():
    with served() as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_an_openai_client_calls_tools_and_sends_results(client):
    given = {"model": "tiny", "tools": [LOOKUP], "seed": 1, **saying(CALL)}
    answer = client.chat.completions.create(messages=USER, **given)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("lookup", {"value": "word"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    after = client.chat.completions.create(messages=[*USER, choice.message, result], **given)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert after.choices[0].message.tool_calls[0].id != call.id

    none = client.chat.completions.create(messages=USER, **{**given, "tool_choice": "none"})
    assert none.choices[0].message.content == CALL
    choice_of = {"type": "function", "function": {"name": "lookup"}}
    forced = client.chat.completions.create(messages=USER, **{**given, **saying(REST), "tool_choice": choice_of})
    assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments) == {"value": "x"}


def test_an_openai_client_streams_tools(client):
    given = {"model": "tiny", "messages": USER, "tools": [LOOKUP], "seed": 1, **saying(CALL)}
    whole = client.chat.completions.create(**given).choices[0]
    with client.chat.completions.stream(**given) as stream:
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].id == whole.message.tool_calls[0].id
    assert choice.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


def test_reasoning_is_separate(client):
    given = {"model": "tiny", "messages": USER, **saying(THOUGHT, chat_template_kwargs={"quick": False})}
    message = client.chat.completions.create(**given).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes")
    deltas = [piece.choices[0].delta for piece in client.chat.completions.create(**given, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes"
