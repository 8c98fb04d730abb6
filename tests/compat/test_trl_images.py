"""Steps on prompts with images against recorded ones of TRL 1.16 (see trl_images.py): tokens, pixels, log-probs, loss
and gradients, of all weights, with the tower run once for the rows of a prompt; and supervised ones against TRL."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from groupax.compat import trl as groupax_trl
from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.types import Row
from groupax.models.execution import DIRECT
from groupax.models.specs import model_specs
from groupax.models.vision.processing import load_image_processor, process_images
from groupax.models.weights.checkpoint import load_model
from groupax.models.weights.saving import host_tensors, param_leaves
from groupax.objective.aggregation import Denominators
from groupax.parallel.mesh import num_data_shards
from groupax.training.accumulator import all_reduce, zero_grads
from groupax.training.images import computed_features
from groupax.training.packing import pack
from groupax.training.step import StepSettings, micro_step, shard_batch

from . import trl_images as trl

CASES = json.loads((trl.GOLDEN / "trl_images.json").read_text())
ARRAYS = np.load(trl.GOLDEN / "trl_images.npz")
# TRL's log-probs of Qwen 3.5 are themselves this far from those in float64: states of delta nets add up the errors.
CLOSE = {"qwen3_5": 4e-5}
RELATIVE = {"qwen3_5": 1e-5}  # of gradients, some of which are near 10 there


@pytest.fixture(scope="module", params=list(trl.FAMILIES))
def case(request, tmp_path_factory):
    """A family's recorded numbers, the model that they are of, and its prompts as groupax reads them."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    trl.make_folder(family, folder)
    recorded = CASES[family]
    save_file(
        {name: trl.weight(name, tuple(shape)) for name, shape in recorded["shapes"].items()},
        folder / "model.safetensors",
    )
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    processor = load_image_processor(folder, model.config.vision, tokenizer)
    prompts = []
    for row in trl.rows():
        parts = [{"type": "image"}] * len(row["images"]) + [{"type": "text", "text": row["prompt"][0]["content"]}]
        messages = [{"role": "user", "content": parts}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(process_images(processor, tokenizer, text, row["images"]))
    return family, recorded, model, prompts


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_losses_of_supervised_examples_are_those_of_trl(tmp_path):
    theirs, datasets, torch = (pytest.importorskip(name) for name in ("trl", "datasets", "torch"))
    torch.set_num_threads(1)
    folder, images = tmp_path / "model", [image for own in trl.pictures() for image in own]
    trl.make_folder("idefics3", folder)
    shapes = CASES["idefics3"]["shapes"].items()
    save_file({name: trl.weight(name, tuple(shape)) for name, shape in shapes}, folder / "model.safetensors")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What {number}?"}],
            "completion": [{"role": "assistant", "content": ["a cat", "a dog"][number % 2]}],
            "images": [images[number % 3]],
        }
        for number in range(6)
    ]
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1}
    settings |= {"bf16": False, "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False}
    settings |= {"max_length": None, "report_to": "none"}
    logs = []
    for library, more in ((theirs, {"use_cpu": True, "model_init_kwargs": {"dtype": "float32"}}), (groupax_trl, {})):
        config = library.SFTConfig(str(tmp_path / library.__name__), **settings, **more)
        trainer = library.SFTTrainer(str(folder), config, train_dataset=datasets.Dataset.from_list(rows))
        trainer.train()
        logs.append(trainer.state.log_history)
    for name in ("loss", "grad_norm", "num_tokens"):
        expected, found = ([line[name] for line in log if name in line] for log in logs)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4, err_msg=name)


def trained_rows(recorded, prompts):
    """The recorded completions as rows of their prompts."""
    rows = []
    for number, (completion, advantage) in enumerate(zip(recorded["completions"], recorded["advantages"], strict=True)):
        group = prompt_of(recorded, prompts, number)
        ids, images = prompts[group]
        size = len(completion)
        old = np.zeros(size, np.float32)
        advantages = np.full(size, advantage, np.float32)
        mask = np.ones(size, bool)
        rows.append(Row(group, ids, np.array(completion, np.int32), mask, advantages, old, images=images))
    return rows


def prompt_of(recorded, prompts, number):
    return next(group for group, (ids, _) in enumerate(prompts) if len(ids) == len(recorded["prompts"][number]))


@pytest.mark.heavy
def test_prompts_and_pixels_are_those_of_trls_processor(case):
    family, recorded, _, prompts = case
    pixels = ARRAYS[f"{family}/pixels"]
    for number, ids in enumerate(recorded["prompts"]):
        np.testing.assert_array_equal(prompts[prompt_of(recorded, prompts, number)][0], ids)
    ours = sum(
        float(np.square(image.patches).sum())
        for number in range(len(recorded["prompts"]))
        for image in prompts[prompt_of(recorded, prompts, number)][1].images
    )
    np.testing.assert_allclose(ours, np.square(pixels).sum(), rtol=1e-5)


@pytest.mark.heavy
def test_loss_log_probs_and_gradients_are_those_of_trls_step(case):
    family, recorded, model, prompts = case
    rows = trained_rows(recorded, prompts)
    close = CLOSE.get(family, 1e-5)
    settings = ObjectiveSettings(temperature=trl.SETTINGS["temperature"], loss_type=trl.SETTINGS["loss_type"])
    counts = Denominators(jnp.float32(len(rows)), jnp.float32(sum(len(row.completion) for row in rows)))
    static = {"config": model.config, "settings": settings, "mesh": model.mesh}
    totals, logps, num_encoded = zero_grads(model.params, **static), {}, 0
    for part in pack(rows, num_data_shards(model.mesh), 4096, vision=model.config.vision)[0]:
        features = computed_features(model.config.vision, part.images)
        num_encoded += sum(map(len, part.images))
        batch = shard_batch(replace(part.batch, features=features), model.mesh)
        totals, (found, _) = micro_step(
            model.params,
            totals,
            batch,
            counts,
            jnp.float32(0.0),
            settings=StepSettings(model.config, settings, model.mesh, DIRECT),
        )
        for index, own in zip(part.rows, np.asarray(found), strict=True):
            if index >= 0:
                logps[int(index)] = own[: len(rows[index].completion)]
    totals = all_reduce(totals, config=model.config, mesh=model.mesh)

    for index, own in logps.items():
        np.testing.assert_allclose(own, ARRAYS[f"{family}/logps"][index][: len(own)], atol=close)
    np.testing.assert_allclose(float(totals.loss), recorded["loss"], atol=1e-5)
    specs = model_specs(model.config)
    gradients = host_tensors(specs, param_leaves(specs, totals.grads))
    norm = np.sqrt(sum(float(np.square(grad.astype(np.float64)).sum()) for grad in gradients.values()))
    np.testing.assert_allclose(norm, recorded["grad_norm"], rtol=close)
    for name in recorded["gradients"]:
        expected = ARRAYS[f"{family}/grad/{name}"]
        np.testing.assert_allclose(gradients[name], expected, atol=close, rtol=RELATIVE.get(family, 1e-7), err_msg=name)
