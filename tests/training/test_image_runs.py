"""Images from a dataset's rows through the engine and updates: identity, agreement, refusals."""

import base64
import io
import json
import zlib
from dataclasses import replace

import datasets
import jax
import numpy as np
import pytest

from groupax import SFTConfig, SFTTrainer, init_model, load_model, replay_step
from groupax.cli.main import main
from groupax.core.config import GRPOConfig
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Row
from groupax.data.chat import check_messages
from groupax.data.files import read_rows
from groupax.data.images import images_of, read_image, with_images, without_images
from groupax.data.prompts import encode_examples
from groupax.data.supervised import rows_of
from groupax.engine.engine import Engine, new_sequences
from groupax.engine.images import check_images, lookup_tokens
from groupax.engine.prefix_cache import Prefix, PrefixCache
from groupax.models.families import read_config
from groupax.models.lora import LoRAConfig
from groupax.models.vision.placement import continued, num_features, place_images
from groupax.models.weights.checkpoint import add_adapter
from groupax.runs.build import learner_settings
from groupax.training.learner import Learner
from tests.conftest import assert_trees_match, one_device_mesh, steps_started
from tests.models.vision_models import (
    IMAGE,
    QWENS,
    an_image,
    config_of,
    model_folder,
    our_logits,
    random_prompts,
    two_layers,
)
from tests.training.test_trainer import a_trainer

Image = pytest.importorskip("PIL.Image")
ExifTags = pytest.importorskip("PIL.ExifTags")


FAMILIES = ["smolvlm", "gemma3", *QWENS]
TARGETS = {
    "smolvlm": ["q_proj", "v_proj", "fc1", "proj"],
    "gemma3": ["q_proj", "v_proj", "fc2"],
    **{qwen: ["q_proj", "qkv", "linear_fc1", "linear_fc2"] for qwen in QWENS},
    **{qwen: ["q_proj", "qkv", "mlp.0", "mlp.2"] for qwen in ("qwen2_5_vl", "qwen2_vl")},
}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(words):
    return {"type": "text", "text": words}


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


# -- rows


def test_images_of_a_column_come_before_the_text_of_the_first_message_of_the_user():
    images = [an_image(0), an_image(1)]
    row = {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], "images": images}
    read = with_images(row, "row 0")
    assert [part["type"] for part in read["prompt"][1]["content"]] == ["image", "image", "text"]
    assert images_of(read) == images
    assert without_images(read["prompt"])[1]["content"] == [{"type": "image"}, {"type": "image"}, text("Q")]


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "MPO"])
def test_an_image_is_upright_as_datasets_reads_it_from_whatever_names_it(tmp_path, kind, orientation):
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "a.file"
    more = {"save_all": True, "append_images": [an_image(1)]} if kind == "MPO" else {}
    an_image(0, (8, 24)).save(path, kind, exif=exif, **more)
    data = path.read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    upright = np.asarray(datasets.Image().decode_example({"bytes": data, "path": None}))
    forms = (
        Image.open(io.BytesIO(data)),
        data,
        bytearray(data),
        str(path),
        path,
        {"bytes": data, "path": "x"},
        {"path": str(path)},
    )
    for value in (*forms, url, read_image(data, "it")):
        np.testing.assert_array_equal(np.asarray(read_image(value, "it")), upright)
    part = {"type": "image_url", "image_url": {"url": url}}
    [seen] = images_of(with_images({"prompt": user(part, text("a"))}, "row 0"))
    np.testing.assert_array_equal(np.asarray(seen), upright)


def test_paths_are_relative_to_the_file_of_the_dataset(tmp_path):
    an_image(0).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "<image>", "image": "a.png"}\n{"prompt": "b", "image": null}\n')
    rows = read_rows(tmp_path / "rows.jsonl", "it")
    assert rows[0]["image"] == str(tmp_path / "a.png")
    assert images_of(with_images(rows[0], "row 0"))[0].size == (16, 16)


