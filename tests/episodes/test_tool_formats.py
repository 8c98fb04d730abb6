"""Turns taken apart: calls of each format, reasoning, content, and text that only looks like a call."""

import contextlib
import glob
import json
import os
import random
import time

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from groupax.tools.calls import ParsedTurn
from groupax.tools.formats import FORMATS, CallFormat, call_format
from groupax.tools.readers import MAX_CALLS

ENDS = ("<|im_end|>", "<|eot_id|>", "</s>")


def parse(name, text, prompt=""):
    return CallFormat(name, FORMATS[name][0], ENDS, "").parse(text, prompt)


def written(name, calls):
    """The calls as models of a format write them."""
    if name == "hermes":
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>"
            for n, a in calls
        )
    if name == "qwen_xml":
        return "\n".join(
            f"<tool_call>\n<function={n}>\n"
            + "".join(
                f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in a.items()
            )
            + "</function>\n</tool_call>"
            for n, a in calls
        )
    if name == "llama":
        return "<|python_tag|>" + "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    if name == "mistral":
        return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a, "id": "abcdefgh9"} for n, a in calls])
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for n, a in calls
    )


def read_back(turn):
    return [(call.name, call.arguments) for call in turn.calls]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_with_content_and_reasoning(name):
    calls = [("add", {"a": "1", "b": "x\ny"}), ("now", {})]
    if name == "gpt_oss":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{written(name, calls)}"
        content = ""
    elif name == "mistral":
        text, content = f"[THINK]Hm.[/THINK]Let me see.{written(name, calls)}</s>", "Let me see."
    elif name == "llama":
        text, content = f"<think>\nHm.\n</think>\n\n{written(name, calls)}<|eot_id|>", ""
    else:
        text, content = f"<think>\nHm.\n</think>\n\nLet me see.\n{written(name, calls)}<|im_end|>\n", "Let me see."
    turn = parse(name, text)
    assert read_back(turn) == calls
    assert not any(call.fault for call in turn.calls)
    assert all(call.text and call.text in text for call in turn.calls)
    assert (turn.content, turn.reasoning) == (content, "Hm.")


