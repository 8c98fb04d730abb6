"""Prompts: conversations and chat templates, long texts, and stop texts of completions."""

import copy
import json
import os
import signal
import time
from dataclasses import fields, replace

import pyarrow.parquet
import pytest
import yaml
from tokenizers.processors import TemplateProcessing

from groupax import GRPOConfig, GRPOTrainer, SamplingParams, init_model
from groupax.cli.main import main
from groupax.cli.train import train_defaults
from groupax.compat import trl
from groupax.compat.fields import CompatWarning
from groupax.data import chat as chats
from groupax.data.chat import TemplateProcess, render, render_all
from groupax.data.prompts import encode_examples
from groupax.data.tokenizer import encode_prompts, load_tokenizer
from groupax.episodes.play import play_episodes
from groupax.runs.build import eval_params
from groupax.serve.requests import parse
from groupax.serve.web import ApiError
from groupax.settings.fields import read_mapping
from tests.conftest import SHARED, TINY
from tests.engine.samplers import FinishedSession
from tests.training.test_trainer import a_trainer, lines_of

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


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "audio", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused_here_and_by_the_server(kind):
    part = {"type": kind, kind: "x"}
    with pytest.raises(ValueError, match=rf"prompt 3: message 1 of 1 has a part of type '{kind}', .* no vision"):
        render(with_template(BOTH), user([part, *PARTS]), "prompt 3")
    body = f'{{"messages": [{{"role": "user", "content": [{{"type": "{kind}"}}]}}]}}'
    of_images = {"image": "images are parts of type image_url", "image_url": "a part of a message must be"}
    with pytest.raises(ApiError, match=of_images.get(kind, f"has a part of type '{kind}'")):
        parse(body.encode(), is_chat=True)


@pytest.mark.parametrize(
    ("template", "messages", "fault"),
    [
        ("hello", user("abc"), "leaves out message 1 of 1, which has the role 'user': 'abc'"),
        ("{{ messages[1].content }}", [*user("abc"), *user("def")], "leaves out message 1 of 2"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            [{"role": "system", "content": "Be kind."}, *user("abc")],
            "leaves out message 1 of 2, which has the role 'system': 'Be kind.'",
        ),
        (TEXT, user(" \n"), "is empty: no message has any text"),
        ("{% for x in %}", user("abc"), "the chat template fails: TemplateSyntaxError"),
        (
            "{{ raise_exception('no\x1b[2J\nway') }}",
            user("abc"),
            r"the chat template fails: TemplateError: no␛\[2J way",
        ),
        ("{{ messages[0].a.b }}", user("abc"), "the chat template fails: UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", user("abc"), "the chat template fails: SecurityError"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", user("abc"), "fails: RecursionError"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", user("abc"), "fails: RecursionError"),
        ("{{ 'a' * 10**12 }}", user("abc"), "needs more than 1024 MiB of memory"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", user("abc"), "needs more than 1024 MiB"),
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
@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 9) }}"])
def test_a_template_without_an_end_is_stopped(monkeypatch, template):
    monkeypatch.setattr(chats, "TEMPLATES", process := TemplateProcess(deadline_s=1))
    assert render(with_template(TEXT), user("abc"), "p") == "user:abc;"
    started_s = time.monotonic()
    with pytest.raises(ValueError, match="prompt 0: the chat template fails: it was still running after 1 s"):
        render_all(
            with_template("{{ messages[0].content }}" + template), [user("abc"), user("d")], ["prompt 0", "prompt 1"]
        )
    assert time.monotonic() - started_s < 20
    assert render(with_template(TEXT), user("abc"), "p") == "user:abc;"  # in another process
    process.close()


def test_the_prompt_at_which_a_template_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(chats, "TEMPLATES", process := TemplateProcess(deadline_s=1))
    template = "{{ messages[0].content }}{% if messages[0].content == 'c' %}" + LOOPS + "{% endif %}"
    with pytest.raises(ValueError, match="prompt 2: the chat template fails: it was still running"):
        encode_prompts(with_template(template), [user(text) for text in "abcd"])
    process.close()