def _bomb():
    data = bytearray(png(Image.new("L", (8, 8))))
    data[16:24] = 2 * (60_000).to_bytes(4, "big")  # width and height, in the header
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def _frames():
    buffer = io.BytesIO()
    an_image(0).save(buffer, "GIF", save_all=True, append_images=[an_image(1)])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (png(an_image(0, (64, 64)))[:3000], "is damaged"),
        (b"GIF89a", "cannot be read|is not an image"),
        (b"no image", "is not an image in one of the formats PNG"),
        (_bomb(), "cannot be read: Image size"),
        (_frames(), "has 2 frames"),
        ("https://example.com/a.png", "nothing is fetched from a network"),
        ("/dev/zero", "is not a regular file"),
        ("/nowhere/a.png", "which cannot be read"),
        ("data:image/png;base64,????", "base64 is damaged"),
        (17, "must be a PIL image, bytes, a path"),
    ],
)
def test_bad_images_are_refused_by_their_row(value, fault):
    with pytest.raises(ValueError, match=f"prompt 3: the image.*({fault})"):
        with_images({"prompt": "a", "image": value}, "prompt 3")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "image": an_image(0), "images": [an_image(1)]}, "in both columns"),
        ({"prompt": user(text("a")), "image": an_image(0)}, "has 1 images in its column and 0 parts"),
        ({"prompt": user({"type": "image"}, text("a")), "images": [an_image(0)] * 2}, "has 2 images .* and 1 parts"),
        ({"prompt": user({"type": "image"}, text("a"))}, "has 0 images in its column and 1 parts"),
        ({"prompt": user({"type": "image_url", "image_url": "http://x"})}, "only data: URLs are read"),
        (
            {"prompt": [{"role": "assistant", "content": [{"type": "image", "image": an_image(0)}]}]},
            "only messages of the user and the system",
        ),
    ],
)
def test_rows_whose_images_have_no_place_are_refused(row, fault):
    with pytest.raises(ValueError, match=f"prompt 3.*{fault}"):
        with_images(row, "prompt 3")


@pytest.mark.parametrize("kind", ["video", "video_url", "input_audio"])
def test_videos_and_sounds_are_refused_by_their_name(kind):
    parts = [{"type": kind, kind: "a.mp4"}, {"type": "image"}, text("What?")]
    with pytest.raises(ValueError, match=f"prompt 3: message 1 of 1 has a part of type '{kind}'.* no videos or sounds"):
        check_messages(user(*parts), "prompt 3", with_images=True)


def test_a_model_of_text_refuses_images():
    with pytest.raises(ValueError, match="has a column 'image', which the model would not see"):
        encode_examples([{"prompt": "a", "image": an_image(0)}], None, 8, "error")


# -- identity


def a_sequence(ids, images):
    [sequence] = new_sequences([ids], SamplingParams(), ())
    sequence.images = images
    return sequence


def test_prompts_with_equal_tokens_and_other_images_share_no_prefix():
    config = read_config(config_of("gemma3", {}, {}, {})).vision
    pairs = [random_prompts(config, seed, (2,))[0] for seed in (0, 0, 1)]
    ids = pairs[0][0]
    first, same, other = (
        lookup_tokens(a_sequence(ids, place_images(config, ids, placed.images))) for _, placed in pairs
    )
    begin = int(np.flatnonzero(ids == IMAGE)[0])
    assert (first == same).all()
    assert (first[:begin] == other[:begin]).all()
    assert (first[ids == IMAGE] != other[ids == IMAGE]).all()
    assert (first[ids == IMAGE] < 0).all()
    cache = PrefixCache(1 << 20)
    cache.add(Prefix(first, [np.zeros((1, 1, len(ids)))], [np.zeros((1, len(ids), 1))]))
    assert (cache.find(same)[0], cache.find(other)[0]) == (len(ids), begin)


def test_a_sequence_must_have_the_images_that_its_tokens_stand_for():
    config = read_config(config_of("qwen3_vl", {}, {}, {})).vision
    [(ids, placed)] = random_prompts(config, 0, (1,))
    check_images(config, a_sequence(ids, placed))
    check_images(config, a_sequence(np.concatenate([ids, [5, 6]]), placed))
    with pytest.raises(ValueError, match="its 0 images have 0 features"):
        check_images(config, a_sequence(ids, None))
    with pytest.raises(ValueError, match="are not where its images are"):
        check_images(config, a_sequence(np.roll(ids, 1), placed))
    with pytest.raises(ValueError, match="the model reads text only"):
        check_images(None, a_sequence(ids, placed))
    image = placed.images[0]
    ends = np.array([3] + [IMAGE] * num_features(config, image))
    with pytest.raises(ValueError, match="ends with an image"):
        check_images(config, a_sequence(ends, place_images(config, ends, [image])))


