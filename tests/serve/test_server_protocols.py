"""Protocols of the server, asked by the clients' own packages: tools, reasoning, streams."""

import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from groupax import init_model, load_model
from groupax.data.tokenizer import load_tokenizer
from tests.conftest import TINY
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.test_bridge import LOOKUP

from .test_server import KEY, serving_engine

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
    extra = {"logit_bias": {str(token): 100}, "stop_token_ids": [token], "seed": 1, **more}
    return {"temperature": 0.0, "max_tokens": 20, "extra_body": extra}


@pytest.fixture(scope="module")
def model():
    return init_model({**TINY, "vocab_size": len(TOKENIZER), "max_position_embeddings": 2048}, seed=0)


@pytest.fixture(scope="module")
def server(model):
    with serving_engine(model, TOKENIZER, "tiny") as server:
        yield server


@pytest.fixture
def address(server):
    return server[0]


@pytest.fixture
def client(server):
    return server[1]


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

    with client.chat.completions.stream(messages=USER, **given) as stream:
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    again, function = streamed.message.tool_calls[0].id, streamed.message.tool_calls[0].function
    assert (again, function.arguments) == (call.id, call.function.arguments)

    none = client.chat.completions.create(messages=USER, **{**given, "tool_choice": "none"})
    assert none.choices[0].message.content == CALL
    choice_of = {"type": "function", "function": {"name": "lookup"}}
    forced = client.chat.completions.create(messages=USER, **{**given, **saying(REST), "tool_choice": choice_of})
    assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments) == {"value": "x"}


def test_reasoning_is_separate(client):
    given = {"model": "tiny", "messages": USER, **saying(THOUGHT, chat_template_kwargs={"quick": False})}
    message = client.chat.completions.create(**given).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes")
    deltas = [piece.choices[0].delta for piece in client.chat.completions.create(**given, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes"


def test_an_openai_client_asks_for_responses(client):
    given = {"model": "tiny", "tools": [{"type": "function", **LOOKUP["function"], "strict": False}]}
    settings = saying(CALL)
    given |= {"temperature": 0.0, "max_output_tokens": settings["max_tokens"], "extra_body": settings["extra_body"]}
    answer = client.responses.create(input="What is a word?", instructions="Be brief.", **given)
    assert (answer.status, answer.instructions, answer.incomplete_details) == ("completed", "Be brief.", None)
    [call] = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "lookup", {"value": "word"})
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What is a word?"}]}, call.model_dump()]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
    given["extra_body"] = saying(THOUGHT, return_token_ids=True)["extra_body"]
    after = client.responses.create(input=items, instructions="Be brief.", **given)
    assert after.output_text == "Yes"
    assert [item.type for item in after.output] == ["reasoning", "message"]
    assert after.output[0].content[0].text == "Hm."
    assert after.usage.output_tokens == len(after.token_ids) == 1
    text = TOKENIZER.decode(after.prompt_token_ids)
    assert "\nBe brief.<|im_end|>" in text
    assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n" in text

    with client.responses.stream(input=items, **given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == "Yes"
    cut = client.responses.create(input="Hi", model="tiny", max_output_tokens=2, extra_body={"ignore_eos": True})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id.*send the whole conversation as input"):
        client.responses.create(input="Hi", model="tiny", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match=r"include=.* is not supported"):
        client.responses.create(input=USER, model="tiny", include=["message.output_text.logprobs"])


@pytest.fixture
def anthropic_client(address):
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


def test_an_anthropic_client_calls_tools_and_sends_results(anthropic_client):
    messages = anthropic_client.messages
    tool = {"name": "lookup", "description": "Looks up.", "input_schema": LOOKUP["function"]["parameters"]}
    given = {"model": "tiny", "max_tokens": 20, "tools": [tool], "system": [{"type": "text", "text": "Be brief."}]}
    given["extra_body"] = saying(CALL)["extra_body"]
    answer = messages.create(messages=USER, **given)
    assert answer.stop_reason == "tool_use"
    [call] = answer.content
    assert (call.type, call.name, call.input) == ("tool_use", "lookup", {"value": "word"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
    history = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    given["extra_body"] = saying(THOUGHT)["extra_body"]
    after = messages.create(messages=history, **given)
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in after.content] == [
        ("thinking", "Hm."),
        ("text", "Yes"),
    ]
    assert (after.stop_reason, after.usage.output_tokens) == ("end_turn", 1)
    counted = messages.count_tokens(messages=history, **{name: given[name] for name in ("model", "tools", "system")})
    assert counted.input_tokens == after.usage.input_tokens
    for body, expected in ((saying(CALL), answer), (saying(THOUGHT), after)):
        asked = USER if expected is answer else history
        with messages.stream(messages=asked, **{**given, "extra_body": body["extra_body"]}) as stream:
            final = stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in expected.content]
        assert (final.stop_reason, final.usage) == (expected.stop_reason, expected.usage)


def test_an_anthropic_client_gets_errors_and_ends_of_its_kind(anthropic_client):
    import anthropic

    given = {"model": "tiny", "max_tokens": 30, "messages": USER}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0 must be a tool of yours") as caught:
        anthropic_client.messages.create(**given, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
        anthropic_client.messages.create(**{**given, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
        anthropic_client.with_options(api_key="wrong").messages.create(**given)
    stopped = anthropic_client.messages.create(**given, stop_sequences=["Y"], extra_body=saying(THOUGHT)["extra_body"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Y")
    cut = anthropic_client.messages.create(**{**given, "max_tokens": 2}, extra_body={"ignore_eos": True})
    assert cut.stop_reason == "max_tokens"
    begun = [*USER, {"role": "assistant", "content": "A word is "}]
    more = anthropic_client.messages.create(**{**given, "messages": begun}, extra_body={"return_token_ids": True})
    assert TOKENIZER.decode(more.prompt_token_ids).endswith("<|im_start|>assistant\nA word is")


# -- structured responses


class Pet(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


def test_an_openai_client_parses_what_it_receives(stories):
    with serving_engine(load_model(stories), load_tokenizer(stories, "plain"), "stories") as (_, client):
        chat = {"model": "stories", "messages": [{"role": "user", "content": "A pet:"}], "max_tokens": 80, "seed": 1}
        parsed_pet = client.chat.completions.parse(**chat, response_format=Pet).choices[0].message.parsed
        assert isinstance(parsed_pet, Pet)
        for choice in client.chat.completions.create(**chat, n=4, response_format={"type": "json_object"}).choices:
            assert choice.message.content.startswith("{")
            assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
        with client.chat.completions.stream(**chat, response_format=Pet) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed_pet

        text = {"model": "stories", "prompt": "Once", "seed": 1, "max_tokens": 30}
        extra = {"regex": " [a-z]{1,9}ing[.]", "return_token_ids": True}
        [choice] = client.completions.create(**text, extra_body=extra).choices
        assert re.fullmatch(" [a-z]{1,9}ing[.]", choice.text)
        free = client.completions.create(**text)  # in the same programs as constrained ones, or in its own
        assert free.choices[0].finish_reason == "length"
        for regex, message in (("(", "is not valid"), ("(?=a)b", "look-around")):
            with pytest.raises(openai.BadRequestError, match=message):
                client.completions.create(**text, extra_body={"regex": regex})
