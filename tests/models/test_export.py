"""Commands for models on disk, and the hub."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

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


class Hub(BaseHTTPRequestHandler):
    """A server with the subset of the hub's HTTP API that an upload needs.

    Files are in `repos` only after their commit.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status, content, **headers):
        payload = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(payload), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(payload)

    def allowed(self):
        if self.headers.get("Authorization") == "Bearer right":
            return True
        self.body()
        self.answer(401, {"error": "Invalid credentials in Authorization header"})
        return False

    def do_GET(self):
        if not self.allowed():
            return
        name = "/".join(self.path.split("/")[3:5]).partition("?")[0]
        if self.path == "/api/whoami-v2":
            self.answer(200, {"name": "me", "auth": {"accessToken": {"role": "write", "displayName": "a token"}}})
        elif self.path.startswith("/api/models/") and name not in self.server.private:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            self.answer(200, {"sha": "0" * 40, "siblings": [], "id": name})

    def do_POST(self):
        if not self.allowed():
            return
        hub, body = self.server, self.body()
        hub.requests.append(self.path)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name.startswith("other/"):
                self.answer(403, {"error": "You don't have the rights"})
                return
            exists = name in hub.private
            # clients before 2.0 say "private"
            hub.private.setdefault(name, asked.get("private") or asked.get("visibility") == "private")
            url = f"http://127.0.0.1:{hub.server_port}/{name}"
            self.answer(409 if exists else 200, {"url": url, "id": name, "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                      "shouldIgnore": False, "oid": None} for f in files]  # fmt: skip
            self.answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self.answer(
                200, {"transfer": "basic", "objects": [self.lfs_object(o) for o in json.loads(body)["objects"]]}
            )
        elif "/commit/" in self.path:
            if hub.refuse_commits:
                self.answer(500, {"error": "the hub is on fire"})
                return
            files = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.blobs[value["oid"]]
            name = "/".join(self.path.split("/")[3:5])
            hub.repos.setdefault(name, {}).update(files)
            commit = {
                "commitUrl": f"http://127.0.0.1:{hub.server_port}/{name}/commit/1",
                "commitOid": "1" * 40,
                "success": True,
            }
            self.answer(200, commit)
        else:
            self.answer(404, {"error": self.path})

    def lfs_object(self, asked):
        known = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.server.blobs:
            return known
        href = f"http://127.0.0.1:{self.server.server_port}/blobs/{asked['oid']}"
        return {**known, "authenticated": True, "actions": {"upload": {"href": href, "header": {}}}}

    def do_PUT(self):
        hub = self.server
        body = self.body()
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        hub.blobs[self.path.rpartition("/")[2]] = body
        hub.num_puts += 1
        self.answer(200, {})


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repos, server.private, server.blobs, server.requests = {}, {}, {}, []
    server.num_puts = 0
    server.refuse_commits = False
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def push(hub, *arguments, token="right"):
    own = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": "/nonexistent",
        "HF_TOKEN": token,
    }
    argv = [sys.executable, "-m", "groupax", "push", *map(str, arguments)]
    return subprocess.run(
        argv, env=os.environ | own, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )


def uploaded(folder):
    """Uploads every file of a model's folder except the manifest."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


@pytest.mark.heavy
def test_push_uploads_every_file_privately(folders, hub):
    folder, _ = folders
    done = push(hub, folder / "adapter", "me/adapter")
    assert done.returncode == 0, done.stderr
    assert re.search(r"adapter is at http://127\.0\.0\.1:\d+/me/adapter", done.stdout)
    assert hub.private == {"me/adapter": True}
    assert hub.repos["me/adapter"] == uploaded(folder / "adapter")
    assert push(hub, folder / "base", "me/base", "--public").returncode == 0
    assert not hub.private["me/base"]
    assert set(hub.repos["me/base"]) == set(uploaded(folder / "base"))


@pytest.mark.heavy
def test_a_wrong_token_and_none(folders, hub):
    folder, _ = folders
    for token, message in (("wrong", "refuses the upload to me/adapter (status 401"), ("", "there is no token")):
        failed = push(hub, folder / "adapter", "me/adapter", token=token)
        assert failed.returncode == 2
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr
    failed = push(hub, folder / "adapter", "other/adapter")
    assert failed.returncode == 2
    assert "refuses the upload to other/adapter (status 403" in failed.stderr
    failed = push(hub, folder / "adapter", "me/mo del")
    assert "is not a valid repository name" in failed.stderr
    assert not hub.repos


@pytest.mark.heavy
def test_an_upload_that_broke_off_goes_on(folders, hub):
    folder, _ = folders
    before = {path.name: path.read_bytes() for path in (folder / "base").iterdir()}
    hub.refuse_commits = True
    failed = push(hub, folder / "base", "me/base")
    assert failed.returncode == 1
    assert "the hub is on fire" in failed.stderr
    assert "the same command resumes" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert {path.name: path.read_bytes() for path in (folder / "base").iterdir()} == before
    assert hub.num_puts == 1
    hub.refuse_commits = False
    assert push(hub, folder / "base", "me/base").returncode == 0
    assert hub.num_puts == 1, "what had arrived is not sent again"
    assert hub.repos["me/base"] == uploaded(folder / "base")


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of the hub's own client
def test_the_trainer_pushes_its_model(tmp_path, hub, monkeypatch):
    """Runs in this process, in which conftest has set the hub offline."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_TOKEN", "right")
    trainer = a_trainer(tmp_path, lora_r=2, max_steps=1)
    assert trainer.push_to_hub("me/trained").endswith("/me/trained")
    assert set(hub.repos["me/trained"]) >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert hub.private["me/trained"] is True
