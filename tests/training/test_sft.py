"""Supervised fine-tuning: examples as tokens, their packing, the loss, and a run like any other."""

import functools
import json
import operator
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from groupax import LoRAConfig, SFTConfig, SFTTrainer, init_model, load_model
from groupax.cli.main import main
from groupax.core.errors import DivergedError
from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.settings.sft import ExampleSettings, SFTLossType
from groupax.data.chat import Conversation
from groupax.data.examples import load_examples
from groupax.data.supervised import encode_training_set, render_with_spans, rows_of
from groupax.evaluation.items import Completion, Item, write_items
from groupax.events import Evaluated, StepEnded
from groupax.objective.ratios import TokenTerms
from groupax.sft import SUPERVISED_LOSSES
from tests.conftest import TINY
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.test_config_and_data import a_tokenizer

from .test_trainer import lines_of

EXAMPLES = [
    {"prompt": prompt, "completion": completion}
    for prompt, completion in zip(
        ("abc", "bcd", "ca", "dabc", "ef", "fed", "ge", "hi"),
        ("ab", "c", "dab", "b", "cc", "a", "ddd", "e"),
        strict=True,
    )
]
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So"},
]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\n"
    "    {%- generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def a_trainer(tmp_path, dataset=EXAMPLES, eval_dataset=None, model=None, peft_config=None, listeners=(), **settings):
    args = SFTConfig(
        **{
            "output_dir": str(tmp_path / "run"),
            "batch_size": 4,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "progress_bar": "none",
            **settings,
        }
    )
    model = model or init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
    given = model, args, dataset, eval_dataset, a_tokenizer(eos_token="<eos>"), peft_config
    return SFTTrainer(*given, listeners=listeners)


def losses_of(trainer):
    """Trains, and returns the loss of each step."""
    steps = []
    trainer.listeners = [lambda event: steps.append(event) if isinstance(event, StepEnded) else None]
    trainer.train()
    return [event.metrics["loss"] for event in steps]


def encoded(rows, tokenizer, **settings):
    return encode_training_set(rows, tokenizer, ExampleSettings(**settings), 512, "train_dataset")


def learned_texts(examples, tokenizer):
    return [
        tokenizer.decode(example.ids[example.learned]).replace(" ", "")
        for sequence in examples.sequences
        for example in sequence
    ]


# -- examples


def test_completions_are_learned_with_their_end_and_prompts_only_on_request():
    tokenizer = a_tokenizer(eos_token="<eos>")
    rows = [{"prompt": "abc", "completion": "de"}, {"prompt": "a", "completion": "b<eos>"}]
    assert learned_texts(encoded(rows, tokenizer), tokenizer) == ["de<eos>", "b<eos>"]
    both = encoded(rows, tokenizer, completion_only_loss=False)
    assert learned_texts(both, tokenizer) == ["bcde<eos>", "b<eos>"], "nothing predicts the first token"


def test_of_evaluated_items_each_different_right_answer_is_learned(tmp_path):
    tokenizer = a_tokenizer(eos_token="<eos>")
    answers = [("de", True), ("de", True), ("d", True), ("e", False), ("c", None)]
    made = [Completion(text, 1, "stop", {"r": 0.0}, 0.0, solved) for text, solved in answers]
    write_items(tmp_path / "items.jsonl", [Item("k", 0, "abc", {"answer": "d"}, made)])
    rows = load_examples(str(tmp_path / "items.jsonl"))
    assert learned_texts(encoded(rows, tokenizer), tokenizer) == ["de<eos>", "d<eos>"]
    chats = [{"prompt": TALK[:3], "completions": [{"text": "So", "solved": True, "messages": None}]}]
    assert learned_texts(encoded(chats, chat_tokenizer()), chat_tokenizer())[0].strip() == "So<|im_end|>"


def test_texts_are_learned_from_their_second_token_and_labels_are_followed():
    tokenizer = a_tokenizer(eos_token="<eos>")
    assert learned_texts(encoded([{"text": "abc"}], tokenizer), tokenizer) == ["bc<eos>"]
    assert learned_texts(encoded([{"story": "ab"}], tokenizer, dataset_text_field="story"), tokenizer) == ["b<eos>"]
    given = encoded([{"input_ids": [3, 4, 5, 6], "labels": [3, -100, 5, -100]}], tokenizer)
    row = rows_of(given.sequences)[0]
    assert (row.prompt.tolist(), row.completion.tolist(), row.mask.tolist()) == ([3, 4], [5], [True])


