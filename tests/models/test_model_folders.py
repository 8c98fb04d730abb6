"""Folders of models that are damaged or hostile are refused with a reason, and written ones never lose a file."""

import ast
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import groupax
from groupax import GRPOConfig, LoRAConfig, add_adapter, init_model, load_model, save_adapter, save_model
from groupax.cli.main import main
from groupax.compat.hf import CausalLM
from groupax.core.storage.model_json import CONFIG, GENERATION
from groupax.core.storage.replacing import MANIFEST, ForeignFilesError, check_destination, replacing_folder
from groupax.data.tokenizer import load_tokenizer
from groupax.models.flops import find_config
from groupax.models.weights.saving import source_folders
from groupax.rewards.model import RewardModel
from groupax.runs.model_card import Trained, derived_card, license_of, run_card
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_trainer import a_trainer

PACKAGE = Path(groupax.__file__).parent
NOT_JSON = "is not valid JSON"
DAMAGED = "is damaged or truncated"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Folders that load: a base, an adapter on it, and the base in 4 bits."""
    folder = tmp_path_factory.mktemp("good")
    base = init_model({**TINY, "vocab_size": 13}, seed=0)
    save_model(base, folder / "base", a_tokenizer(eos_token="<eos>"))
    save_model(base, folder / "nf4", weights="nf4")
    save_adapter(add_adapter(load_model(folder / "base"), LoRAConfig(r=2)), folder / "adapter")
    return folder


def load(folder):
    """Loads a model's folder as every command does."""
    load_tokenizer(load_model(folder).source)


# -- bad folders: each case changes a copy of a good one


def config(name="config.json", **values):
    def change(folder):
        content = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(content | values))

    return change


def raw(name, content):
    def change(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def removed(name, key=None):
    def change(folder):
        if key is None:
            (folder / name).unlink()
        else:
            content = json.loads((folder / name).read_text())
            del content[key]
            (folder / name).write_text(json.dumps(content))

    return change


def tensors(change_of, name="model.safetensors"):
    def change(folder):
        save_file(change_of(load_file(folder / name)), folder / name)

    return change


def header(change_of, name="model.safetensors"):
    """Changes the header of the safetensors file: 8 bytes of length, then JSON, then data."""

    def change(folder):
        data = (folder / name).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        text = json.dumps(change_of(json.loads(data[8 : 8 + length]))).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return change


def with_index(weight_map):
    """Writes two shards; `weight_map` maps the tensors' names to the contents of the index."""

    def change(folder):
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(found)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in halves.items():
            save_file({name: found[name] for name in own}, folder / file)
        whole = {name: file for file, own in halves.items() for name in own}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map(whole)}))

    return change


def copied(name, *others):
    """Writes a file's contents under other names too."""

    def change(folder):
        for other in others:
            shutil.copyfile(folder / name, folder / other)

    return change


def both(*changes):
    def change(folder):
        for each in changes:
            each(folder)

    return change


def rules(**parts):
    """Gives the tokenizer other rules."""
    return config("tokenizer.json", **parts)


def replaced(*patterns):
    """Returns rules of which each replaces a pattern by a thousand "a"."""
    return [{"type": "Replace", "pattern": {"String": each}, "content": "a" * 1000} for each in (*patterns, *"aaa")]


def linked(name, target="/etc/passwd"):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def one_bad(found):
    array = found["model.layers.1.mlp.down_proj.weight"].copy()
    array[-1, -1] = np.nan
    return found | {"model.layers.1.mlp.down_proj.weight": array}


def overlapping(content):
    first, second = (name for name in content if name.endswith("gate_proj.weight"))
    content[second]["data_offsets"] = content[first]["data_offsets"]
    return content


EMBED = "model.embed_tokens.weight"
DEEP = "[" * 100_000 + "]" * 100_000