# -- engine and updates


def a_model(family, scale=5.0):
    model = init_model(two_layers(family), 0, mesh=one_device_mesh())
    return replace(model, params=jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, model.params))


def a_learner(model, **settings):
    return Learner(model, learner_settings(GRPOConfig(beta=0.0, optimizer="sgd", **settings)), 10)


def sampled_rows(family, freeze=True, n=2):
    model = a_model(family)
    config, learner = model.config, a_learner(model, freeze_vision_tower=freeze)
    engine = Engine(config, learner.policy, model.mesh, (), features=learner.features)
    prompts = random_prompts(config.vision, 0, (1, 0, 2))
    sequences = engine.sequences([ids for ids, _ in prompts], SamplingParams(n=n, max_tokens=6))
    for each in sequences:
        images = prompts[each.prompt_index][1]
        each.images = images if images.images else None
    list(engine.stream(sequences))
    rng = np.random.default_rng(0)
    rows = [
        Row(
            each.prompt_index,
            each.prompt,
            np.array(each.tokens, np.int32),
            np.ones(len(each.tokens), bool),
            np.full(len(each.tokens), rng.normal(), np.float32),
            np.array(each.policy_logps, np.float32),
            images=each.images,
        )
        for each in sequences
    ]
    return learner, rows


@pytest.mark.drawn(2)
@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_agrees_with_the_trainer_and_encodes_each_image_once(family):
    learner, rows = sampled_rows(family)
    logps, _ = learner.logprobs(learner.policy, rows)
    worst = max(np.abs(logp - row.rollout_logp).max() for logp, row in zip(logps, rows, strict=True))
    assert worst < 1e-5
    learner.update(rows)
    assert learner.features.num_encoded == len({i.digest for row in rows if row.images for i in row.images.images})
    assert not any(token in learner.config.vision.placeholder_ids for row in rows for token in row.completion)


@pytest.mark.heavy
@pytest.mark.parametrize("freeze", [True, False])
def test_a_group_that_is_packed_once_has_the_gradient_of_its_rows(freeze):
    before = {}
    for share in ("always", "never"):
        learner, rows = sampled_rows("qwen3_vl", freeze)
        learner.settings = learner.settings.__class__(**{**vars(learner.settings), "share_prefix": share})
        update = learner.update(rows)
        before[share] = update.metrics["loss"], update.metrics["grad_norm"]
        assert ("vision" in learner.state.params) == (not freeze)
    np.testing.assert_allclose(before["always"], before["never"], rtol=1e-5)


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_of_an_adapter_of_the_tower_does_not_depend_on_micro_batches(family):
    _, rows = sampled_rows(family)
    updated = {}
    for rate, tokens in ((0.5, 10_000), (0.5, 24), (0.0, 10_000)):
        adapted = add_adapter(a_model(family, 1.0), LoRAConfig(r=4, lora_dropout=rate, target_modules=TARGETS[family]))
        trained = jax.tree.map(lambda x: x + 0.05, adapted.adapter.trained)
        adapted = replace(adapted, adapter=replace(adapted.adapter, trained=trained))
        learner = a_learner(adapted, learning_rate=0.1, micro_batch_tokens=tokens)
        learner.update(rows)
        updated[rate, tokens] = jax.tree.leaves(learner.state.params["vision"])
    whole, small, without = updated.values()
    assert_trees_match(whole, small, atol=1e-6)
    for other in (without, jax.tree.leaves(trained["vision"])):
        assert max(np.abs(a - b).max() for a, b in zip(whole, other, strict=True)) > 1e-5


# -- runs