@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_survive_being_written(name):
    draw = random.Random(name)
    pieces = ["</tool_call>", "<think>", "[TOOL_CALLS]", "<|call|>", *'"\\{}é🙂\n a;']
    for _ in range(300):
        calls = []
        for _ in range(draw.randint(1, 4)):
            texts = {f"k{i}": "".join(draw.choices(pieces, k=draw.randint(0, 8))) for i in range(draw.randint(0, 3))}
            if name != "qwen_xml":
                texts["more"] = draw.choice([1, 2.5, None, True, [1, {"a": ["b"]}], {"x": {}}])
            calls.append((f"tool{draw.randint(0, 9)}", texts))
        turn = parse(name, written(name, calls))
        assert read_back(turn) == calls
        assert not any(call.fault for call in turn.calls)
        assert turn.content == turn.reasoning == ""


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_never_runs(name):
    calls = [("add", {"a": "1", "b": "text"}), ("sub", {"a": "2"})]
    if name == "llama":
        calls = calls[:1]  # of several, those that are complete are read
    text = written(name, calls)
    one = len(written(name, calls[:1]))
    for end in range(len(text)):
        turn = parse(name, text[:end])
        assert all(call.fault for call in turn.calls if call.name != "add" or end < one)
        assert sum(not call.fault for call in turn.calls) < len(calls)
    assert [call.fault for call in parse(name, text).calls] == [""] * len(calls)
    assert parse(name, text[: one - 15]).calls[-1].fault


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "not valid JSON: .* at character 29"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name of a tool; it has the keys 'arguments'"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            "arguments must be a JSON object, got 'x'",
        ),
        ("hermes", '<tool_call>{"name": "f"} and</tool_call>', "text follows the call"),
        ("hermes", '<tool_call>{"name": "f"}', "ends inside of this call: </tool_call> is missing"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not valid JSON"),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "half of a surrogate pair"),
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 99}{"]" * 99}}}}}</tool_call>',
            "deeper than 64",
        ),
        ("qwen_xml", '<tool_call>{"name": "f"}</tool_call>', "<function=name> is missing"),
        ("qwen_xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "'a' is not closed"),
        (
            "qwen_xml",
            "<tool_call><function=f><parameter=a>1</parameter>\n<param=b>2</parameter></function></tool_call>",
            "is missing before '<param=b>",
        ),
        *(
            (
                "qwen_xml",
                f"<tool_call><function=f><parameter=a>\n1\n{end}<parameter=b>\n2\n</parameter></function></tool_call>",
                "'a' is not closed",
            )
            for end in ("", "</parameters>\n")
        ),
        ("qwen_xml", "<tool_call><function=f></function>1</tool_call>", "text follows the call"),
        (
            "qwen_xml",
            "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 2 + "</function></tool_call>",
            "the parameter 'a' is repeated",
        ),
        ("qwen_xml", "<tool_call>\n<function=f>\n</function>", "ends inside of this call"),
        ("llama", '{"name": "f", "parameters": {"a" 1}}', "not valid JSON"),
        ("llama", '{"name": "f", "parameters": {}} done', "text follows the JSON of the call: 'done'"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "cannot be read: it is cut off"),
        ("mistral", "[TOOL_CALLS]", "ends inside of this call"),
        ("mistral", "[TOOL_CALLS]f", r"name\[ARGS\] and a JSON object, must follow"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "must be a JSON object"),
        ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{1}<|call|>", "arguments are not valid JSON"),
        ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{}", r"ends inside .* <\|call\|> is missing"),
        ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{}1<|call|>", "must follow the JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(name, text, fault):
    turn = parse(name, text)
    assert len(turn.calls) == 1
    with pytest.raises(ValueError, match=fault):
        raise ValueError(turn.calls[0].fault)
    assert len(turn.calls[0].fault) < 400
    assert turn.calls[0].text in text


@pytest.mark.parametrize(
    ("name", "text", "prompt", "expected"),
    [
        ("hermes", "<think>a <tool_call>{}</tool_call></think>b", "", ("b", "a <tool_call>{}</tool_call>")),
        ("hermes", "a</think>b", "", ("b", "a")),
        ("hermes", "a <tool_call>{}</tool_call>", "<think>\n", ("", "a <tool_call>{}</tool_call>")),
        ("hermes", "<think>\n\n</think>\n\nb<|im_end|>", "<think></think>", ("b", "")),
        ("hermes", "a<think>b</think>c<think>d</think>", "", ("ac", "b\nd")),
        ("hermes", "tool_call> </tool_call> <tool_call", "", ("tool_call> </tool_call> <tool_call", "")),
        ("llama", '{"name": "Bob", "age": 3}', "", ('{"name": "Bob", "age": 3}', "")),
        ("llama", 'See {"name": "f", "parameters": {}}', "", ('See {"name": "f", "parameters": {}}', "")),
        ("mistral", "[THINK]a[/THINK] b </s>", "", ("b", "a")),
        ("gpt_oss", "<|channel|>final<|message|>a to=functions.f<|return|>", "", ("a to=functions.f", "")),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>a <|channel|> to=functions.f",
            "",
            ("", "a <|channel|> to=functions.f"),
        ),
        ("gpt_oss", "a<|message|>b", "", ("a\nb", "")),
    ],
)
def test_text_that_is_no_call(name, text, prompt, expected):
    assert parse(name, text, prompt) == ParsedTurn(*expected, ())


