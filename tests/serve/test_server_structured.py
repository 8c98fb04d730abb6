"""Structured responses of the server: fields of requests, and an openai client that parses what it receives."""

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

from .test_serve import SCHEMA
from .test_server import serving_engine


class Pet(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


@pytest.mark.heavy
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
        extra = {"structured_outputs": {"regex": " [a-z]{1,9}ing[.]"}, "return_token_ids": True}
        [choice] = client.completions.create(**text, extra_body=extra).choices
        assert re.fullmatch(" [a-z]{1,9}ing[.]", choice.text)
        free = client.completions.create(**text)  # in the same programs as constrained ones, or in its own
        assert free.choices[0].finish_reason == "length"
        for regex, message in (("(", "is not valid"), ("(?=a)b", "look-around")):
            with pytest.raises(openai.BadRequestError, match=message):
                client.completions.create(**text, extra_body={"regex": regex})


STRICT = {
    "type": "function",
    "function": {"name": "feed", "parameters": Pet.model_json_schema(), "strict": True, "description": "Feeds a pet."},
}

OBJECT = {"type": "object"}


@pytest.mark.heavy
def test_arguments_of_strict_tools_are_valid():
    tokenizer = chat_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    model = init_model({**TINY, **sizes}, seed=0)
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [STRICT],
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    with serving_engine(model, tokenizer, "tiny") as (_, client):
        create = client.chat.completions.create
        for choice in ("required", {"type": "function", "function": {"name": "feed"}}):
            for answer in create(**chat, n=4, seed=1, tool_choice=choice).choices:
                assert answer.finish_reason == "tool_calls"
                for call in answer.message.tool_calls:
                    Pet.model_validate_json(call.function.arguments)
        loose = {"name": "walk", "parameters": {**OBJECT, "properties": {"steps": {"enum": [1, 23]}}}}
        odd = {"name": "sleep", "parameters": {**OBJECT, "not": {}}}  # cannot be translated
        bare = {"name": "rest", "description": "Rests."}
        for function in (loose, odd, bare):
            [called] = create(
                **{**chat, "tools": [{"type": "function", "function": function}]}, tool_choice="required", seed=2
            ).choices
            if function is odd and called.message.tool_calls is None:  # without an end, or with a number like 9e999
                assert '{"name": "sleep", "arguments": {' in called.message.content
                continue
            [one, *_] = called.message.tool_calls
            assert one.function.name == function["name"]
            assert set(json.loads(one.function.arguments)) <= {"steps"} or function is odd
        named = {"type": "function", "function": {"name": "rest"}}
        tools = [{"type": "function", "function": each} for each in (loose, bare)]
        [rested] = create(**{**chat, "tools": tools}, tool_choice=named).choices
        assert [call.function.arguments for call in rested.message.tool_calls] == ["{}"]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        answers = create(**chat, n=8, seed=1, response_format=form).choices
        for answer in answers:
            if answer.message.tool_calls:
                Pet.model_validate_json(answer.message.tool_calls[0].function.arguments)
            else:
                assert set(json.loads(answer.message.content)) == {"a"}
        assert {answer.finish_reason for answer in answers} == {"stop", "tool_calls"}
        assert create(**chat, seed=1).choices[0].finish_reason == "stop"  # text that begins no call, which ended
        tokenizer.chat_template += "{% if thinks %}<think>{% endif %}"
        with pytest.raises(openai.BadRequestError, match="the chat template opens reasoning"):
            create(**chat, response_format=form, extra_body={"chat_template_kwargs": {"thinks": True}})
        refused = {**STRICT, "function": {**STRICT["function"], "parameters": {"type": "object", "not": {}}}}
        with pytest.raises(openai.BadRequestError, match="has 'not', which is not supported"):
            create(**{**chat, "tools": [refused]})