BAD = {
    # sizes
    "layers: 10**9": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000; it must be a whole number"),
    "layers: 200": (config(num_hidden_layers=200), "lacks 1782 weights"),
    "layers: one too many": (config(num_hidden_layers=3), "lacks 9 weights"),
    "layers: missing": (removed("config.json", "num_hidden_layers"), "lacks num_hidden_layers"),
    "hidden_size: 64.5": (config(hidden_size=64.5), r"hidden_size=64\.5; it must be a whole number"),
    "hidden_size: 10**9": (config(hidden_size=10**9), "has shape"),
    "vocab_size: a number of 5,000 digits": (
        raw("config.json", '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}"),
        NOT_JSON,
    ),
    # numbers
    "eps: -1": (config(rms_norm_eps=-1), "rms_norm_eps=-1; it must be a finite number above 0"),
    "theta: NaN": (config(rope_theta=float("nan")), "rope_theta=nan"),
    "rope: factor 0": (config(rope_scaling={"type": "linear", "factor": 0}), "factor=0; it must be a finite number"),
    "rope: type a list": (config(rope_scaling={"type": ["linear"]}), r"type=\['linear'\]"),
    "rope: text": (config(rope_scaling="linear"), "rope_scaling of config.json is 'linear'; it must be an object"),
    # words
    "model_type: list": (config(model_type=["llama"]), r"\['llama'\] is not supported"),
    "model_type: control characters": (config(model_type="\x1b[2Jllama\u202e"), r"'\\x1b\[2Jllama\\u202e'"),
    "model_type: half a surrogate pair": (raw("config.json", '{"model_type": "\\ud800"}'), r"'\\ud800'"),
    "architectures: 5": (config(architectures=5), "architectures=5; it must be a list"),
    "attention_bias: 1": (config(attention_bias=1), "attention_bias=1; it must be true or false"),
    "quantization_config: list": (config(quantization_config=[1]), "quantization_config="),
    "eos_token_id: text": (config(eos_token_id="x"), "eos_token_id='x'"),
    "generation: temperature": (config("generation_config.json", temperature="hot"), "temperature='hot'"),
    # config.json as a file
    "config: not UTF-8": (raw("config.json", b"\xff\xfe{}"), NOT_JSON),
    "config: a list": (raw("config.json", "[1]"), "must contain a JSON object, it contains a list"),
    "config: deep": (raw("config.json", DEEP), NOT_JSON),
    "config: missing": (removed("config.json"), "no config.json"),
    "config: a link out": (linked("config.json"), "is a link out of the model's folder"),
    # weights
    "weights: missing": (removed("model.safetensors"), "no safetensors weights"),
    "weights: a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "a pickle, which is never loaded",
    ),
    "weights: not safetensors": (raw("model.safetensors", b"\x80\x04" + b"x" * 500), DAMAGED),
    "weights: cut off": (
        lambda folder: os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 9),
        DAMAGED,
    ),
    "weights: overlapping": (header(overlapping), DAMAGED),
    "weights: shape of 10**18": (header(lambda h: h | {EMBED: h[EMBED] | {"shape": [10**18, 32]}}), DAMAGED),
    "weights: dtype unknown": (header(lambda h: h | {EMBED: h[EMBED] | {"dtype": "Q4"}}), DAMAGED),
    "weights: another shape": (tensors(lambda t: t | {EMBED: np.zeros((13, 31), np.float32)}), "has shape"),
    "weights: integers": (tensors(lambda t: t | {EMBED: t[EMBED].astype(np.int32)}), "has dtype I32"),
    "weights: one NaN": (tensors(one_bad), "has 1 numbers of 2,048 that are infinite or NaN"),
    "weights: one unknown": (tensors(lambda t: t | {"x\x1b[2J": np.zeros(1, np.float32)}), r"'x\\x1b\[2J'"),
    "weights: a loop of links": (linked("model.safetensors", "model.safetensors"), "has no safetensors weights"),
    "weights: a link out": (linked("model.safetensors"), "is a link out of the model's folder"),
    # the index of several files
    "index: ..": (
        with_index(lambda m: dict.fromkeys(m, "../../../../etc/passwd")),
        "names '../../../../etc/passwd', which is not a safetensors file in its folder",
    ),
    "index: a missing file": (with_index(lambda m: m | {"x": "c.safetensors"}), r"names c\.safetensors, which is mis"),
    "index: map a list": (raw("model.safetensors.index.json", '{"weight_map": ["a"]}'), r"weight_map=\['a'\]"),
    "two sets: a file and shards": (
        both(copied("model.safetensors", "kept"), with_index(lambda m: m), copied("kept", "model.safetensors")),
        "two sets of weights, model.safetensors and the shards of",
    ),
    "shards without an index": (
        both(copied("model.safetensors", "model-00001-of-00002.safetensors"), removed("model.safetensors")),
        "model-00001-of-00002.safetensors without model.safetensors.index.json",
    ),
    # tokenizers
    "tokenizer: replaces a by 10**12": (
        rules(normalizer={"type": "Sequence", "normalizers": replaced("a")}),
        r"fails with a text of .* characters, for which the process that runs it ended with status -6",
    ),
    "tokenizer: decodes to 10**12": (
        rules(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, *replaced("a")]}),
        "the process that runs it ended with status -6",
    ),
    "tokenizer: adds 10**9 tokens": (
        rules(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "b", "type_id": 0}}] * 30_000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"b": {"id": "b", "ids": [1] * 30_000, "tokens": ["b"] * 30_000}},
            }
        ),
        "the process that runs it ended with status -6",
    ),
    "tokenizer: an expression without an end": (
        rules(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
        "for which PanicException: Onig: Regex search error: retry-limit-in-match over",
    ),
    "tokenizer: a number for a model": (config("tokenizer.json", model=3), "no tokenizer that transformers can load"),
    "tokenizer: missing": (removed("tokenizer.json"), "it has none of tokenizer.json"),
    "tokenizer: card a link out": (linked("README.md"), "is a link out of the model's folder"),
    "tokenizer config: files elsewhere": (
        config("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.0.json"]),
        "not one of its files",
    ),
    "chat template: a link out": (linked("chat_template.jinja"), "is a link out of the model's folder"),
}

