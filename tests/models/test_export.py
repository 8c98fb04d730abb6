"""Commands for models on disk, and the hub."""

import importlib
import inspect
import json

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from groupax import LoRAConfig, add_adapter, init_model, load_model, save_adapter, save_model
from groupax.cli.main import main
from groupax.core.storage.replacing import MANIFEST
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_memory import LLAMA_8B
from tests.training.test_trainer import a_trainer

from .test_lora import all_logits, leaves, trained_randomly


@pytest.fixture
def folders(tmp_path):
    """Returns the folders of a base and of an adapter with random weights."""
    base = init_model({**TINY, "vocab_size": 13}, seed=0)
    save_model(base, tmp_path / "base", a_tokenizer(eos_token="<eos>"))
    model = trained_randomly(add_adapter(load_model(tmp_path / "base"), LoRAConfig(r=4)))
    save_adapter(model, tmp_path / "adapter", card="---\ntags: []\n---\nhow it was trained")
    return tmp_path, model


def test_inspect_prints_the_notebooks_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["inspect", str(model), "--lora_r", "8", "--lora_target_modules", *seven]) == 0
        out = capsys.readouterr().out
        line = "trainable params: 20,971,520 || all params: 8,051,232,768 || trainable%: 0.2605"
        assert out.splitlines()[-1] == line
        for part in ("8,030,261,248", "16.06 GB", "5.70 GB", "32 query and 8 key/value heads of 128"):
            assert part in out


def test_inspect_an_adapter_and_missing_models(folders, capsys):
    folder, model = folders
    assert main(["inspect", str(folder / "adapter")]) == 0
    trained = sum(x.size for x in leaves(model.adapter.trained))
    assert f"trainable params: {trained:,} ||" in capsys.readouterr().out
    for name, message in (
        ("nowhere", "nor a hub id"),
        (str(folder), "no config.json"),
        ("a/b", "be downloaded from the hub"),
    ):
        assert main(["inspect", name]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.heavy
def test_merge_convert_and_quantize(folders, capsys):
    folder, model = folders
    assert main(["merge", str(folder / "adapter"), str(folder / "merged")]) == 0
    merged = load_model(folder / "merged")
    np.testing.assert_allclose(all_logits(merged), all_logits(model), atol=1e-5)
    card = (folder / "merged" / "README.md").read_text()
    assert "merged into" in card
    assert "how it was trained" in card
    assert str(folder) not in card
    assert (folder / "merged" / "tokenizer.json").is_file()
    assert main(["convert", str(folder / "merged"), str(folder / "half"), "--dtype", "bfloat16"]) == 0
    assert load_model(folder / "half").params["embed"].dtype == "bfloat16"
    assert json.loads((folder / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["quantize", str(folder / "adapter"), str(folder / "nf4"), "--dtype", "float32"]) == 0
    assert np.abs(all_logits(load_model(folder / "nf4")) - all_logits(model)).max() < 0.3
    capsys.readouterr()
    for argv, message in (
        (["merge", str(folder / "base"), str(folder / "x")], "not an adapter; there is nothing to merge"),
        (["convert", str(folder / "adapter"), str(folder / "x")], "use merge"),
        (["push", str(folder), "me/model"], "contains no model"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err
    assert not (folder / "x").exists()


def test_a_model_without_a_tokenizer_is_written_without_one(tmp_path, capsys):
    save_model(init_model({**TINY, "model_type": "qwen2"}), tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert "the model is written without a tokenizer: " in capsys.readouterr().out
    assert not list((tmp_path / "half").glob("*token*"))


# -- the hub


SIGNATURES = {
    call: inspect.signature(getattr(huggingface_hub.HfApi, call)) for call in ("create_repo", "upload_folder")
}


class Hub:
    """What the hub has: the files of repositories, and whether these are private; `status` is that of refused calls.

    Its methods are called as those of the hub's own client.
    """

    def __init__(self):
        self.repos, self.private, self.status = {}, {}, None

    def answer(self, call, *given, **named):
        SIGNATURES[call].bind(None, *given, **named)
        if self.status is not None:
            http = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # of the client's version
            response = http.Response(self.status, request=http.Request("POST", "http://hub"))
            raise errors.HfHubHTTPError("no", response=response, server_message="the hub is on fire")

    def create_repo(self, repo_id, *, private, exist_ok):
        self.answer("create_repo", repo_id, private=private, exist_ok=exist_ok)
        validate_repo_id(repo_id)
        self.private.setdefault(repo_id, private)
        return huggingface_hub.RepoUrl(f"http://hub/{repo_id}", endpoint="http://hub")

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        given = {"folder_path": folder_path, "commit_message": commit_message, "ignore_patterns": ignore_patterns}
        self.answer("upload_folder", repo_id=repo_id, **given)
        names = filter_repo_objects((path.name for path in folder_path.iterdir()), ignore_patterns=ignore_patterns)
        self.repos[repo_id] = {name: (folder_path / name).read_bytes() for name in names}


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda _, *args, **kwargs: hub.create_repo(*args, **kwargs)
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda _, **kwargs: hub.upload_folder(**kwargs))
    monkeypatch.setenv("HF_TOKEN", "right")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nonexistent/token")
    return hub


def uploaded(folder):
    """Returns every file of a model's folder except the manifest, and what a write that broke off left."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def test_push_uploads_every_file_privately(folders, hub, capsys):
    folder, _ = folders
    assert main(["push", str(folder / "adapter"), "me/adapter"]) == 0
    assert "adapter is at http://hub/me/adapter" in capsys.readouterr().out
    assert hub.private == {"me/adapter": True}
    assert hub.repos["me/adapter"] == uploaded(folder / "adapter")
    (left := folder / "base" / ".config.json.partial").write_text("half")
    assert main(["push", str(folder / "base"), "me/base", "--public"]) == 0
    left.unlink()
    assert not hub.private["me/base"]
    assert hub.repos["me/base"] == uploaded(folder / "base")


@pytest.mark.parametrize(
    ("name", "token", "status", "message"),
    [
        ("me/model", "wrong", 401, "refuses the upload to me/model (status 401: the hub is on fire)"),
        ("other/model", "right", 403, "refuses the upload to other/model (status 403"),
        ("me/model", "", None, "there is no token"),
        ("me/mo del", "right", None, "is not a valid repository name"),
        (
            "me/model",
            "right",
            500,
            "interrupted (the hub is on fire). Nothing is lost: the folder is unchanged, and the same command resumes",
        ),
    ],
)
def test_a_failed_upload_says_what_to_do(folders, hub, monkeypatch, capsys, name, token, status, message):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.status, folder = status, folders[0] / "adapter"
    before = uploaded(folder)
    assert main(["push", str(folder), name]) == (1 if status == 500 else 2)
    assert message in (err := capsys.readouterr().err)
    assert "Traceback" not in err
    assert not hub.repos
    if status == 500:
        hub.status = None
        assert main(["push", str(folder), name]) == 0
        assert hub.repos[name] == uploaded(folder) == before


def test_the_trainer_pushes_its_model(tmp_path, hub):
    trainer = a_trainer(tmp_path, lora_r=2, max_steps=1)
    assert trainer.push_to_hub("me/trained").endswith("/me/trained")
    assert set(hub.repos["me/trained"]) >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert hub.private["me/trained"] is True
