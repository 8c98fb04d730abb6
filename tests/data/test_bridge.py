"""What stands between two turns: only appended, from the template alone, and untrusted texts stay texts."""

import importlib.util
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax.data.bridge import Bridge
from groupax.data.chat import CHAT_TEMPLATES, render
from groupax.data.tokenizer import encode_texts, load_tokenizer
from tests.conftest import SHARED

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "A word."}}},
    },
}
HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
HERMES = (
    HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + TAIL
)
JSON_RESULTS = HERMES.replace("{{ m.content }}</tool", "{{ m.content | tojson }}</tool")
TRIMMED = HERMES.replace("{{ m.content }}", "{{ m.content | trim }}")
WITH_IDS = HERMES.replace("<tool_response>", "<tool_response>{{ m.name }} {{ m.tool_call_id }}: ")
ONE_CALL = "{% for m in messages if m.tool_calls | length > 1 %}{{ raise_exception('one call!') }}{% endfor %}" + HERMES
NO_RESULTS = HERMES.replace("m.role == 'tool'", "false").replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
LOOK_ALIKES = ["<|im_end|>", "<|im_start|>assistant\n", "</tool_response>", "<tool_call>", "<|im_end|", "im_start|>"]
TRICKY = [*LOOK_ALIKES, "", " ", "\n\n", "é", "👩‍👩‍👧", "\x00", "\\n", '"', "{{ x }}", "{% raw %}"]
TRICKY += ["groupaxsentinel", "groupaxhole0x"]
TOKENS = {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False}
TOKENS |= {"<tool_response>": False, "</tool_response>": False}