@pytest.mark.heavy
def test_a_killed_process_is_restarted(monkeypatch):
    monkeypatch.setattr(chats, "TEMPLATES", process := TemplateProcess())
    tokenizer = with_template(TEXT)
    assert render(tokenizer, user("abc"), "p") == "user:abc;"
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert render(tokenizer, user("abc"), "p") == "user:abc;"
    process.close()


def test_many_conversations_are_written_as_transformers_writes_them(qwen):
    conversations = [user(f"What is {index}+{index}?") for index in range(600)]
    texts = render_all(qwen, conversations, [f"prompt {index}" for index in range(600)])
    expected = [qwen.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in conversations]
    assert texts == expected


def test_a_tokenizer_may_override_rendering():
    tokenizer = with_template(TEXT)
    tokenizer.apply_chat_template = lambda messages, **_: f"<{messages[0]['content']}>"
    assert render(tokenizer, user(PARTS), "p") == "<What is 2+2?>"


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


def test_a_warning_names_prompts_that_end_with_the_assistant(qwen, caplog):
    begun = [*user("a"), {"role": "assistant", "content": "Sure, the"}]
    prompts = encode_examples([{"prompt": user("a")}, {"prompt": begun}], qwen, 64, "error", name="data")
    assert "data: prompt 1 and 0 others end with a message of the assistant" in caplog.text
    assert qwen.decode(prompts.token_ids[1]).endswith("Sure, the<|im_end|>\n<|im_start|>assistant\n")


def test_arguments_that_change_nothing_are_refused(qwen):
    with pytest.raises(ValueError, match=r"reads no 'enable_thinkin'; it reads .*did you mean enable_thinking\?"):
        encode_examples([{"prompt": user("a")}], qwen, 64, "error", {"enable_thinkin": False})
    with pytest.raises(
        ValueError, match="chat_template_kwargs has enable_thinking, but no prompt is a list of messages"
    ):
        encode_examples([{"prompt": "a"}], qwen, 64, "error", {"enable_thinking": False})
    for name in ("tokenize", "add_generation_prompt", "messages", "chat_template", "tools"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs has '{name}', which groupax sets itself"):
            GRPOConfig(chat_template_kwargs={name: True})
        rows = [{"prompt": user("a"), "chat_template_kwargs": {name: True}}]
        with pytest.raises(ValueError, match=f"prompt 0: chat_template_kwargs has '{name}'"):
            encode_examples(rows, qwen, 64, "error")
    for wrong in ("enable_thinking", ["a"], 3, {1: 2}):
        with pytest.raises(ValueError, match="chat_template_kwargs must be a mapping of names"):
            GRPOConfig(chat_template_kwargs=wrong)
    with pytest.raises(ValueError, match="a value that JSON cannot represent"):
        GRPOConfig(chat_template_kwargs={"x": {1, 2}})


def test_trl_arguments_that_the_template_does_not_read_cause_a_warning(tmp_path):
    config = trl.GRPOConfig(str(tmp_path), chat_template_kwargs={"shout": True, "whisper": 1}, report_to=[])
    tokenizer = with_template("{{ messages[0].content }}{% if shout %}j{% endif %}")
    with pytest.warns(CompatWarning, match=r"whisper=1 changes nothing: the chat template reads no 'whisper'"):
        known = trl.trainer._template_kwargs(config.to_native().chat_template_kwargs, tokenizer, None)
    assert known == {"shout": True}


# -- settings


def test_settings_of_prompts_come_from_flags_files_and_code(tmp_path):
    settings = {"stop": ["</answer>", "x"], "eval_stop": [], "chat_template_kwargs": {"enable_thinking": False}}
    config = GRPOConfig(stop=("</answer>", "x"), eval_stop=(), chat_template_kwargs={"enable_thinking": False})
    assert GRPOConfig.from_mapping(settings) == config
    assert GRPOConfig.from_mapping(yaml.safe_load(yaml.safe_dump(settings))) == config
    assert GRPOConfig.from_mapping(config.to_dict()) == config
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert train_defaults(["--config", str(tmp_path / "run.yaml")]).args == config
    assert GRPOConfig(stop="</answer>").stop == ("</answer>",)
    assert GRPOConfig() == GRPOConfig(chat_template_kwargs={})
    given = {"a": 1}
    kept = GRPOConfig(chat_template_kwargs=given)
    given["a"] = 2
    assert kept.chat_template_kwargs == {"a": 1}
    rules = {field.name: field.metadata.get("resume", "explicit") for field in fields(GRPOConfig)}
    assert [rules[name] for name in ("chat_template_kwargs", "eval_stop", "stop")] == ["fixed", "free", "explicit"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"stop": ("",)}, "stop must not be an empty text, got ''"),
        ({"stop": ("a\ud800",)}, "stop must be texts of at least one character"),
        ({"stop": 3}, "stop must be a list with each a text, got 3"),
        ({"stop": (3,)}, "stop must be a list with each a text"),
        ({"eval_stop": ("",)}, "eval_stop must not be an empty text"),
        ({"stop": tuple(map(str, range(17)))}, "stop has 17 texts, at most 16 are looked for"),
    ],
)
def test_stops_that_cannot_be(settings, fault):
    with pytest.raises(ValueError, match=fault):
        GRPOConfig(**settings)