BAD_ADAPTER = {
    "a whole model too": (copied("adapter_model.safetensors", "model.safetensors"), "an adapter .* and a whole model"),
    "base: missing": (removed("adapter_config.json", "base_model_name_or_path"), "does not name the adapter's base"),
    "base: nowhere": (config("adapter_config.json", base_model_name_or_path="/nowhere"), "neither a model folder"),
    "rank: text": (config("adapter_config.json", r="2"), "r must be a whole number, got '2'"),
    "rank: 10**9": (config("adapter_config.json", r=10**9), "has shape"),
    "alpha: NaN": (config("adapter_config.json", lora_alpha=float("nan")), "lora_alpha must be .*, got nan"),
    "targets: no expression": (config("adapter_config.json", target_modules="("), "as a regular expression"),
    "weights: missing": (removed("adapter_model.safetensors"), "pickled adapters are never loaded"),
    "weights: NaN": (
        tensors(lambda t: {k: np.full_like(v, np.nan) for k, v in t.items()}, "adapter_model.safetensors"),
        "infinite or NaN",
    ),
}

QUANTIZED = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{QUANTIZED}.quant_state.bitsandbytes__nf4"
BAD_NF4 = {
    "codes cut off": (
        tensors(lambda t: t | {QUANTIZED: t[QUANTIZED][:-1]}),
        r"numbers of uint8; a weight of this shape has",
    ),
    "codes as 8-bit floats": (
        header(lambda h: h | {QUANTIZED: h[QUANTIZED] | {"dtype": "F8_E4M3"}}),
        "has a dtype other than U8 and F32",
    ),
    "scales lack": (
        tensors(lambda t: {k: v for k, v in t.items() if k != f"{QUANTIZED}.nested_absmax"}),
        "is not a 4-bit weight",
    ),
    "scales NaN": (
        tensors(lambda t: t | {f"{QUANTIZED}.nested_absmax": t[f"{QUANTIZED}.nested_absmax"] * np.nan}),
        "scales that are not finite",
    ),
    "state no JSON": (tensors(lambda t: t | {STATE: np.frombuffer(b"\xff{", np.uint8)}), "is not a 4-bit weight"),
}


TABLES = {"base": BAD, "adapter": BAD_ADAPTER, "nf4": BAD_NF4}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table])
def test_a_bad_folder_is_refused_with_the_reason(good, tmp_path, kind, name, recwarn):
    change, message = TABLES[kind][name]
    folder = shutil.copytree(good / kind, tmp_path / "model")
    change(folder)
    with pytest.raises(ValueError, match=message) as refusal:
        load(folder)
    if kind == "base":
        assert str(folder) in str(refusal.value)
    assert len(str(refusal.value)) < 1500
    assert str(refusal.value).isprintable() or "\n" in str(refusal.value)


