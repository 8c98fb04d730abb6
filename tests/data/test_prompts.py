"""Prompts: conversations and chat templates, long texts, and stop texts of completions."""

import copy
import json
import time
from dataclasses import replace

import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from groupax import GRPOConfig, GRPOTrainer, SamplingParams, init_model
from groupax.cli.main import main
from groupax.compat import trl
from groupax.core.settings.fields import read_mapping
from groupax.data import chat as chats
from groupax.data.chat import Conversation, TemplateProcess, render, render_all
from groupax.data.prompts import encode_examples
from groupax.data.tokenizer import encode_prompts, load_tokenizer
from groupax.episodes.play import Prompts
from groupax.rollouts.collector import sample_groups
from tests.conftest import SHARED, TINY
from tests.engine.samplers import FinishedSession
from tests.training.test_trainer import a_trainer

from .chat_tokenizers import chat_tokenizer
from .test_config_and_data import a_tokenizer

VISION = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}/{% endfor %}{% endif %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?", "image": None}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS_AT_D = "{% if messages[0].content == 'd' %}" + LOOPS + "{% endif %}"


def with_template(template):
    tokenizer = a_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def user(content, **more):
    return [{"role": "user", "content": content, **more}]


@pytest.fixture(scope="module")
def qwen():
    folder = SHARED / "tokenizers" / "qwen"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return load_tokenizer(folder)


# -- content


@pytest.mark.parametrize(
    ("template", "from_text", "from_parts"),
    [
        (TEXT, "user:What is 2+2?;", "user:What is 2+2?;"),
        (VISION, "What is 2+2?", "What is 2+2?"),
        (BOTH, "What is 2+2?", "What is /2+2?/"),
    ],
)
def test_content_goes_to_the_template_as_it_reads_it(template, from_text, from_parts):
    tokenizer = with_template(template)
    assert render(tokenizer, user("What is 2+2?"), "p") == from_text
    assert render(tokenizer, user(PARTS), "p") == from_parts


@pytest.mark.parametrize(
    ("template", "messages", "fault"),
    [
        ("{{ messages[1].content }}", [*user("abc"), *user("def")], "leaves out message 1 of 2"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            [{"role": "system", "content": "Be kind."}, *user("abc")],
            "leaves out message 1 of 2, which has the role 'system': 'Be kind.'",
        ),
        ("{% for x in %}", user("abc"), "the chat template fails: TemplateSyntaxError"),
        (
            "{{ raise_exception('no\x1b[2J\nway') }}",
            user("abc"),
            r"the chat template fails: TemplateError: no␛\[2J way",
        ),
        ("{{ ''.__class__.__mro__ }}", user("abc"), "the chat template fails: SecurityError"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", user("abc"), "fails: RecursionError"),
        ("{{ 'a' * 10**12 }}", user("abc"), "needs more than 1024 MiB of memory"),
        ("{% for i in range(99) %}{{ 'x' * 999999 }}{% endfor %}", user("abc"), "writes 98,999,901 characters"),
        (TEXT, user("a\ud800"), "has half of a surrogate pair"),
        (TEXT, user("abc", when={1, 2}), "has a value that JSON cannot represent"),
    ],
)
def test_lost_messages_and_failing_templates_are_refused(template, messages, fault):
    with pytest.raises(ValueError, match=f"prompt 0:? .*{fault}"):
        render(with_template(template), messages, "prompt 0")


def test_a_template_may_leave_out_thoughts_and_change_spaces_and_capitals(qwen):
    messages = [*user("a"), {"role": "assistant", "content": "<think>b</think>c"}, *user("d")]
    assert "<think>" not in render(qwen, messages, "p")
    assert (
        render(with_template("{% for m in messages %}{{ m.content | trim | upper }}{% endfor %}"), user(" a\n"), "p")
        == "A"
    )
    assert render(with_template("{{ messages | tojson }}"), user('a\n"b"'), "p").endswith('"a\\n\\"b\\""}]')


@pytest.mark.heavy
@pytest.mark.parametrize(("template", "number"), [(LOOPS, 0), ("{{ 9 ** (9 ** 9) }}", 0), (LOOPS_AT_D, 1)])
def test_a_template_without_an_end_is_stopped_at_a_named_prompt(monkeypatch, template, number):
    monkeypatch.setattr(chats, "TEMPLATES", process := TemplateProcess(deadline_s=1))
    assert render(with_template(TEXT), user("abc"), "p") == "user:abc;"
    started_s = time.monotonic()
    with pytest.raises(ValueError, match=f"prompt {number}: the chat template fails: it was still running after 1 s"):
        encode_prompts(with_template("{{ messages[0].content }}" + template), [user("abc"), user("d")])
    assert time.monotonic() - started_s < 20
    assert render(with_template(TEXT), user("abc"), "p") == "user:abc;"  # in another process
    process.close()


def test_many_conversations_are_written_as_transformers_writes_them(qwen):
    conversations = [user(f"What is {index}+{index}?") for index in range(600)]
    texts = render_all(qwen, [Conversation(each, f"prompt {index}") for index, each in enumerate(conversations)])
    expected = [qwen.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in conversations]
    assert texts == expected


# -- arguments of the template


def test_arguments_of_a_run_and_of_a_row(qwen):
    rows = [
        {"prompt": user("a"), "chat_template_kwargs": None},
        {"prompt": user("a"), "chat_template_kwargs": {"enable_thinking": True}},
        {"prompt": user("a"), "chat_template_kwargs": {"enable_thinking": None}},
        {"prompt": "a", "chat_template_kwargs": None},
    ]
    prompts = encode_examples(rows, qwen, 64, "error", {"enable_thinking": False})
    texts = [qwen.decode(ids) for ids in prompts.token_ids]
    thinking = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    silent = f"{thinking}<think>\n\n</think>\n\n"
    assert texts == [silent, thinking, silent, "a"]
    assert encode_examples(rows[1:2], qwen, 64, "error").token_ids[0].tolist() == prompts.token_ids[1].tolist()


def test_arguments_of_the_template_that_cannot_be_are_refused(qwen):
    with pytest.raises(ValueError, match=r"reads no 'enable_thinkin'; it reads .*did you mean enable_thinking\?"):
        encode_examples([{"prompt": user("a")}], qwen, 64, "error", {"enable_thinkin": False})
    with pytest.raises(
        ValueError, match="chat_template_kwargs has enable_thinking, but no prompt is a list of messages"
    ):
        encode_examples([{"prompt": "a"}], qwen, 64, "error", {"enable_thinking": False})
    with pytest.raises(ValueError, match="prompt 0: chat_template_kwargs has 'tools'"):
        encode_examples([{"prompt": user("a"), "chat_template_kwargs": {"tools": True}}], qwen, 64, "error")


# -- settings


def test_stop_texts_of_trl():
    for name in ("stop", "stop_strings"):
        assert trl.GRPOConfig("x", generation_kwargs={name: "</a>"}, report_to=[]).to_native().stop == ("</a>",)
    with pytest.raises(ValueError, match="stop and stop_strings, which mean the same"):
        trl.GRPOConfig("x", generation_kwargs={"stop": "a", "stop_strings": "a"}, report_to=[]).to_native()


def test_mappings_on_the_command_line_are_json(capsys):
    assert read_mapping('{"enable_thinking": false}') == {"enable_thinking": False}
    for wrong in ("enable_thinking=false", "[1]", "{"):
        with pytest.raises(ValueError, match=r"write .*, e\.g\. "):
            read_mapping(wrong)
    assert main(["train", "--chat_template_kwargs", "enable_thinking=false"]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["hi", "<|bos|>hi", "<|bos|><|bos|>hi", ""])
def test_a_text_that_a_template_has_rendered_has_its_first_token_once(qwen, text):
    tokenizer = copy.deepcopy(qwen)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    first = ("<|bos|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|bos|> $A", special_tokens=[first])
    [ids] = encode_prompts(tokenizer, [text])
    assert (ids == first[1]).sum() == max(1, text.count("<|bos|>"))
    assert tokenizer.decode(ids) == "<|bos|>" * (not text.startswith("<|bos|>")) + text


# -- stop texts in training


@pytest.mark.heavy
def test_a_stop_text_ends_completions_and_is_trained_on(tmp_path):
    seen = []

    def reward(completions, completion_ids):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(text.endswith("a")) for text in completions]

    rows = [{"prompt": "bc"}, {"prompt": "de"}]
    settings = {"stop": ("a", "<unk>"), "prompts_per_step": 2, "max_completion_length": 24}
    trainer = a_trainer(tmp_path, reward, rows, eval_dataset=rows, eval_temperature=1.0, **settings)
    trainer.train()
    assert any(text.endswith("a") for text, _ in seen)
    for text, ids in seen:
        assert text == trainer.tokenizer.decode(ids, skip_special_tokens=True)
        assert "a" not in trainer.tokenizer.decode(ids[:-1])
        assert ids.count(0) <= 1  # the special token, which the text does not show
        assert 0 not in ids[:-1]
    table = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    stopped = [row for row in table if row["completion_ids"][-1] in (0, 1, 3)]
    assert {row["finish_reason"] for row in stopped} == {"stop"}
    seen.clear()
    trainer.evaluate()
    assert all("a" not in trainer.tokenizer.decode(ids[:-1]) for _, ids in seen)
    seen.clear()
    trainer.evaluate(SamplingParams(n=4, max_tokens=24))
    assert any("a" in trainer.tokenizer.decode(ids[:-1]) for _, ids in seen)


class Asked:
    """A sampler that records requests and samples nothing."""

    def sequences(self, prompts, params, step=0, first_prompt=0):
        self.params = params
        return []

    def session(self):
        return FinishedSession()


def test_servers_are_asked_to_stop_at_tokens_that_their_texts_do_not_show():
    sampler, tokenizer = Asked(), a_tokenizer(eos_token="<eos>")
    params = SamplingParams(stop=("a", "<unk>"), stop_token_ids=(7,))
    assert list(sample_groups(sampler, tokenizer, Prompts([], []), params, step=0)) == []
    assert sampler.params == replace(params, stop_token_ids=(7, 0))


def test_arguments_of_the_template_reach_the_prompts_of_a_run(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if shout %}j{% endif %}")
    rows = [{"prompt": user("abc"), "chat_template_kwargs": given} for given in (None, {"shout": False})]
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        chat_template=str(template),
        chat_template_kwargs={"shout": True},
        max_completion_length=8,
    )
    model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
    trainer = GRPOTrainer(model, lambda completions: [0.0] * len(completions), args, rows, rows, a_tokenizer())
    for prompts in (trainer.prompts, *trainer.eval_prompts.values()):
        assert [ids.tolist() for ids in prompts.token_ids] == [[3, 4, 5, 12], [3, 4, 5]]


def test_a_column_of_tools_is_described_to_the_model():
    tokenizer = chat_tokenizer()
    schema = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    padded = {**schema, "function": {**schema["function"], "return": None}}  # as tables have it
    rows = [{"prompt": user("a"), "tools": each} for each in ([padded], json.dumps([schema]), None)]
    first, second, none = encode_examples(rows, tokenizer, 1000, "error").token_ids
    assert first.tolist() == second.tolist()
    text = tokenizer.apply_chat_template(user("a"), tools=[schema], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(first) == text
    assert "Tools:" not in tokenizer.decode(none)
    for bad in ("hammer", "[7]", 7):
        with pytest.raises(ValueError, match="prompt 0: the column tools must have a list of schemas"):
            encode_examples([{"prompt": user("a"), "tools": bad}], tokenizer, 1000, "error")
    for own in ({"tools": [[schema]] * 3}, {"may_be_empty": True}):
        with pytest.raises(ValueError, match=r"the dataset has a column tools.*the run has tools or environments"):
            encode_examples(rows, tokenizer, 1000, "error", **own)
