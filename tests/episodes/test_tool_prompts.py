"""Prompts with tools, tool calls and tools' results, as the chat template writes them."""

import json

import datasets
import numpy as np
import pytest

from groupax.data.chat import CHAT_TEMPLATES, Conversation, check_messages, render, render_all, writes_tools
from groupax.data.examples import load_examples
from groupax.data.prompts import encode_examples
from groupax.data.tokenizer import encode_prompts
from tests.data.test_bridge import HERMES, LOOKUP, byte_tokenizer, encode, result, user

CONCATENATES = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}"
)
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


def test_each_conversation_has_its_own_tools():
    tokenizer = byte_tokenizer()
    prompts, tools = [[user("Q")]] * 3, [[LOOKUP], [], [OTHER]]
    own = [Conversation(prompt, "a", {}, each) for prompt, each in zip(prompts, tools, strict=True)]
    texts = render_all(tokenizer, own)
    assert ["lookup" in text for text in texts] == [True, False, False]
    assert ["other" in text for text in texts] == [False, False, True]
    encoded = encode_prompts(tokenizer, prompts, tools=tools)
    rows = [{"prompt": prompt} for prompt in prompts]
    kept = encode_examples(rows, tokenizer, 1000, "error", tools=tools).token_ids
    for text, ids, same in zip(texts, encoded, kept, strict=True):
        assert np.array_equal(ids, encode(tokenizer, text))
        assert np.array_equal(ids, same)


def test_templates_and_prompts_without_room_for_tools_are_refused():
    tokenizer = byte_tokenizer(CHAT_TEMPLATES["chatml"])
    assert not writes_tools(tokenizer)
    with pytest.raises(ValueError, match="a prompt has tools, but the chat template does not write them"):
        render(tokenizer, [user("Q")], "a prompt", tools=[LOOKUP])
    with pytest.raises(
        ValueError, match="prompt 0 is a string, which is not rendered by a chat template, so the model"
    ):
        encode_prompts(byte_tokenizer(), ["Q"], tools=[[LOOKUP]])
    with pytest.raises(ValueError, match="a tool must be a schema"):
        render(byte_tokenizer(), [user("Q")], "a prompt", tools=[{"name": "lookup"}])
    with pytest.raises(ValueError, match="the chat template fails with tools"):
        writes_tools(byte_tokenizer("{% if tools %}{{ raise_exception('none!') }}{% endif %}"))


@pytest.mark.parametrize("template", [HERMES, CONCATENATES])
@pytest.mark.parametrize("arguments", [{"value": "é"}, '{"value": "é"}'])
def test_arguments_of_calls_are_objects_or_texts_as_the_template_needs(template, arguments):
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    for given in (calls, [calls[0]["function"]]):
        conversation = [user("Q"), {"role": "assistant", "content": "", "tool_calls": given}]
        text = render(byte_tokenizer(template), conversation, "x")
        start = text.index("{", text.index("arguments") if template == HERMES else 0)
        assert json.JSONDecoder().raw_decode(text[start:])[0] == {"value": "é"}


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([7], "must be a list of calls"),
        ([{"function": {"arguments": {}}}], "must be a list of calls"),
        ([{"function": {"name": "f", "arguments": "{"}}], "arguments that are not JSON"),
        ([{"function": {"name": "f", "arguments": "7"}}], "must be an object, got 7"),
    ],
)
def test_calls_that_are_none_are_refused(calls, fault):
    with pytest.raises(ValueError, match=fault):
        render(byte_tokenizer(), [user("Q"), {"role": "assistant", "content": "", "tool_calls": calls}], "x")


def test_results_may_be_encoded_but_not_left_out():
    conversation = [user("Q"), result('{"degrees": 42}')]
    encoded = "{% for m in messages %}{{ m.content | replace('\"', '') | replace(':', ' =') }};{% endfor %}"
    assert render(byte_tokenizer(encoded), conversation, "x") == "Q;{degrees = 42};"
    with pytest.raises(ValueError, match="leaves out message 2 of 2, which has the role 'tool'"):
        render(byte_tokenizer("{{ messages[0].content }}"), conversation, "x")


def test_nulls_that_a_table_adds_to_parts_and_calls_are_left_out():
    part = {"type": "text", "text": "q", "metadata": {"source": "a", "page": None}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}, "strict": None}}
    asked, said = check_messages(
        [{"role": "user", "content": [part]}, {"role": "assistant", "tool_calls": [call]}], "x"
    )
    assert asked["content"] == [{**part, "metadata": {"source": "a"}}]
    assert said["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}]


@pytest.mark.parametrize("source", ["dataset", "parquet"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"city": "P", "unit": None}, {"city": "P"}),
        ({"of": [None, {"y": 1}]}, {"of": [None, {"y": 1}]}),
        ({}, {}),
        (json.dumps({"city": None}), None),
    ],
)
def test_nulls_that_a_table_adds_to_arguments_are_left_out(source, given, expected, tmp_path):
    def row(name, arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}

    other = given if isinstance(given, str) else {"query": "q", "unit": "C", "in": {"w": 1, "x": 2}}
    table = datasets.Dataset.from_list([row("weather", given), row("search", other)])
    if source == "parquet":
        table.to_parquet(tmp_path / "train.parquet")
        table = tmp_path / "train.parquet"
    rows = load_examples(table)
    [found] = next(message["tool_calls"] for message in rows[0]["prompt"] if message["tool_calls"])
    assert found["function"]["arguments"] == (given if expected is None else expected)
    if hasattr(rows, "column_names"):
        assert rows["prompt"][0] == rows[0]["prompt"]
