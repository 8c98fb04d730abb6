"""A report shows the images of the prompts beside the completions, inside its one file."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from groupax.data.images import image_name
from groupax.runs.folder import RunFolder
from groupax.runs.report.page import write_run_report
from groupax.runs.report.record import MAX_IMAGE_SIDE as MAX_SIDE
from groupax.runs.report.record import _image_urls as image_urls
from tests.view.test_view_images import rollout

SOURCE = re.compile(r'<img src="data:image/png;base64,([^"]*)" alt="image (\d) of the prompt">')


@pytest.fixture
def run(tmp_path):
    """A run whose two prompts have an image each, the second of which is large."""
    images = [Image.new("RGB", (8, 6), "red"), Image.new("RGB", (3 * MAX_SIDE, MAX_SIDE), "blue")]
    run = RunFolder(tmp_path / "run")
    run.start({})
    for step in (1, 2):
        run.write_metrics({"step": float(step), "reward": 0.5, "loss": 0.0})
        run.write_rollouts(step, [rollout(prompt, sample, images[prompt]) for prompt in (0, 1) for sample in (0, 1)])
    return run, images


def shown(run, to):
    page, _ = write_run_report(run.path, to)
    return [
        Image.open(io.BytesIO(base64.b64decode(found))) for found, _ in SOURCE.findall(page.read_text(encoding="utf-8"))
    ]


def test_images_are_in_the_report_and_large_ones_are_made_smaller(run, tmp_path):
    run, images = run
    found = sorted(shown(run, tmp_path), key=lambda image: image.size)
    assert [image.size for image in found] == [(8, 6), (MAX_SIDE, MAX_SIDE // 3)]
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(images[0]))
    assert found[1].convert("RGB").getpixel((0, 0)) == (0, 0, 255)
    assert "img-src data:;" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_only_images_of_the_run_are_read(run):
    run, images = run

    def urls(name, kind="image"):
        parts = f'[{{"role": "user", "content": [{{"type": "{kind}", "image": "{name}"}}, 7]}}, 7]'
        return image_urls(run.path, parts)

    known = image_name(images[0])
    assert len(urls(known)) == 1
    assert urls(known, kind="text") == []
    for name in ("config.json", f"../run/{known}", "images/../config.json", f"images/{'1' * 64}.png"):
        assert urls(name) == []
    for prompt in (known, "[{", '[{"content": 7}]', "[" * 100_000, "[{" * 100_000):
        assert image_urls(run.path, prompt) == []
    (run.path / known).write_bytes(b'<svg onload="alert(1)">')
    assert urls(known) == []
    (run.path / known).unlink()
    (run.path / known).symlink_to(run.path / image_name(images[1]))
    assert urls(known) == []