def test_a_reward_model_refuses_tokens_that_it_does_not_have(good):
    scorer = init_model({**TINY, "vocab_size": 5, "architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(ValueError, match="has a vocabulary of 5 tokens, and its tokenizer gives token 7"):
        RewardModel(scorer, load_tokenizer(good / "base")).scores([np.array([1, 7])])


def test_an_adapter_on_itself_is_refused(good, tmp_path):
    folder = shutil.copytree(good / "adapter", tmp_path / "model")
    config("adapter_config.json", base_model_name_or_path=str(folder))(folder)
    for read in (load_model, lambda path: find_config(str(path))):
        with pytest.raises(ValueError, match="is an adapter too; merge it first"):
            read(folder)


def test_odd_folders_that_load(good, tmp_path, caplog):
    """Values of released folders."""
    folder = shutil.copytree(good / "base", tmp_path / "model")
    config(mlp_bias=None, rope_scaling=None, rope_theta=10000, head_dim=None, auto_map={"AutoConfig": "x.X"})(folder)
    config("generation_config.json", eos_token_id=[1, 10**9], temperature=0)(folder)
    (folder / "tokenizer.json").rename(folder / "other.json")
    (folder / "tokenizer.json").symlink_to("other.json")
    copied("model.safetensors", "model-00002-of-00003.safetensors", "pytorch_model.bin")(folder)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "has the shards model-00002-of-00003.safetensors, which are not of its model" in caplog.text


def test_a_folder_of_the_hubs_cache_may_have_links(good, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    shutil.copytree(good / "base", tmp_path / "models--a--b" / "blobs")
    for file in (tmp_path / "models--a--b" / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    load(snapshot)


def test_every_key_that_a_family_reads_has_its_kind():
    """Every key that a reader looks up is in the schema `CONFIG`, except those that `require` compares with a value."""
    read = set()
    for file in (PACKAGE / "models" / "families").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == "get" and getattr(node.func.value, "id", "") == "hf":
                read |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
            elif called == "needed":
                read |= {each.value for each in node.args[1:] if isinstance(each, ast.Constant)}
            elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "hf":
                read |= {each.value for each in [node.slice] if isinstance(each, ast.Constant)}
    assert len(read) > 30
    assert read <= CONFIG.keys()
    assert {"eos_token_id", "temperature"} <= GENERATION.keys()


# -- code of a folder never runs


def test_every_call_that_could_run_code_of_a_folder_forbids_it():
    for file in (*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None))
            own = name == "from_pretrained" and getattr(node.func.value, "id", "") == "AutoEasyDeLModelForCausalLM"
            if name == "from_pretrained" and not own:
                flags = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert flags.get("trust_remote_code") == "False", f"{file}:{node.lineno}"
            if name in ("load", "loads") and getattr(getattr(node.func, "value", None), "id", "") in ("torch", "np"):
                assert not node.keywords, f"{file}:{node.lineno}"


def test_a_folder_with_code_is_refused_at_once(good, tmp_path):
    folder = shutil.copytree(good / "base", tmp_path / "model")
    pwned = tmp_path / "pwned"
    (folder / "evil.py").write_text(
        f"open({str(pwned)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    for name in ("tokenizer_config.json", "config.json"):
        changed = shutil.copytree(folder, tmp_path / name)
        config(name, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil")(changed)
        (changed / "tokenizer_config.json").write_text("{}") if name == "config.json" else None
        started_s = time.perf_counter()
        with pytest.raises(ValueError, match="never runs"):
            load(changed)
        assert time.perf_counter() - started_s < 5, "it waits for no answer"
    assert not pwned.exists()


def test_a_vocabulary_larger_than_the_models_is_refused_where_it_is_used(good, tmp_path):
    small = init_model({**TINY, "vocab_size": 5}, seed=0)
    with pytest.raises(ValueError, match="vocabulary has 5 tokens: is this its tokenizer"):
        a_trainer(tmp_path, model=small, max_steps=1)


# -- writing


def project(folder):
    """Fills a folder that groupax did not write with files that must not be lost."""
    for name in (".git/HEAD", ".git/objects/ab/cd", "checkpoint-500/model.safetensors", "thesis.tex", "config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"my {name}")
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def writers(good):
    """Returns the functions that write a model to a folder, by name."""
    model, adapted = load_model(good / "base"), load_model(good / "adapter")
    return {
        "convert": lambda folder: main(["convert", str(good / "base"), str(folder)]),
        "quantize": lambda folder: main(["quantize", str(good / "base"), str(folder)]),
        "merge": lambda folder: main(["merge", str(good / "adapter"), str(folder)]),
        "save_model": lambda folder: save_model(model, folder),
        "save_adapter": lambda folder: save_adapter(adapted, folder),
        "compat": lambda folder: CausalLM(model).save_pretrained(folder),
    }


def refused(write, folder, capsys):
    try:
        status = write(folder)
    except ValueError as error:
        return str(error)
    assert status == 2, "refused by the command"
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["convert", "quantize", "merge", "save_model", "save_adapter", "compat"])
def test_nothing_that_groupax_did_not_write_is_lost(good, tmp_path, name, capsys):
    write = writers(good)[name]
    folder = project(tmp_path / "project")
    before = contents(folder)
    if name == "save_adapter":  # all commands refuse the same folders
        (tmp_path / "file").write_text("mine")
        assert "is a file" in refused(write, tmp_path / "file", capsys)
    assert "that groupax did not write" in refused(write, folder, capsys)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["project"], "nothing is left behind"


def test_an_edited_card_is_kept_and_other_files_in_a_written_model_are_refused_or_kept(good, tmp_path, capsys):
    folder, write = tmp_path / "model", writers(good)
    save_model(load_model(good / "nf4"), folder, card="as written")
    (folder / "README.md").write_text("my own words")
    write["save_adapter"](folder)
    assert (folder / "README.md").read_text() == "my own words"
    assert not (folder / "config.json").exists(), "files of the model that was there are gone"
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("mine")
    assert "sub/notes.txt came from elsewhere" in refused(write["convert"], folder, capsys)
    write["compat"](folder)  # as transformers does
    assert (folder / "sub" / "notes.txt").read_text() == "mine"
    assert load_model(folder).adapter is None
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_of_a_model_that_changed_or_came_from_elsewhere_are_not_replaced(good, tmp_path):
    model = load_model(good / "base")
    for name, text in (("config.json", "{}"), ("model-00001-of-00002.safetensors", "x"), ("tokenizer.json", "mine")):
        folder = save_model(model, tmp_path / name)
        (folder / name).write_text(text)
        before = contents(folder)
        with pytest.raises(ForeignFilesError, match="came from elsewhere or changed since"):
            save_model(model, folder)
        assert contents(folder) == before
    folder = save_model(model, tmp_path / "manifest")
    (folder / MANIFEST).write_text('{"files": {"../thesis": "1", "/etc/passwd": "2"}}')
    with pytest.raises(ForeignFilesError, match=r"config\.json"):
        save_model(model, folder)


def test_a_model_is_never_written_over_its_own_source(good, tmp_path, capsys, monkeypatch):
    base, adapter = (shutil.copytree(good / name, tmp_path / name) for name in ("base", "adapter"))
    config("adapter_config.json", base_model_name_or_path=str(base))(adapter)
    (tmp_path / "link").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    for folder in (base, "./base/../base", tmp_path / "link", "link/half", base / "half", "."):
        for command in ("convert", "quantize"):
            assert "its own source" in refused(lambda to, c=command: main([c, "base", str(to)]), folder, capsys)
        for save in (lambda to: save_model(load_model("base"), to), CausalLM(load_model(base)).save_pretrained):
            with pytest.raises(ValueError, match="its own source"):
                save(folder)
    for folder in (base, adapter, adapter / "merged"):
        assert "its own source" in refused(lambda to: main(["merge", str(adapter), str(to)]), folder, capsys)
        with pytest.raises(ValueError, match="its own source"):
            save_adapter(load_model(adapter), folder)
    assert contents(tmp_path) == before


def test_the_working_folder_is_not_replaced(good, tmp_path, monkeypatch):
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "inner")
    for folder in (".", "", tmp_path / "empty"):
        with pytest.raises(ValueError, match="working directory"):
            save_model(load_model(good / "base"), folder)
    with pytest.raises(ValueError, match="null character"):
        save_model(load_model(good / "base"), "a\0b")


def test_a_run_refuses_a_foreign_model_folder_before_training(tmp_path):
    folder = project(tmp_path / "run" / "model")
    before = contents(folder)
    with pytest.raises(ForeignFilesError, match="that groupax did not write"):
        a_trainer(tmp_path, max_steps=1).train()
    assert contents(folder) == before
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


WRITES_FOR_EVER = """
import sys
from pathlib import Path
from groupax.core.storage.replacing import replacing_folder
for number in range(10**6):
    with replacing_folder(Path(sys.argv[1])) as partial:
        for name in ("config.json", "model.safetensors"):
            (partial / name).write_text(str(number) * 1000)
    print(number, flush=True)
"""


def test_a_kill_leaves_the_old_model_or_the_new_one(tmp_path):
    folder = tmp_path / "model"
    with replacing_folder(folder) as partial:
        for name in ("config.json", "model.safetensors"):
            (partial / name).write_text("x")
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITES_FOR_EVER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        process.stdout.readline()
        time.sleep(0.0007 * attempt)
        process.kill()
        process.wait()
        process.stdout.close()
        assert (folder / "config.json").read_text() == (folder / "model.safetensors").read_text()
        check_destination(folder)
        leftovers = [path.name for path in tmp_path.iterdir() if path != folder]
        assert all(name.startswith(".model.partial-") for name in leftovers), "which the documents name"


def test_folders_are_exchanged_without_help_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr("groupax.core.storage.replacing.ctypes.CDLL", lambda _: object())
    for number in range(3):
        with replacing_folder(tmp_path / "model") as partial:
            (partial / "config.json").write_text(str(number))
    assert (tmp_path / "model" / "config.json").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# -- cards


@pytest.mark.heavy
@pytest.mark.parametrize("name", [pytest.param("base", marks=pytest.mark.long), "adapter"])
def test_the_usage_in_a_card_runs(good, tmp_path, name):
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    folder = tmp_path / "model"
    text = run_card(Trained(GRPOConfig(), "b", {"r": 2} if name == "adapter" else None, "d", ["f"], 1, {}))
    shutil.copytree(good / name, folder)
    for file in (good / "base").glob("tokenizer*"):
        shutil.copy(file, folder)
    usage = text.split("```python\n")[1].split("```")[0].replace('"..."', '"a b"')
    done = subprocess.run(
        [sys.executable, "-c", usage], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "XLA_FLAGS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


EVIL = 'x`</code>\n---\nlicense: evil\n| <script>alert(1)</script> | \x1b[2J\u202e [a](http://b) "quoted"\''


def test_names_in_a_card_are_neither_markup_nor_metadata():
    args = replace(GRPOConfig(), seed=1)
    card = run_card(Trained(args, EVIL, None, EVIL, [EVIL], 1, {"reward": 1.0}, of_episodes={"tools": EVIL}))
    assert "| `tools` | `x" in card
    assert "license" not in yaml.safe_load(card.split("---\n")[1])
    assert "base_model" not in card.split("---\n")[1]
    assert "\x1b" not in card
    assert "\u202e" not in card
    for line in card.splitlines():
        assert line.count("`") % 2 == 0 or line.startswith("```")
        outside = "".join(line.split("`")[::2])
        assert "script" not in outside
        assert "http://b" not in outside
    table = [line for line in card.splitlines() if line.startswith("| `")]
    assert {line.count("|") for line in table} == {3}
    front = yaml.safe_load(run_card(Trained(args, "owner/name", {"r": 2}, "d", ["f"], 1, {})).split("---\n")[1])
    assert (front["base_model"], front["library_name"]) == ("owner/name", "peft")


def test_a_derived_card_takes_the_licence_of_its_source():
    card = derived_card("How.", "owner/name", "---\nlicense: apache-2.0\ntags: [x]\n---\nIts words")
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["license"], front["base_model"]) == ("apache-2.0", "owner/name")
    assert "Its words" in card
    for text in ("---\nlicense: [1]\n---\n", "---\n{\n---\n", "---\nlicense: 'a\n  b'\n---\n", "license: mit", None):
        assert license_of(text) is None


def test_the_sources_of_a_model_are_known(good):
    assert set(source_folders(load_model(good / "adapter"))) == {good / "adapter", good / "base"}
    assert source_folders(init_model(TINY, dtype=jnp.float32)) == []
