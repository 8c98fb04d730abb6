"""Settings, datasets and tokenizers: accepted and refused values, and the order of visits."""

import dataclasses
import json
import random
import re
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax import GRPOConfig, SFTConfig, init_model, save_model
from groupax.core.config import NAMES_ELSEWHERE
from groupax.core.schedule import UpdateSchedule, update_schedule
from groupax.core.settings.fields import Range
from groupax.data.examples import load_examples, visit_order
from groupax.data.prompts import encode_examples
from groupax.data.tokenizer import encode_prompts, encode_within, eos_token_ids, load_tokenizer, prepare_tokenizer
from tests.conftest import TINY

# -- settings


def test_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="no field 'learning_rte'; did you mean learning_rate"):
        GRPOConfig(learning_rte=1e-4)
    with pytest.raises(TypeError, match="no field 'per_device_batch'"):
        GRPOConfig.from_mapping({"per_device_batch": 3})


def test_trls_names_point_to_ours():
    own = {field.name for field in dataclasses.fields(GRPOConfig)}
    for name, here in NAMES_ELSEWHERE.items():
        assert name not in own
        assert here.startswith("groupax push") or re.split(r"\W", here)[0] in own
        with pytest.raises(TypeError, match=rf"no field '{name}'; that is TRL's .* here it is .*groupax\.compat\.trl"):
            GRPOConfig(**{name: 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "at least 2 completions"),
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, bnpo, .*, vespo or a function, .*, got 'ppo'"),
        ({"temperature": 0.0}, "temperature must be between 1e-06 and 1000, got 0.0: greedy completions"),
        ({"prompts_per_step": 0}, "prompts_per_step must be between 1 and 1,000,000, got 0; the default is 8"),
        ({"max_steps": 0}, "max_steps must be -1 or between 1 and 1,000,000,000, got 0: -1 follows num_train_epochs"),
        ({"num_train_epochs": 0}, "num_train_epochs is 0 and max_steps -1"),
        ({"top_p": 1.5}, "top_p must be between 1e-06 and 1, got 1.5"),
        ({"learning_rate": float("nan")}, "learning_rate must be between 0 and 1000, got nan"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be between 1 and 1,000,000,000 or None, got 0"),
        ({"delta": 4.0, "loss_type": "sapo"}, "delta 4.0 has no effect with loss_type 'sapo'; leave it unset"),
        ({"delta": 0.28}, "far above the clipping at 1.2, .* it is 0.28"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"max_steps": True}, "max_steps must be a whole number, got True"),
        ({"drop_last": 1}, "drop_last must be true or false, got 1"),
        ({"output_dir": 3}, "output_dir must be a text, got 3"),
        ({"reward_weights": ("1",)}, "reward_weights must be a list with each a number or None, got"),
        ({"report_to": "wandbb"}, "report_to must be of wandb, .*did you mean wandb"),
        ({"report_to": ("wandbb",)}, "report_to must be of wandb, .*, got"),
        ({"stop": ("",)}, "stop must not be an empty text, got ''"),
        ({"stop": ("a\ud800",)}, "stop must be texts of at least one character"),
        ({"stop": (3,)}, "stop must be a list with each a text"),
        ({"stop": tuple(map(str, range(17)))}, "stop has 17 texts, at most 16 are looked for"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs has 'tools', which groupax sets itself"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a mapping of names"),
        ({"chat_template_kwargs": {"x": {1, 2}}}, "a value that JSON cannot represent"),
        ({"loss_type": "cispo"}, "set it, e.g. epsilon_high=5.0"),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, "leave scale_rewards at"),
        ({"sync_ref_model": True}, "sync_ref_model needs a reference, and beta is 0"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "are both set; leave one at 0"),
        ({"warmup_ratio": 1.5}, "warmup_ratio must be between 0 and 1, got 1.5"),
        ({"rollout_correction_min": 4.0}, "rollout_correction_min 4.0 is above rollout_correction_max 3.0"),
        ({"entropy_coef_min": 2.0}, "entropy_coef_min 2.0 is above entropy_coef_max 1.0"),
        ({"top_entropy_quantile": -0.1}, "top_entropy_quantile must be between 0 and 1"),
        ({"rollout_folder": "/shared"}, "rollout_folder is for rollout_servers"),
        ({"filter_budget": 0.5}, "filter_budget must be between 1 and"),
        ({"max_bad_steps": 0}, "max_bad_steps must be between 1 and"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, adafactor, lion, muon, sgd, got 'adam'"),
        ({"rollout_correction": "truncate"}, "rollout_correction must be one of none, token_truncate"),
        ({"use_kl_in_reward": True}, "use_kl_in_reward needs a reference, and beta is 0"),
        ({"reward_clip_range": (1.0, 1.0)}, "a lower and a higher number"),
        ({"reward_clip_range": (0.0, 1.0), "multi_objective_aggregation": "normalize_then_sum"}, "clips the sum"),
        ({"max_staleness": 1}, "set rollout_correction, e.g. to 'token_truncate'"),
        ({"max_staleness": -1}, "max_staleness must be between 0 and"),
        ({"mesh": "2,2"}, "five numbers"),
        ({"mesh": "1,x,1,1,1"}, "five numbers"),
        ({"mesh": "-1,-1,1,1,1"}, "one may be -1 for the rest"),
        ({"mesh": "0,1,1,1,1"}, "at least 1"),
        ({"mesh_dcn": "2,-1,1,1,1"}, r"mesh_dcn must be numbers of slices, all at least 1, got '2,-1,1,1,1'"),
        ({"decoding_tp": 2, "base_weights": "nf4", "lora_r": 4}, "base_weights 'nf4' are replicated on every device"),
        (
            {"decoding_tp": 2, "max_staleness": 1, "rollout_correction": "token_truncate"},
            "decoding_tp 2 and max_staleness 1 cannot be combined",
        ),
        ({"routing_replay": True, "rollout_servers": ("http://a:1",)}, "rollout_servers send no experts"),
        ({"num_generations": 10**30}, "num_generations must be between 2 and 65,536, got a whole number of 100 bits"),
        ({"regex": "a"}, "with regex completions are sampled from another distribution"),
        ({"offload_reference": True}, "offload_reference needs a reference, and beta is 0; set beta above 0"),
        ({"attn_implementation": "flash"}, "attn_implementation must be one of auto, plain, fused, got 'flash'"),
        ({"rollout_servers": "host:8000"}, "rollout_servers must be addresses like http://host:port, got 'host:8000'"),
    ],
    ids=str,
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


