"""Weights over the wire: what arrives is what was sent, or nothing; completions from servers are those made here."""

import json
import threading
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax import Engine, SamplingParams
from groupax.episodes.play import play_episodes
from groupax.errors import RunError
from groupax.models.adapted import apply_adapter
from groupax.models.lora import LoRAConfig, adapter_config_dict, adapter_specs
from groupax.models.specs import model_specs
from groupax.models.weights.checkpoint import add_adapter
from groupax.models.weights.saving import host_tensors, param_leaves, replace_tensors, trained_params
from groupax.serve.app import Limits, create_app
from groupax.serve.client import RemoteSampler
from groupax.serve.dialects import Groupax
from groupax.serve.loop import EngineLoop
from groupax.serve.remote import (
    DTYPES,
    RefusedError,
    RemoteServer,
    bytes_of,
    manifest_of,
    read_manifest,
    tensors_in,
)
from tests.serve.test_server import KEY, demo_model, listening, wait_until

LORA = LoRAConfig(r=4, lora_alpha=8, target_modules=("q_proj", "down_proj"))
PARAMS = SamplingParams(n=3, max_tokens=24, seed=3, temperature=0.9, top_k=30, stop=("</think>",))


def perturbed(params, seed):
    """Weights that are a little different."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + (0.02 * rng.standard_normal(x.shape)).astype(x.dtype), params)


# -- what travels


def test_tensors_survive_as_bytes():
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "b": (1,), "c": (17,)}
    tensors = {
        name: rng.standard_normal(shape).astype(dtype)
        for (name, shape), dtype in zip(shapes.items(), DTYPES.values(), strict=True)
    }
    places = read_manifest(json.loads(json.dumps(manifest_of(tensors))))
    data = np.frombuffer(b"".join(bytes_of(tensors)), np.uint8)
    for name, tensor in tensors_in(data, places).items():
        assert tensor.dtype == tensors[name].dtype
        np.testing.assert_array_equal(tensor, tensors[name])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "dtype must be one of"),
        ({"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}, "dtype must be one of"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "shape must be a list"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape must be a list"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, r"data_offsets must be \[0, 8\]"),
    ],
)
def test_manifests_that_are_none_are_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        read_manifest({"x": entry})
    with pytest.raises(ValueError, match="at least one"):
        read_manifest([])
    with pytest.raises(ValueError, match="int64"):
        manifest_of({"x": np.zeros(3, np.int64)})


def test_weights_become_tensors_and_weights_again(tiny_model):
    specs, others = model_specs(tiny_model.config), perturbed(tiny_model.params, 1)
    tensors = host_tensors(specs, param_leaves(specs, others))
    for one, other in zip(
        jax.tree.leaves(replace_tensors(specs, tiny_model.params, tensors)), jax.tree.leaves(others), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    name = next(iter(tensors))
    changed = replace_tensors(specs, tiny_model.params, {name: tensors[name]})
    same = [a is b for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(tiny_model.params), strict=True)]
    assert same.count(False) == 1


def test_an_adapters_part_of_the_weights_is_found(tiny_model):
    adapted = add_adapter(tiny_model, replace(LORA, modules_to_save=("norm",)))
    specs = adapter_specs(tiny_model.config, adapted.adapter.config)
    part = trained_params(specs, adapted.params)
    assert jax.tree.structure(part) == jax.tree.structure(adapted.adapter.trained)
    again = apply_adapter(adapted.adapter.frozen, part)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(adapted.params), strict=True))


# -- servers


class Running:
    """A server in this process that can be stopped and started again at its address."""

    def __init__(self, port=0):
        self.model, tokenizer = demo_model()
        self.engine = Engine.of(self.model, tokenizer, chunk_steps=8, kv_bytes=1 << 27)
        self.loop = EngineLoop({"demo": self.engine}).start()
        app = create_app(self.loop, Limits(api_keys=(KEY,)), {"demo": self.model})
        self._context = listening(app, port)
        self.url = self._context.__enter__()

    def stop(self):
        self._context.__exit__(None, None, None)
        self.loop.close()


@pytest.fixture(scope="module")
def servers():
    running = [Running(), Running()]
    yield running
    for each in running:
        each.stop()


def groups_of(sampler, tokenizer, prompts, params=PARAMS, step=2):
    groups = play_episodes(sampler, tokenizer, [{"prompt": ""} for _ in prompts], prompts, params, step)
    return sorted(groups, key=lambda group: group[0].prompt_index)


def assert_same(groups, expected):
    for group, others in zip(groups, expected, strict=True):
        for row, other in zip(group, others, strict=True):
            np.testing.assert_array_equal(row.completion_ids, other.completion_ids)
            for name in ("policy_logps", "sampler_logps"):  # which the server computes beside other rows
                np.testing.assert_allclose(getattr(row, name), getattr(other, name), atol=1e-4, rtol=0)
            assert (row.finish_reason, row.text) == (other.finish_reason, other.text)


@pytest.fixture(scope="module")
def local():
    """An engine of this process, and prompts."""
    model, tokenizer = demo_model()
    engine = Engine.of(model, tokenizer, chunk_steps=8, kv_bytes=1 << 27)
    return engine, engine.encode([f"{number}*(7+{number})=" for number in range(12, 17)])


@pytest.mark.heavy
def test_servers_sample_what_the_engine_here_would(servers, local):
    engine, prompts = local
    sampler = RemoteSampler([each.url for each in servers], engine.config, engine.params, engine.eos_ids, api_key=KEY)
    for seed in (1, 2):
        sampler.params = engine.params = perturbed(engine.params, seed)
        assert_same(groups_of(sampler, engine.tokenizer, prompts), groups_of(engine, engine.tokenizer, prompts))
    assert [each.engine.version for each in servers] == [sampler.version] * 2
    keyless = RemoteSampler([servers[0].url], engine.config, engine.params, engine.eos_ids)
    with pytest.raises(RunError, match="the API key is missing or wrong"):
        groups_of(keyless, engine.tokenizer, prompts)


@pytest.mark.heavy
def test_of_an_adapter_only_the_changes_travel(local, monkeypatch):
    engine, prompts = local
    server, (model, _) = Running(), demo_model()
    sent = []
    real = Groupax.upload
    monkeypatch.setattr(Groupax, "upload", lambda self, *args: (sent.append(sorted(args[-1])), real(self, *args))[1])
    try:
        adapted = add_adapter(model, LORA)
        trained = perturbed(adapted.adapter.trained, 1)
        sampler = RemoteSampler(
            [server.url], model.config, apply_adapter(adapted.adapter.frozen, trained), engine.eos_ids, adapted.adapter,
            api_key=KEY,
        )  # fmt: skip
        engine = Engine.of(adapted, engine.tokenizer, chunk_steps=8, kv_bytes=1 << 27)
        engine.params = sampler.params
        assert_same(groups_of(sampler, engine.tokenizer, prompts), groups_of(engine, engine.tokenizer, prompts))
        one_layer = perturbed(trained["layers"][0], 2)
        trained = {**trained, "layers": [one_layer, *trained["layers"][1:]]}
        sampler.params = engine.params = apply_adapter(adapted.adapter.frozen, trained)
        assert_same(groups_of(sampler, engine.tokenizer, prompts), groups_of(engine, engine.tokenizer, prompts))
        assert len(sent[0]) == len(jax.tree.leaves(trained))
        assert len(sent[1]) == len(jax.tree.leaves(one_layer))
        assert all(".layers.0." in name for name in sent[1])
    finally:
        server.stop()


@pytest.mark.heavy
def test_a_torn_or_late_upload_is_never_used(servers):
    server = servers[0]
    remote = RemoteServer(server.url, KEY, 60.0)
    specs = model_specs(server.model.config)
    tensors = host_tensors(specs, param_leaves(specs, perturbed(server.engine.params, 5)))
    path = "/groupax/v1/weights"
    before = server.engine.params

    def begin(**changed):
        held = remote.request("GET", path)["models"][0]
        manifest = {"model": "demo", "version": 9, "replaces": held["state"], "tensors": manifest_of(tensors)}
        return f"{path}/" + remote.request("POST", path, {**manifest, **changed})["upload"]

    def refused(code, *request):
        with pytest.raises(RefusedError) as caught:
            remote.request(*request)
        assert caught.value.code == code
        assert server.engine.params is before

    parts = bytes_of(tensors)
    refused("torn", "PUT", begin(), parts[:-1])
    refused("torn", "PUT", begin(), [*parts, b"x"])
    upload = begin()
    with closing(remote.connection()) as connection:
        connection.putrequest("PUT", upload)
        connection.putheader("authorization", f"Bearer {KEY}")
        connection.putheader("content-length", str(sum(map(len, parts))))
        connection.endheaders(parts[0])  # and the client is gone
    refused("upload_not_found", "PUT", upload, parts)
    upload = begin()
    begin()
    refused("upload_not_found", "PUT", upload, parts)  # another one was begun
    for changed, code in (
        ({"replaces": "of old"}, "other_weights"),
        ({"model": "x"}, "model_not_found"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}, None),
        ({"tensors": manifest_of({"model.norm.weight": np.zeros(3, np.float32)})}, None),
        ({"version": -1}, None),
        ({"adapter": {"r": 0}}, None),
        ({"adapter": adapter_config_dict(add_adapter(server.model, LORA).adapter, server.model.config)}, None),
        ({"nonsense": 1}, None),
    ):
        with pytest.raises(RefusedError) as caught:
            begin(**changed)
        assert caught.value.code == code
    early = begin()
    assert remote.request("PUT", early, parts)["version"] == 9
    assert server.engine.version == 9
    for one, other in zip(param_leaves(specs, server.engine.params), param_leaves(specs, before), strict=True):
        assert not np.array_equal(one, other)
    before = server.engine.params
    refused("upload_not_found", "PUT", early, parts)


@pytest.mark.heavy
def test_weights_change_between_two_chunks_and_answers_say_so(servers):
    server = servers[1]
    sampler = RemoteSampler(
        [server.url], server.model.config, perturbed(server.engine.params, 8), server.engine.eos_ids, api_key=KEY
    )
    sampler.version = 70
    remote = RemoteServer(server.url, KEY, 60.0)
    request = {"prompt": "1+1=", "n": 2, "max_tokens": 400, "ignore_eos": True, "seed": 1}
    answers = []
    asking = threading.Thread(target=lambda: answers.append(remote.request("POST", "/v1/completions", request)))
    asking.start()
    wait_until(lambda: server.loop.counts.num_running == 2)
    old = server.engine.version
    sampler.push(sampler.servers[0])
    asking.join()
    for choice in answers[0]["choices"]:
        (first, num_first), (second, num_second) = choice["weight_versions"]
        assert (first, second) == (old, 70)
        assert 0 < num_first < 400
        assert num_first + num_second == 400


@pytest.mark.long
def test_a_server_that_dies_and_comes_back_is_not_missed(local):
    engine, prompts = local
    first, second = Running(), Running()
    port = int(first.url.rpartition(":")[2])
    try:
        sampler = RemoteSampler(
            [first.url, second.url], engine.config, perturbed(engine.params, 4), engine.eos_ids, api_key=KEY
        )
        engine.params = sampler.params
        expected = groups_of(engine, engine.tokenizer, prompts)
        assert_same(groups_of(sampler, engine.tokenizer, prompts), expected)
        first.stop()
        assert_same(groups_of(sampler, engine.tokenizer, prompts), expected)
        first = Running(port)  # with the weights of its files
        second.stop()
        assert_same(groups_of(sampler, engine.tokenizer, prompts), expected)
        first.stop()
        sampler.patience_s = 0.3
        with pytest.raises(RunError, match=r"no server has sampled for 0 s.*Connection refused"):
            groups_of(sampler, engine.tokenizer, prompts)
    finally:
        for each in (first, second):
            each.stop()


@pytest.mark.heavy
def test_without_a_key_nobody_changes_weights(servers):
    app = create_app(servers[0].loop, Limits(), {"demo": servers[0].model})
    says = "403: weights can be changed only on a server with keys"
    with listening(app) as address, pytest.raises(RefusedError, match=says):
        RemoteServer(address, None, 60.0).request("POST", "/groupax/v1/weights", {})


def test_addresses_are_checked():
    for url in ("localhost:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="must be given as http://host:port"):
            RemoteServer(url, None, 1.0)