def reward(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def some_rows():
    rows = [{"prompt": [{"role": "user", "content": f"What {i}?"}], "image": an_image(i)} for i in range(3)]
    return [*rows, {"prompt": [{"role": "user", "content": "Text"}], "image": None}]


def a_run(folder, model, steps, **settings):
    given = {"output_dir": str(folder), "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 6}
    given |= {"learning_rate": 1e-3, "max_steps": steps, "tokenizer": None}
    return a_trainer(folder, reward, some_rows(), str(model), **given | settings)


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_trains_and_resumes_bit_for_bit_and_keeps_images_and_tower(tmp_path, family):
    model = model_folder(family, tmp_path / "model")
    whole = a_run(tmp_path / "whole", model, 4, updates_per_rollout=2, beta=0.01)
    whole.train()
    half = {"updates_per_rollout": 2, "beta": 0.01, "save_steps": 1}
    a_run(tmp_path / "half", model, 3, **half).train()
    resumed = a_run(tmp_path / "half", model, 4, **half, image_cache_gb=0.0, resume=str(tmp_path / "half"))
    assert steps_started(resumed) == [3]
    assert resumed.learner.digest() == whole.learner.digest()
    outcome = replay_step(tmp_path / "half", 3, model, reward, train_dataset=some_rows())
    assert outcome.is_equal
    assert len(list((tmp_path / "whole" / "images").glob("*.png"))) == 3
    exported = tmp_path / "exported"
    assert main(["checkpoints", str(tmp_path / "half"), "export", "--to", str(exported)]) == 0
    first = a_run(tmp_path / "first", model, 1).learner
    for number, written in enumerate((tmp_path / "whole" / "model", exported)):
        last = a_run(tmp_path / f"again{number}", written, 1).learner
        assert_trees_match(first.untrained, last.untrained)


@pytest.mark.heavy
def test_prompts_with_images_are_dropped_whole_or_refused_where_they_are_too_long(tmp_path):
    model = model_folder("smolvlm", tmp_path / "model")
    with pytest.raises(ValueError, match=r"has images and .* it cannot be cut within an image"):
        a_run(tmp_path / "a", model, 1, max_prompt_length=20, prompt_overflow="truncate_left")
    run = a_run(tmp_path / "b", model, 1, max_prompt_length=20, prompt_overflow="drop")
    assert (len(run.prompts), run.prompts.num_dropped) == (1, 3)
    with pytest.raises(ValueError, match="rollout_servers receive prompts as text"):
        a_run(tmp_path / "c", model, 1, rollout_servers=("http://localhost:1",))


# -- supervised examples


def says(words):
    return [{"role": "assistant", "content": words}]


TALK = [*user({"type": "image"}, text("A?")), *says("Ab"), *user({"type": "image"}, text("B?")), *says("Cd")]
TALKS = [
    {"messages": TALK, "images": [an_image(0), an_image(1)]},
    {"messages": [*user(text("Text?")), *says("Ef")], "images": []},
    {"messages": [*user(text("X"), {"type": "image", "image": png(an_image(2))}), *says("Gh")], "images": None},
]
PAIRS = [
    {"prompt": [{"role": "user", "content": "A?"}], "completion": says("Ab"), "image": an_image(i)} for i in (0, 1, 0)
]


def supervised(folder, model, rows, **settings):
    given = {"batch_size": 3, "max_steps": 4, "learning_rate": 1e-3, "progress_bar": "none", **settings}
    return SFTTrainer(str(model), SFTConfig(output_dir=str(folder), **given), rows)


@pytest.mark.drawn(2)
@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{}, {"assistant_only_loss": True}, {"packing": True}, None], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_supervised_examples_have_the_log_probs_of_whole_rows(tmp_path, family, settings):
    folder = model_folder(family, tmp_path / "model")
    rows = PAIRS if settings is None else TALKS
    if family == "gemma3" and settings is not None:
        with pytest.raises(ValueError, match="train_dataset 0: it has an image after the first token to learn"):
            supervised(tmp_path / "run", folder, rows, **settings)
        return
    trainer = supervised(tmp_path / "run", folder, rows, **settings or {})
    found = rows_of(trainer.examples.sequences, trainer.examples.images)
    assert sum(len(row.images.images) for row in found if row.images) == 3
    logps, _ = trainer.learner.logprobs(trainer.learner.policy, found)
    prompts = [np.concatenate([row.prompt, row.completion]) for row in found]
    nothing = place_images(trainer.start_model.config.vision, np.zeros(0, np.int32), [])
    placed = [(ids, continued(row.images or nothing, len(ids))) for ids, row in zip(prompts, found, strict=True)]
    learned = []
    for row, own, logits in zip(found, logps, our_logits(load_model(folder), placed), strict=True):
        size, tokenizer = len(row.prompt), trainer.tokenizer
        rest = jax.nn.log_softmax(logits[size - 1 : -1])[np.arange(len(row.completion)), row.completion]
        np.testing.assert_allclose(own[row.mask], rest[row.mask], atol=1e-5)
        learned.append(tokenizer.decode(row.completion[row.mask]))
    assert not any(name in words for words in learned for name in ("<image", "_pad", "soft_token"))
    if settings == {"assistant_only_loss": True}:
        assert sorted(words.replace(" ", "") for words in learned) == ["AbCd", "Ef", "Gh"]


def test_an_example_is_the_same_in_whatever_form_its_image_is_given(tmp_path):
    model, image, file = model_folder("smolvlm", tmp_path / "model"), an_image(0), tmp_path / "rows.jsonl"
    image.save(tmp_path / "a.png")
    place, plain = {"type": "image", "text": None}, {"role": "user", "content": "A?"}
    file.write_text(json.dumps({"messages": [*user({"type": "image", "image": "a.png"}, text("A?")), *says("Ab")]}))
    forms = [
        [{"messages": [*user({**place, "image": png(image)}, text("A?")), *says("Ab")]}],
        [{"messages": [plain, *says("Ab")], "image": image, "prompt": "ignored"}],
        datasets.Dataset.from_list([{"messages": [plain, *says("Ab")], "images": [image]}]),
        str(file),
        [{"prompt": [plain], "completion": says("Ab"), "image": image}],
        [{"text": "user: <image>A?assistant: Ab", "image": image}],
        [{"prompt": "user: <image>A?assistant: ", "completion": "Ab", "image": image}],
    ]
    first, *others = (supervised(tmp_path / str(i), model, form).examples for i, form in enumerate(forms))
    [[example]] = first.sequences
    for each in others:
        [[other]] = each.sequences
        np.testing.assert_array_equal(other.ids[: len(example.ids)], example.ids)
        assert each.images.digests == first.images.digests
    alone = [forms[4][0] | {"prompt": user(place)}]
    [[of_image]] = supervised(tmp_path / "alone", model, alone).examples.sequences
    assert of_image.learned.sum() == len(" Ab")


@pytest.mark.heavy
def test_supervised_training_with_images_resumes_bit_for_bit(tmp_path):
    model = model_folder("qwen2_5_vl", tmp_path / "model")
    whole = supervised(tmp_path / "whole", model, PAIRS, freeze_vision_tower=False)
    losses = [whole.evaluate(PAIRS).metrics["loss"]]
    whole.train()
    assert whole.evaluate(PAIRS).metrics["loss"] < losses[0]
    half = {"freeze_vision_tower": False, "save_steps": 1}
    supervised(tmp_path / "half", model, PAIRS, **half, max_steps=2).train()
    resumed = supervised(tmp_path / "half", model, PAIRS, **half, image_cache_gb=0.0)
    resumed.train()
    assert resumed.learner.digest() == whole.learner.digest()
    changed = [{**row, "image": an_image(9)} for row in PAIRS]
    with pytest.raises(ValueError, match="train_dataset"):
        supervised(tmp_path / "half", model, changed, **half, max_steps=6, resume=str(tmp_path / "half")).train()


@pytest.mark.parametrize(
    ("rows", "settings", "fault"),
    [
        (TALKS, {"max_length": 8}, r"train_dataset 0: it has \d+ tokens, and would be cut before the end of its last"),
        (TALKS, {"packing": True, "packing_strategy": "wrapped"}, "train_dataset 0: it has images, and packing_strat"),
        (TALKS, {"packing": True, "packing_strategy": "bfd_split", "max_length": 40}, "'bfd_split' would cut it"),
        ([{"input_ids": [1, 2], "image": an_image(0)}], {}, "train_dataset 0 has images and input_ids"),
        (
            [PAIRS[0] | {"completion": "text"}],
            {},
            "train_dataset 0: prompts are lists of messages, and its completion is none",
        ),
        ([{"text": "<image> <fake_token_around_image>", "image": None}], {}, "its text has 1 tokens that stand"),
        ([{"messages": TALK, "image": an_image(0)}], {}, "has 1 images in its column and 2 parts"),
        ([{"text": "no place", "image": an_image(0)}], {}, "train_dataset 0: the text has 0 placeholders"),
        ([{"text": "<image>"}], {}, "train_dataset 0: it has no images, and its text has 1 tokens"),
    ],
)
def test_supervised_examples_whose_images_do_not_fit_are_refused(tmp_path, rows, settings, fault):
    with pytest.raises(ValueError, match=fault):
        supervised(tmp_path / "run", model_folder("smolvlm", tmp_path / "model"), rows, **settings)