# Numbers that most settings refuse.
BAD_NUMBERS = [10**5000, *map(float, ("nan", "inf", "-inf")), 10**30, -(10**30), -1, 1e-300, 1e300, 2**63, 0, -0.5]
BAD_KINDS = [True, "1", "", " ", "a\0b", b"x", None, (), [1e400], ("",), {}, {"a": 1}, object, 1j, [[1]], np.ones(2)]


def outcome(settings):
    """Returns the resulting settings or the message of a clear error; any other error fails the test."""
    try:
        config = GRPOConfig(**settings)
    except ValueError as error:
        said = str(error)
    else:
        json.dumps(config.to_dict(), allow_nan=False)
        return config
    assert any(name in said for name in settings), f"{settings}: {said}"
    assert len(said) < 600
    assert said.isprintable()
    return said


def test_every_number_has_a_range_that_contains_its_default():
    for field in dataclasses.fields(GRPOConfig):
        is_number = {int, float} & {field.type, *get_args(field.type)} or "float" in str(get_args(field.type))
        if is_number and get_origin(field.type) is not Literal:
            assert isinstance(field.metadata.get("range"), Range), field.name
            for number in (float("nan"), float("inf"), float("-inf"), 10**30):
                value = (number,) if field.name == "reward_weights" else number
                said = outcome({field.name: value})
                assert isinstance(said, str), f"{field.name}={number}"
                assert f"{field.name} must " in said


def test_every_bad_setting_is_refused_where_it_is_given_or_can_work():
    """Tries odd values of settings: 200 random ones alone, and 200 pairs."""
    drawn = random.Random(0)
    names = [field.name for field in dataclasses.fields(GRPOConfig)]
    refused = 0
    for size in (1, 2) * 200:
        chosen = drawn.sample(names, size)
        refused += isinstance(outcome({name: drawn.choice(BAD_NUMBERS + BAD_KINDS) for name in chosen}), str)
    assert refused > 350