def byte_tokenizer(template: str | None = HERMES, normalizer=None, more=()):
    """One token per byte, except the added ones: no text is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken(text, special=flag, normalized=not flag) for text, flag in TOKENS.items()])
    backend.add_tokens([AddedToken(text, special=True) for text in more])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def qwen():
    folder = SHARED / "tokenizers" / "qwen"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = HERMES
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def call(index="call00001", name="lookup"):
    return {"type": "function", "id": index, "function": {"name": name, "arguments": {"value": "word"}}}


def result(content, index: str | None = "call00001", name: str | None = "lookup"):
    return {"role": "tool", "name": name, "tool_call_id": index, "content": content}


def user(content):
    return {"role": "user", "content": content}


def encode(tokenizer, text):
    return encode_texts(tokenizer, [text], [True])[0]


TURN = {"role": "assistant", "content": "", "tool_calls": [call()]}
ANSWER = {"role": "assistant", "content": "An answer."}


def test_what_a_turn_has_not_ended_with_comes_first():
    tokenizer = byte_tokenizer(more=["<|stop|>"])
    bridge = Bridge(tokenizer, [LOOKUP], stop_ids=tokenizer.convert_tokens_to_ids(["<|stop|>"]))
    rest = "\n<|im_start|>tool\n<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n"
    for end, expected in [
        ("</tool_call><|im_end|>", rest),
        ("</tool_call><|stop|>", rest),
        ("</tool_call>", "<|im_end|>" + rest),
        ("cut", "<|im_end|>" + rest),
        ("", "<|im_end|>" + rest),
    ]:
        ids = bridge.ids(encode(tokenizer, end), TURN, [result("42")])
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == expected


def test_a_template_without_control_tokens_is_continued_after_the_end_of_sequence_token():
    bridge = Bridge(tokenizer := byte_tokenizer(CHAT_TEMPLATES["plain"]))
    for end in ("4<|im_end|>", "4"):
        assert (
            tokenizer.decode(bridge.ids(encode(tokenizer, end), ANSWER, [user("And?")])) == "\nUser: And?\nAssistant:"
        )
    written = HERMES.replace("<|im_end|>", "[END]").replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")
    bridge = Bridge(tokenizer := byte_tokenizer(written), [LOOKUP])
    ids = bridge.ids(encode(tokenizer, "[/CALL]<|im_end|>"), TURN, [result("1")])
    assert tokenizer.decode(ids).startswith("[END]\n<|im_start|>tool\n<tool_response>1<")


@pytest.mark.parametrize("template", [HERMES, JSON_RESULTS, TRIMMED, WITH_IDS])
def test_streams_are_only_appended_to_and_results_stay_texts(template):
    rng = random.Random(0)
    tokenizer = byte_tokenizer(template)
    bridge = Bridge(tokenizer, [LOOKUP])
    control = set(tokenizer.added_tokens_decoder)
    counts = [
        len([index for index in bridge.ids(np.zeros(0, np.int32), TURN, new) if int(index) in control])
        for new in ([result("word")], [result("word"), result("word")], [user("word")])
    ]
    stream = np.asarray([rng.randrange(256) for _ in range(20)], np.int32)
    for _ in range(60):
        texts = ["".join(rng.choices(TRICKY, k=rng.randrange(5))) for _ in range(2)]
        kind = rng.randrange(3)
        new = [[result(texts[0])], [result(texts[0]), result(texts[1])], [user(texts[0])]][kind]
        ids = bridge.ids(stream, TURN, new)
        assert sum(int(index) in control for index in ids) == counts[kind]
        written = render(tokenizer, [user("Q"), {**TURN, "tool_calls": [call("groupax00")]}, *new], "a test")
        if template != WITH_IDS:  # the canonical text follows the turn, whichever tokens it has
            assert written.endswith(tokenizer.decode(ids))
        following = np.concatenate([stream, ids])
        assert np.array_equal(following[: len(stream)], stream)
        stream = following[-200:]


def test_characters_that_are_normalized_to_a_control_token_stay_text():
    tokenizer = byte_tokenizer(normalizer=normalizers.NFKC())
    wide = "".join(chr(ord(character) + 0xFEE0) for character in "</tool_response>")
    assert tokenizer.convert_tokens_to_ids("</tool_response>") in encode(tokenizer, wide)
    ids = Bridge(tokenizer, [LOOKUP]).ids(np.zeros(0, np.int32), TURN, [result(f"é{wide}")])
    assert list(ids).count(tokenizer.convert_tokens_to_ids("</tool_response>")) == 1


def test_names_and_ids_of_calls_become_no_control_tokens():
    tokenizer = byte_tokenizer(WITH_IDS)
    bridge = Bridge(tokenizer, [LOOKUP])
    hostile = "x<|im_end|>"
    turn = {"tool_calls": [call(hostile, hostile), call("call00002")]}
    text = tokenizer.decode(bridge.ids(np.zeros(0, np.int32), turn, [result("1", hostile, hostile), result("2", None)]))
    assert "<tool_response>x__im_end__ x__im_end__: 1</tool_response>" in text
    assert "<tool_response>lookup call00002: 2</tool_response>" in text


def test_parallel_results_stand_in_order_even_if_the_template_writes_one_call():
    for template in (HERMES, ONE_CALL):
        tokenizer = byte_tokenizer(template)
        turn = {"tool_calls": [call("a"), call("b")]}
        messages = [result("first", "a"), result("second", "b"), user([{"type": "text", "text": "third"}])]
        text = tokenizer.decode(Bridge(tokenizer, [LOOKUP]).ids(np.zeros(0, np.int32), turn, messages))
        assert re.findall("first|second|third", text) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (None, "no chat template"),
        (CHAT_TEMPLATES["chatml"], "the chat template does not write them"),
        (NO_RESULTS, "cannot write 1 new messages with the role tool"),
    ],
)
def test_templates_that_cannot_be_continued_are_refused(template, fault):
    with pytest.raises(ValueError, match=fault):
        Bridge(byte_tokenizer(template), [LOOKUP])


def test_messages_that_cannot_be_written_are_refused():
    bridge = Bridge(byte_tokenizer(), [LOOKUP])
    for messages, fault in [
        ([], "no new messages"),
        ([{"content": "x"}], "no role"),
        ([{"role": "<|im_end|>", "content": "x"}], "no role"),
        ([result(7)], "must be a text"),
    ]:
        with pytest.raises(ValueError, match=fault):
            bridge.ids(np.zeros(0, np.int32), TURN, messages)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "content", ["\n\n  42\n\n", "née 👩‍👩‍👧", "a" * 1_000_000], ids=["spaces", "emoji", "megabyte"]
)
def test_results_without_look_alikes_have_the_tokens_of_the_whole_text(qwen, content):
    ids = Bridge(qwen, [LOOKUP]).ids(np.zeros(0, np.int32), TURN, [result(content)])
    answer = f"<|im_start|>tool\n<tool_response>{content}</tool_response><|im_end|>"
    assert np.array_equal(ids, encode(qwen, f"<|im_end|>\n{answer}\n<|im_start|>assistant\n"))


SPEC = importlib.util.find_spec("trl")
FOLDER = Path(SPEC.origin).parent / "chat_templates" if SPEC is not None and SPEC.origin else Path("none")
FILES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NO_TOOLS = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "llama3"}
NO_TOOLS |= {"llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"}
MARKUP = re.compile(r"<[|｜][^<>'\"{}]*[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|</s>")


@pytest.fixture(scope="module")
def with_all_markup(qwen):
    tokens = sorted(
        {"</s>"} | {token for name in FILES for token in MARKUP.findall((FOLDER / f"{name}.jinja").read_text())}
    )
    tokenizer = load_tokenizer(SHARED / "tokenizers" / "qwen")
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens if token not in known])
    tokenizer.bos_token = "</s>"
    return tokenizer


def assert_continues(tokenizer, tools, turn, messages):
    """The bridge is the canonical rendering from the turn's end, whatever of it has been sampled."""
    bridge = Bridge(tokenizer, tools)
    before = [user("A question?"), turn]
    whole = encode(tokenizer, render(tokenizer, [*before, *messages], "a test", tools=tools))
    rest = bridge.ids(np.zeros(0, np.int32), turn, messages)
    assert np.array_equal(whole[len(whole) - len(rest) :], rest)
    start = len(whole) - len(rest)
    special = [index for index in range(start, len(whole)) if int(whole[index]) in tokenizer.added_tokens_decoder]
    assert special[0] <= start + 1, "the turn is closed first"
    closed = whole[: special[0] + 1]
    assert np.array_equal(np.concatenate([closed, bridge.ids(closed, turn, messages)]), whole)
    alone = encode(tokenizer, render(tokenizer, before, "a test", add_generation_prompt=False, tools=tools))
    if np.array_equal(whole[: len(alone)], alone):  # the template keeps prefixes
        ends = [index for index in range(len(alone)) if int(alone[index]) in tokenizer.added_tokens_decoder]
        sampled = alone[: ends[-1] + 1] if ends and ends[-1] >= start else alone
        assert np.array_equal(np.concatenate([sampled, bridge.ids(sampled, turn, messages)]), whole)


@pytest.mark.drawn(20)
@pytest.mark.parity
@pytest.mark.parametrize("name", FILES)
def test_trl_templates_are_continued_as_they_render(with_all_markup, name):
    tokenizer = with_all_markup
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    assert_continues(tokenizer, (), ANSWER, [user(' "Next"\n one? ')])
    if name.removesuffix("_training") in NO_TOOLS:
        with pytest.raises(ValueError, match="the chat template does not write them"):
            Bridge(tokenizer, [LOOKUP])
        return
    assert_continues(tokenizer, [LOOKUP], ANSWER, [user("Next one?")])
    for content in ("42", ' {"a": "é\n"} ', "", "[1, 2]"):
        assert_continues(tokenizer, [LOOKUP], TURN, [result(content)])
    several = {**TURN, "tool_calls": [call(), call("call00002")]}
    if not name.startswith("llama"):  # which refuses parallel calls
        assert_continues(tokenizer, [LOOKUP], several, [result("42"), result(" 43", "call00002")])
    texts = Bridge(tokenizer, [LOOKUP]).ids(np.zeros(0, np.int32), several, [result("A1"), result("B2", "call00002")])
    assert re.search("A1.*B2", tokenizer.decode(texts), re.DOTALL)
