"""Images of prompts in `groupax view`: beside their group, served as PNG files of the run folder and nothing else."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from groupax.core.types import PromptImages
from groupax.data.images import image_name
from groupax.models.vision.placement import make_image
from groupax.runs.folder import RunFolder
from groupax.satellites.view.export import make_app
from groupax.satellites.view.runs import Runs

from .test_view import a_rollout


def rollout(prompt_index, sample_index, image):
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "How many?"}]
    patches = make_image(np.zeros((1, 4, 3)), (2, 2))
    images = PromptImages((patches,), (1,), np.array([-1, 0, -1, -1], np.int32))
    example = {"prompt": [{"role": "user", "content": parts}]}
    return replace(a_rollout(1, prompt_index, sample_index), example=example, images=images)


@pytest.fixture
def page(tmp_path):
    """A run with two prompts of one image each, and a client of its page."""
    images = [Image.new("RGB", (8, 6), color) for color in ("red", "blue")]
    run = RunFolder(tmp_path / "run")
    run.start({"seed": 1})
    run.write_rollouts(1, [rollout(prompt, sample, images[prompt]) for prompt in range(2) for sample in range(2)], {})
    app = make_app(Runs([tmp_path]))
    return TestClient(app), images, tmp_path / "run"


def test_a_group_has_the_images_of_its_prompt_and_they_are_served_once_by_digest(page):
    client, images, folder = page
    [run] = client.get("/api/runs").json()
    for prompt, image in enumerate(images):
        group = client.get("/api/group", params={"run": run, "step": 1, "prompt": prompt}).json()
        assert group["images"] == [image_name(image)]
        assert group["messages"] == [{"role": "user", "content": "[image]How many?"}]
        answer = client.get("/api/image", params={"run": run, "name": group["images"][0]})
        assert answer.headers["content-type"] == "image/png"
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), np.asarray(image))
    assert len(list((folder / "images").iterdir())) == 2
    assert client.get("/api/export", params={"run": run}).text.count('"data:image/png;base64') == 2


def test_only_png_files_of_the_folder_of_images_are_served(page):
    client, images, folder = page
    [run] = client.get("/api/runs").json()

    def status(name):
        return client.get("/api/image", params={"run": run, "name": name}).status_code

    known = image_name(images[0])
    (folder / "images" / "secret.png").write_bytes((folder / known).read_bytes())
    others = ("", "config.json", "images/secret.png", "images/../config.json", f"/{known}", f"images/{'0' * 64}.png")
    assert [status(name) for name in others] == [404] * len(others)
    huge = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (60_000).to_bytes(4, "big") * 2
    for content in (b"<svg onload=alert(1)>", huge):
        (folder / known).write_bytes(content)
        assert status(known) == 400
    (folder / known).unlink()
    (folder / known).symlink_to(folder / "config.json")
    assert status(known) == 400