def test_lists_paths_and_numpys_numbers_are_settings_too(tmp_path):
    settings = {"output_dir": tmp_path, "learning_rate": np.float64(0.5), "max_steps": np.int32(3)}
    assert GRPOConfig(report_to="wandb", lora_r=1, lora_target_modules="q_proj").report_to == ("wandb",)
    config = GRPOConfig(reward_weights=[1, 0.5], **settings)
    assert config == GRPOConfig(reward_weights=(1, 0.5), output_dir=str(tmp_path), learning_rate=0.5, max_steps=3)
    assert json.loads(json.dumps(config.to_dict()))["output_dir"] == str(tmp_path)


def test_values_of_a_file_are_converted():
    read = yaml.safe_load("{learning_rate: 1e-6, epsilon_high: 3e-1, report_to: wandb, reward_weights: 1, beta: 0}")
    assert read["learning_rate"] == "1e-6"  # to YAML that is a text
    config = GRPOConfig.from_mapping(read)
    assert (config.learning_rate, config.epsilon_high, config.report_to) == (1e-6, 0.3, ("wandb",))
    assert (config.reward_weights, config.beta) == ((1,), 0)
    with pytest.raises(ValueError, match="learning_rate must be a number, got 'fast'"):
        GRPOConfig.from_mapping({"learning_rate": "fast"})


@pytest.mark.parametrize(
    "config",
    [
        GRPOConfig(max_steps=3, reward_weights=(1.0, 0.5), mesh="-1,1,1,1,1", chat_template_kwargs={"a": [1]}),
        SFTConfig(max_length=5, run_name="it's"),
    ],
)
def test_a_config_is_frozen_and_is_shown_and_written_as_what_creates_it(config):
    assert eval(repr(config)) == config
    assert "beta" not in repr(config), "defaults are left out"
    assert type(config).from_mapping(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(AttributeError):
        config.__setattr__("learning_rate", 0.1)


# -- datasets

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(5)]