def test_of_conversations_all_is_learned_or_what_the_assistant_wrote():
    tokenizer = chat_tokenizer()
    rows = [{"messages": TALK}]
    everything = learned_texts(encoded(rows, tokenizer), tokenizer)[0]
    assert "Why?" in everything
    assert "So" in everything
    tokenizer.chat_template = MARKED
    assert learned_texts(encoded(rows, tokenizer, assistant_only_loss=True), tokenizer) == [
        "Hello<|im_end|>So<|im_end|>"
    ]
    pair = [{"prompt": TALK[:3], "completion": TALK[3:]}]
    assert learned_texts(encoded(pair, tokenizer, assistant_only_loss=True), tokenizer) == ["So<|im_end|>"]
    assert learned_texts(encoded(pair, tokenizer), tokenizer)[0].strip() == "So<|im_end|>"


def test_a_template_without_marks_is_asked_for_each_part_and_must_write_it_the_same_way():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = MARKED.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    [text], [spans] = render_with_spans(tokenizer, [Conversation(TALK, "talk")])
    assert [text[start:end].strip() for start, end in spans] == ["Hello<|im_end|>", "So<|im_end|>"]
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(ValueError, match="talk: assistant_only_loss cannot tell message 2 apart"):
        render_with_spans(tokenizer, [Conversation(TALK, "talk")])


def test_long_examples_lose_their_end_and_are_dropped_if_nothing_is_left_to_learn():
    tokenizer = a_tokenizer(eos_token="<eos>")
    rows = [{"prompt": "abcdef", "completion": "a"}, {"prompt": "ab", "completion": "cdefg"}]
    cut = encoded(rows, tokenizer, max_length=4)
    assert (cut.num_examples, cut.num_truncated, cut.num_dropped) == (1, 2, 1)
    assert learned_texts(cut, tokenizer) == ["cd"]
    with pytest.raises(ValueError, match="none of the 2 examples has a token to learn within max_length 2"):
        encoded(rows, tokenizer, max_length=2)


@pytest.mark.parametrize(
    ("strategy", "lengths"),
    [("bfd", [[8], [6, 2], [4]]), ("bfd_split", [[8], [6, 2], [4, 2]]), ("wrapped", [[8], [8], [6]])],
)
def test_packing_fills_sequences(strategy, lengths):
    """The example of TRL's `pack_dataset`, with two tokens for each of its tokens."""
    rows = [{"input_ids": [4] * length} for length in (10, 4, 6, 2)]
    examples = encoded(rows, None, packing=True, packing_strategy=strategy, max_length=8)
    assert [[len(example.ids) for example in sequence] for sequence in examples.sequences] == lengths
    assert examples.num_truncated == (strategy == "bfd")