def test_evaluations_use_the_stop_texts_of_rollouts_by_default():
    assert eval_params(GRPOConfig(stop=("x",))).stop == ("x",)
    assert eval_params(GRPOConfig(stop=("x",), eval_stop=("y",))).stop == ("y",)
    assert eval_params(GRPOConfig(stop=("x",), eval_stop=())).stop == ()


def test_generation_kwargs_of_trl():
    for name in ("stop", "stop_strings"):
        for value in ("</a>", ["</a>"]):
            native = trl.GRPOConfig("x", generation_kwargs={name: value, "do_sample": True}, report_to=[]).to_native()
            assert native.stop == ("</a>",)
    with pytest.raises(ValueError, match="generation_kwargs has do_sample=False"):
        trl.GRPOConfig("x", generation_kwargs={"do_sample": False}, report_to=[]).to_native()
    with pytest.raises(ValueError, match="stop and stop_strings, which mean the same"):
        trl.GRPOConfig("x", generation_kwargs={"stop": "a", "stop_strings": "a"}, report_to=[]).to_native()


def test_mappings_on_the_command_line_are_json(capsys):
    assert read_mapping('{"enable_thinking": false}') == {"enable_thinking": False}
    for wrong in ("enable_thinking=false", "[1]", "{"):
        with pytest.raises(ValueError, match=r"write .*, e\.g\. "):
            read_mapping(wrong)
    assert main(["train", "--chat_template_kwargs", "enable_thinking=false"]) == 2
    assert "is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["hi", "<|bos|>hi", "<|bos|><|bos|>hi", ""])
def test_a_text_that_a_template_has_rendered_has_its_first_token_once(
    qwen,
    text,
):
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
    assert stopped
    assert all(row["finish_reason"] == "stop" for row in stopped)
    assert all(len(row["trainer_logps"]) == len(row["completion_ids"]) for row in stopped)
    long = sum(row["finish_reason"] == "length" for row in table)
    assert lines_of(tmp_path)[0]["completions/clipped_ratio"] == pytest.approx(long / len(table))
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
    assert list(play_episodes(sampler, tokenizer, [], [], params, step=0)) == []
    assert sampler.params == replace(params, stop_token_ids=(7, 0))


@pytest.mark.heavy
def test_a_run_with_other_stop_texts_is_another_run(tmp_path):
    rows = [{"prompt": "bc"}, {"prompt": "de"}]
    for stop in ("a", "b"):
        a_trainer(tmp_path, dataset=rows, prompts_per_step=2, stop=stop, max_steps=1).train()
    assert (tmp_path / "run.1").is_dir()
    a_trainer(tmp_path, dataset=rows, prompts_per_step=2, stop="b", eval_stop="c", max_steps=1).train()
    assert not (tmp_path / "run.2").is_dir()


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
    for bad in ("hammer", "[7]", 7, [["add"]]):
        with pytest.raises(ValueError, match="prompt 0: the column tools must have a list of schemas"):
            encode_examples([{"prompt": user("a"), "tools": bad}], tokenizer, 1000, "error")
    for own in ({"tools": [[schema]] * 3}, {"may_be_empty": True}):
        with pytest.raises(ValueError, match=r"the dataset has a column tools.*the run has tools or environments"):
            encode_examples(rows, tokenizer, 1000, "error", **own)