def test_datasets_of_every_kind(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    hub = datasets.Dataset.from_list(ROWS)
    made = datasets.Dataset.from_list([{"n": i} for i in range(5)]).with_transform(
        lambda batch: {"prompt": [f"p{n}" for n in batch["n"]], "answer": [*map(str, batch["n"])]}
    )
    for source in (ROWS, tmp_path / "a.jsonl", str(tmp_path / "a.json"), tmp_path / "a.parquet", hub, made):
        examples = load_examples(source)
        assert [dict(examples[i]) for i in range(len(examples))] == ROWS


def test_every_epoch_visits_every_prompt_once_in_another_order():
    order = visit_order(7, 0, 21, seed=3)
    epochs = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert visit_order(7, 5, 9, seed=3) == order[5:14]
    assert visit_order(7, 0, 7, seed=4) != epochs[0]


def test_rollouts_become_updates():
    once, twice = update_schedule(GRPOConfig()), update_schedule(GRPOConfig(num_iterations=2))
    assert [once.num_steps(100, 1.0, -1), once.num_steps(100, 3.0, 5), once.num_steps(3, 1.0, -1)] == [13, 5, 1]
    assert twice.num_steps(100, 3.0, -1) == 76
    schedule = update_schedule(
        GRPOConfig(prompts_per_step=3, updates_per_rollout=4, num_generations=2, num_iterations=5)
    )
    assert schedule == UpdateSchedule(prompts_per_rollout=12, minibatches=4, rows=6, num_passes=5, drop_last=False)
    assert schedule.updates_per_rollout == 20


def test_whole_epochs_leave_out_incomplete_rollouts():
    parts = update_schedule(GRPOConfig(prompts_per_step=4, updates_per_rollout=2, drop_last=True))
    assert parts.prompts_per_epoch(19) == 16
    assert parts.num_steps(19, 3.0, -1) == 12
    with pytest.raises(ValueError, match="has 7 prompts and a rollout takes 8"):
        parts.prompts_per_epoch(7)
    order = visit_order(19, 0, 32, seed=1, per_epoch=16)
    assert [len({*order[:16]}), len({*order[16:]})] == [16, 16]
    assert visit_order(19, 9, 14, seed=1, per_epoch=16) == order[9:23]


def test_prompts_in_other_orders():
    assert visit_order(4, 2, 5, seed=3, order="dataset") == [2, 3, 0, 1, 2]
    assert visit_order(6, 0, 12, seed=42, order="shuffled_by_torch") == [0, 3, 2, 4, 1, 5, 5, 1, 2, 4, 0, 3]
    assert visit_order(6, 4, 5, seed=42, order="shuffled_by_torch") == [1, 5, 5, 1, 2]


@pytest.mark.parity
def test_the_order_of_torch_is_that_of_torch():
    torch = pytest.importorskip("torch")
    for seed, num in ((0, 1), (42, 6), (7, 1000)):
        generator = torch.Generator()
        generator.manual_seed(seed)
        expected = [index for _ in range(3) for index in torch.randperm(num, generator=generator).tolist()]
        assert visit_order(num, 0, 3 * num, seed, "shuffled_by_torch") == expected


# -- tokenizers


def a_tokenizer(**special):
    vocab = {"<unk>": 0, "<eos>": 1, "<pad>": 2, **{c: 3 + i for i, c in enumerate("abcdefghij")}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


def test_prompts_that_are_too_long():
    tokenizer = a_tokenizer(eos_token="<eos>")
    rows = [{"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "ab"}]
    with pytest.raises(ValueError, match=r"prompt 1 has 8 tokens, at most 4 are allowed \(1 of 3"):
        encode_examples(rows, tokenizer, 4, "error")
    dropped = encode_examples(rows, tokenizer, 4, "drop")
    assert [row["prompt"] for row in dropped.examples] == ["abc", "ab"]
    assert dropped.num_dropped == 1
    truncated = encode_examples(rows, tokenizer, 4, "truncate_left")
    assert tokenizer.decode(truncated.token_ids[1]).replace(" ", "") == "efgh"
    assert truncated.num_truncated == 1
    whole, [end] = (
        tokenizer("abcdefghij" * 500)["input_ids"],
        encode_within(tokenizer, ["abcdefghij" * 500], [False], 4),
    )
    assert 4 < len(end) < 1000, "no more of a long text is encoded than may be needed"
    assert end.tolist() == whole[-len(end) :]
    with pytest.raises(ValueError, match="all 3 prompts are longer"):
        encode_examples(rows, tokenizer, 1, "drop")
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        encode_examples([{"prompt": ""}], tokenizer, 4, "drop")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_tokenizer_of_ones_own_splits_as_its_files_say(tmp_path, model_type):
    tokenizer = a_tokenizer(eos_token="<eos>")
    save_model(init_model({**TINY, "model_type": model_type, "vocab_size": 13}), tmp_path / "model", tokenizer)
    loaded = load_tokenizer(tmp_path / "model")
    assert loaded("abjx cd")["input_ids"] == tokenizer("abjx cd")["input_ids"]
    assert loaded.eos_token == "<eos>"


def test_conversational_prompts_need_a_template(tmp_path, caplog):
    messages = [{"role": "user", "content": "abc"}]
    with pytest.raises(ValueError, match=r"no chat template .*chatml, plain or to a file"):
        encode_prompts(a_tokenizer(), [messages])
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}j{% endif %}")
    tokenizer = prepare_tokenizer(a_tokenizer(eos_token="<eos>"), str(template))
    strings, chat = encode_prompts(tokenizer, ["abc", messages])
    assert strings.tolist() == [3, 4, 5]
    assert chat.tolist() == [3, 4, 5, 12]
    encode_examples([{"prompt": [*messages, {"role": "assistant", "content": "d"}]}] * 2, tokenizer, 9, "error")
    assert "prompt 0 and 1 others end with a message of the assistant. It is not continued" in caplog.text
    with pytest.raises(ValueError, match="neither a file nor one of chatml, plain"):
        prepare_tokenizer(a_tokenizer(), "chatlm")
    with pytest.raises(ValueError, match="must be a string or a list of messages"):
        encode_prompts(tokenizer, [["abc"]])


def test_eos_ids_come_from_everywhere():
    tokenizer = a_tokenizer(eos_token="<eos>")
    assert eos_token_ids(tokenizer, {"eos_token_id": [5, 1]}, {"eos_token_id": 7}, {}) == (1, 5, 7)
    assert eos_token_ids(a_tokenizer(), {}) == ()


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "gemma2", "cohere"])
def test_no_tokenizer_in_the_folder(tmp_path, model_type):
    """For some families transformers would create a tokenizer of special tokens from the settings alone."""
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": model_type}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    with pytest.raises(ValueError, match=r"no tokenizer that transformers can load: it has none of tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tokenizer_of_words_and_merges(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "qwen2"}))
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("a b\n")
    assert load_tokenizer(tmp_path)("abba")["input_ids"] == [2, 1, 0]