@pytest.mark.parametrize(
    ("rows", "packed", "wrapped"),
    [
        ([{"text": "ab"}, {"text": "c"}], ["b<eos>", "<eos>"], ["b<eos>c"]),
        ([{"text": ""}, {"text": "abcd"}], ["bcd"], ["abc", "<eos>"]),
        ([{"prompt": "", "completion": "a"}, {"prompt": "b", "completion": "c"}], ["c<eos>", "<eos>"], ["<eos>c"]),
        ([{"input_ids": [3, 4], "labels": [3, -100]}, {"input_ids": [5, 3], "labels": [5, 3]}], ["a"], ["ca"]),
        ([{"input_ids": [3], "labels": [-100]}, {"input_ids": [4, 5]}], ["c"], ["bc"]),
    ],
)
def test_every_token_but_a_sequences_first_is_learned_where_examples_are_wrapped(rows, packed, wrapped):
    tokenizer = a_tokenizer(eos_token="<eos>")
    settings = {"packing": True, "max_length": 4}
    assert learned_texts(encoded(rows, tokenizer, **settings), tokenizer) == packed
    joined = encoded(rows, tokenizer, **settings, packing_strategy="wrapped")
    assert learned_texts(joined, tokenizer) == wrapped


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"text": "ab"}], {"completion_only_loss": True}, "completion_only_loss needs examples with prompt"),
        ([{"text": "ab"}], {"assistant_only_loss": True}, "assistant_only_loss is for conversations"),
        ([{"text": "ab"}], {"chat_template_kwargs": {"a": 1}}, "which renders conversations, and the examples are"),
        ([{"prompt": "ab"}], {}, "prompts without completions"),
        ([{"prompt": "ab", "completions": ["c", None]}], {}, "no completion of its 1 items is right; sample more"),
        ([{"text": 3}], {}, "must be a text like the others, got 3"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "labels must be as many as input_ids"),
        ([{"input_ids": [1, 2], "labels": [2, -100]}], {}, "labels must be those of input_ids, without a shift"),
        ([{"input_ids": [1, 2], "labels": [1, None]}], {}, "labels must be a list of integers"),
        ([{"input_ids": [1, -2]}], {}, "must be token ids, got numbers from -2 to 1"),
        ([{"input_ids": [1, 2**40]}], {}, "must be token ids, got numbers from 1 to 1099511627776"),
        *(([{"input_ids": ids}], {}, "must be a list of integers") for ids in ([1.5], [[1], [2, 3]], None, 7, "ab")),
    ],
)
def test_examples_that_cannot_be_learned_as_asked_are_refused(rows, settings, message):
    with pytest.raises(ValueError, match=message):
        encoded(rows, a_tokenizer(eos_token="<eos>"), **settings)


# -- the loss


@pytest.mark.heavy
def test_the_loss_is_the_mean_over_learned_tokens_of_the_step(tmp_path):
    trainer = a_trainer(tmp_path, max_steps=1, batch_size=8)
    rows = rows_of(trainer.examples.sequences)
    scored = trainer.learner.logprobs(trainer.learner.policy, rows)[0]
    logps = np.concatenate([x[row.mask] for x, row in zip(scored, rows, strict=True)])
    assert losses_of(trainer)[0] == pytest.approx(-logps.mean(), abs=1e-6)


def test_the_losses_of_the_setting_are_their_formulas():
    logp = np.log(np.array([[0.5, 0.25]], np.float32))
    terms = TokenTerms(x := jnp.array(logp), x, x, x, jnp.ones((1, 2), bool), x)
    assert [*SUPERVISED_LOSSES] == [*get_args(SFTLossType)]
    found = {name: loss(terms, ObjectiveSettings()) for name, loss in SUPERVISED_LOSSES.items()}
    np.testing.assert_allclose(found["nll"], -logp, rtol=1e-6)
    np.testing.assert_allclose(found["dft"], -np.exp(logp) * logp, rtol=1e-6)


@pytest.mark.heavy
def test_packing_and_micro_batches_change_no_loss(tmp_path):
    plain = losses_of(a_trainer(tmp_path / "a", batch_size=8, max_steps=2))
    split = losses_of(a_trainer(tmp_path / "b", batch_size=8, max_steps=2, micro_batch_tokens=16))
    full = losses_of(a_trainer(tmp_path / "c", batch_size=8, max_steps=2, packing=True, max_length=12))
    np.testing.assert_allclose(split, plain, atol=1e-5)
    np.testing.assert_allclose(full, plain, atol=1e-5)


# -- the run


@pytest.mark.heavy
def test_it_learns_evaluates_and_writes_what_a_run_writes(tmp_path):
    events = []
    settings = {"eval_dataset": {"seen": EXAMPLES, "few": EXAMPLES[:2]}, "eval_steps": 20, "max_steps": 40}
    trainer = a_trainer(tmp_path, listeners=[events.append], **settings)
    before = trainer.evaluate().metrics
    result = trainer.train()
    after = trainer.evaluate().metrics
    assert after["seen_loss"] < before["seen_loss"] / 3
    assert after["few_loss"] > 0
    assert result.metrics["epoch"] == 20.0
    assert result.num_steps == 40
    assert not any(name.startswith(("ratio/", "rollout/", "reward")) for name in result.metrics)
    [first, last] = [event.metrics for event in events if isinstance(event, Evaluated)]
    assert last["eval_seen_loss"] == after["seen_loss"] < first["eval_seen_loss"]
    run = tmp_path / "run"
    assert (run / "checkpoints" / "step_000040").is_dir()
    assert "SFT run" in (run / "model" / "README.md").read_text()
    saved = load_model(run / "model")
    np.testing.assert_array_equal(saved.params["embed"], trainer.model.params["embed"])