def test_the_newer_form_of_mistral():
    text = '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}</s>'
    assert read_back(parse("mistral", text)) == [("f", {"a": "[TOOL_CALLS]"}), ("g", {})]
    assert parse("mistral", text).calls[0].text == '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}'
    assert read_back(parse("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}')) == [("f", {})]


def test_both_orders_of_harmony_headers():
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a": "<|call|>"}<|call|>'
    assert read_back(parse("gpt_oss", text)) == [("f", {"a": "<|call|>"})]
    assert read_back(parse("gpt_oss", "<|channel|>analysis to=python<|message|>{}<|call|>")) == [("python", {})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": VALUE}</tool_call>'),
        ("llama", '{"name": "f", "parameters": VALUE}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]VALUE"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>VALUE<|call|>"),
    ],
)
def test_arguments_may_have_raw_line_breaks_and_be_a_text_of_json(name, text):
    expected = [("f", {"code": "a\n\tb"})]
    assert read_back(parse(name, text.replace("VALUE", '{"code": "a\n\tb"}'))) == expected
    if name in ("hermes", "llama"):
        assert read_back(parse(name, text.replace("VALUE", json.dumps(json.dumps(expected[0][1]))))) == expected
        assert read_back(parse(name, text.replace("VALUE", '""'))) == [("f", {})]
        assert read_back(parse(name, text.replace("VALUE", "null"))) == [("f", {})]
        assert parse(name, text.replace("VALUE", '"{} x"')).calls[0].fault


def test_a_call_that_is_not_closed_does_not_swallow_the_next():
    broken = "<tool_call><function=f><parameter=a>1</parameter></tool_call>"
    first, second = parse("qwen_xml", broken + written("qwen_xml", [("g", {"b": "2"})])).calls
    assert first.fault
    assert (second.name, second.arguments, second.fault) == ("g", {"b": "2"}, "")


def test_a_value_of_xml_may_contain_tags():
    value = "<parameter=a>\n</parameter> and </tool_call>\n\n <think>"
    turn = parse("qwen_xml", written("qwen_xml", [("f", {"a": value, "b": ""})]))
    assert read_back(turn) == [("f", {"a": value, "b": ""})]


HOSTILE = [
    *("<tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "<|message|>", "<|channel|>", " to=f "),
    *('{"', "[", '<tool_call>{"a":"', '[TOOL_CALLS]["', "<tool_call><function=f>", "<parameter=a>", "</parameter>\n"),
    *("<tool_call><function=f><parameter=a>x</parameter> ", "<|im_end|>", "<tool_call>{}</tool_call>", " ", "{};"),
    *("<|channel|>commentary to=f<|message|>{", '{"name": "f", "parameters": ', "<|start|>", "\x00\ud7ff\u202e", '\\"'),
]


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_texts_take_linear_time(name):
    start = time.perf_counter()
    for unit in HOSTILE:
        for text in (unit * 100_000, "<tool_call>" + unit * 100_000, "[TOOL_CALLS]" + unit * 100_000):
            turn = parse(name, text[:1_000_000])
            assert len(turn.calls) <= MAX_CALLS + 1
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("name", FORMATS)
def test_any_mixture_of_marks_is_read(name):
    draw = random.Random(name)
    marks = [*(mark for _, marks in FORMATS.values() for mark in marks), *HOSTILE, '"name": "f"', "}", "]", "x", "\n"]
    for _ in range(2000):
        turn = parse(name, "".join(draw.choices(marks, k=draw.randint(0, 30))), draw.choice(["", "<think>"]))
        assert isinstance(turn, ParsedTurn)


# -- the format of a chat template

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>
{% endif %}{% endif %}"""
JSON_CALL = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
CALLS = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>".replace("KEY", "arguments"),
    "qwen_xml": (
        "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
        "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "llama": JSON_CALL.replace("KEY", "parameters"),
    "mistral": "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    "gpt_oss": (
        "<|channel|>commentary to=functions.{{ call.function.name }} <|constrain|>json<|message|>"
        "{{ call.function.arguments | tojson }}<|call|>"
    ),
}


def a_tokenizer(template):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|call|>", "[TOOL_CALLS]"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_that_of_the_chat_template(name):
    assert CALLS.keys() == FORMATS.keys()
    chosen = call_format(a_tokenizer(TEMPLATE.replace("CALL", CALLS[name])))
    assert chosen.name == name
    assert chosen.generation_prompt == "<|im_end|>\n<|im_start|>assistant\n"
    assert read_back(chosen.parse(written(name, [("f", {"a": "b"})]) + "<|im_end|>\n")) == [("f", {"a": "b"})]
    assert chosen.parse("Hello.<|im_end|><|im_end|>\n") == ParsedTurn("Hello.", "", ())


def test_the_generation_prompt_may_open_the_reasoning():
    tokenizer = a_tokenizer(TEMPLATE.replace("CALL", CALLS["hermes"]))
    text = written("hermes", [("f", {})])
    assert len(call_format(tokenizer).parse(text).calls) == 1
    thinking = call_format(tokenizer, {"thinking": True})
    assert thinking.generation_prompt.endswith("<think>\n")
    assert thinking.parse(text) == ParsedTurn("", text, ())
    assert len(thinking.parse(f"so</think>{text}").calls) == 1
    assert len(thinking.parse(text, prompt="<|im_start|>assistant\n").calls) == 1


def test_templates_without_a_known_format_are_refused():
    with pytest.raises(ValueError, match="writes no tool calls"):
        call_format(a_tokenizer(TEMPLATE.replace("CALL", "")))
    with pytest.raises(
        ValueError, match=r"writes a tool call as 'CALL groupaxprobe.*none of the formats hermes, qwen_xml"
    ):
        call_format(a_tokenizer(TEMPLATE.replace("CALL", "CALL {{ call.function.name }}")))
    with pytest.raises(ValueError, match="the chat template fails"):
        call_format(a_tokenizer(TEMPLATE.replace("CALL", "{{ raise_exception('no') }}")))


RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close_pattern": r"</call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def test_other_formats_are_read_by_the_response_template():
    pytest.importorskip("transformers.utils.chat_parsing", reason="transformers has no response templates")
    own = "<call {{ call.function.name }}>{{ call.function.arguments | tojson }}</call>"
    tokenizer = a_tokenizer(TEMPLATE.replace("CALL", own))
    tokenizer.response_template = RESPONSE
    chosen = call_format(tokenizer)
    assert chosen.name == "response_template"
    turn = chosen.parse('<think>Hm.</think>Hi <call f>{"a": 1}</call><call g>{}</call><|im_end|>')
    assert read_back(turn) == [("f", {"a": 1}), ("g", {})]
    assert (turn.content, turn.reasoning) == ("Hi", "Hm.")
    assert not any(call.fault for call in turn.calls)
    cut = chosen.parse("<call f>{}</call><call g>{}").calls
    assert (cut[0].fault, cut[1].fault) == ("", "the turn ends inside of this call")
    assert "must be a JSON object" in chosen.parse("<call f>1</call>").calls[0].fault
    assert "the turn cannot be read" in chosen.parse("<call f>{1}</call>").calls[0].fault
    assert chosen.parse("Hi<|im_end|>") == ParsedTurn("Hi", "", ())


@pytest.mark.parity
def test_the_templates_of_trl_have_a_format_or_are_refused():
    trl = pytest.importorskip("trl")
    found = {}
    for file in glob.glob(os.path.join(os.path.dirname(trl.__file__), "chat_templates", "*.jinja")):
        with open(file, encoding="utf-8") as template:
            tokenizer = a_tokenizer(template.read())
        with contextlib.suppress(ValueError):
            found[os.path.basename(file).removesuffix(".jinja")] = call_format(tokenizer).name
    for name, families in {
        "hermes": ["qwen2_5", "qwen3", "qwen3_vl", "qwen3_instruct_2507"],
        "qwen_xml": ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano"],
        "llama": ["llama3_1", "llama3_2"],
        "gpt_oss": ["gptoss"],
    }.items():
        assert {found[family] for family in families} == {name}