def test_an_epoch_visits_every_example_once_and_ends_with_what_is_left(tmp_path):
    trainer = a_trainer(tmp_path, EXAMPLES[:7], max_steps=-1, num_train_epochs=1.5, batch_size=3)
    visits = [trainer.visited(step) for step in range(4)]
    assert trainer.num_steps == 5
    assert [len(each) for each in visits] == [3, 3, 1, 3]
    assert sorted(functools.reduce(operator.iadd, visits[:3], [])) == [*range(7)]
    assert (
        a_trainer(tmp_path, EXAMPLES[:7], max_steps=-1, num_train_epochs=2, batch_size=3, drop_last=True).num_steps == 4
    )
    with pytest.raises(ValueError, match="lower batch_size"):
        a_trainer(tmp_path, EXAMPLES[:2], drop_last=True)


@pytest.mark.heavy
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = a_trainer(tmp_path / "whole", max_steps=6)
    whole.train()
    a_trainer(tmp_path / "parts", max_steps=6, listeners=[_ends_after(3)], save_steps=3).train()
    second = a_trainer(tmp_path / "parts", max_steps=6)
    second.train()
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    np.testing.assert_array_equal(second.model.params["embed"], whole.model.params["embed"])
    with pytest.raises(ValueError, match="train_dataset"):
        a_trainer(tmp_path / "parts", EXAMPLES[:7], resume=str(tmp_path / "parts" / "run"), max_steps=6).train()


def _ends_after(step):
    return lambda event: isinstance(event, StepEnded) and event.step == step


@pytest.mark.heavy
def test_an_adapter_is_trained_instead_of_the_weights(tmp_path):
    trainer = a_trainer(tmp_path, peft_config=LoRAConfig(r=2), max_steps=20, batch_size=8)
    losses = losses_of(trainer)
    assert losses[-1] < losses[0]
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": None}, "train_dataset is missing"),
        ({"dataset": [{"question": "a"}]}, "none of the columns messages, prompt, text, input_ids"),
        ({"dataset": [{"messages": "hi"}]}, "train_dataset 0 must be a string or a list of messages"),
        ({"eval_steps": 2}, "there is no eval_dataset"),
        ({"loss_type": "mse"}, "loss_type must be one of nll, dft"),
        ({"packing": True, "max_length": None}, "packing fills sequences of max_length tokens"),
        ({"base_weights": "nf4"}, "quantizes the base of an adapter"),
        ({"mesh": "2,1,1,2,1", "mesh_replicate": ("vocab",), "lora_r": 4, "lora_dropout": 0.1}, "dropout 0.1 is not"),
    ],
)
def test_what_cannot_work_is_refused_when_the_trainer_is_made(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        a_trainer(tmp_path, **arguments)


@pytest.mark.heavy
def test_a_diverging_run_is_stopped(tmp_path):
    settings = {"learning_rate": 1e3, "adam_epsilon": 0.0, "weight_decay": 1e3, "max_steps": 20, "max_grad_norm": 0.0}
    with pytest.raises(DivergedError, match="Lower learning_rate, or look at these batches"):
        a_trainer(tmp_path, **settings).train()


@pytest.mark.heavy
def test_the_command_trains_and_resumes(tmp_path, capsys):
    folder, data = Path(tmp_path), tmp_path / "examples.jsonl"
    a_trainer(folder / "start", max_steps=1).train()
    data.write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES))
    run, model = str(folder / "out"), str(folder / "start" / "run" / "model")
    common = ["--model", model, "--dataset", str(data), "--eval_dataset", str(data), "--eval_steps", "2"]
    settings = ["--output_dir", run, "--batch_size", "4", "--max_steps", "2", "--progress_bar", "json"]
    assert main(["sft", *common, *settings]) == 0
    assert main(["resume", run, "--max_steps", "4"]) == 0
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3, 4]
    assert main(["sft", "--model", model]) == 2
    assert "--dataset is missing" in capsys.readouterr().err
