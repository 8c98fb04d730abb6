"""Weights over the wire: what arrives is what was sent, or nothing."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import safetensors

from groupax import Engine
from groupax.models.lora import LoRAConfig, adapter_config_dict
from groupax.models.specs import model_specs
from groupax.models.weights.checkpoint import add_adapter
from groupax.models.weights.saving import host_tensors, param_leaves
from groupax.serve.app import Limits, create_app
from groupax.serve.client import RemoteSampler
from groupax.serve.loop import EngineLoop
from groupax.serve.remote import DTYPES, RefusedError, RemoteServer, bytes_of, read_bytes
from tests.serve.test_server import KEY, demo_model, listening, wait_until

LORA = LoRAConfig(r=4, lora_alpha=8, target_modules=("q_proj", "down_proj"))


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
    written = b"".join(bytes_of(tensors, {"version": "7"}))
    assert {name for name, _ in safetensors.deserialize(written)} == tensors.keys()
    metadata, read = read_bytes(np.frombuffer(written, np.uint8))
    assert metadata == {"version": "7"}
    assert read.keys() == tensors.keys()
    for name, tensor in read.items():
        assert tensor.dtype == tensors[name].dtype
        np.testing.assert_array_equal(tensor, tensors[name])
    with pytest.raises(ValueError, match="int64"):
        bytes_of({"x": np.zeros(3, np.int64)}, {})


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"[]", b"{", b"[" * 100_000, b'{"__metadata__": 1}', b'{"x": []}'),
        *(
            json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}).encode()
            for changed in (
                {"dtype": "I64"},
                {"dtype": []},
                {"shape": [3]},
                {"shape": [0]},
                {"data_offsets": [4, 12]},
                {"data_offsets": [1e400, "x"]},
                {"data_offsets": [-(10**30), 8]},
            )
        ),
    ],
    ids=str,
)
def test_bytes_that_are_no_tensors_are_refused(header):
    data = np.frombuffer(len(header).to_bytes(8, "little") + header + bytes(8), np.uint8)
    for each in (data, data[:8], data[:3]):
        with pytest.raises(ValueError, match="not a safetensors file with the dtypes F32"):
            read_bytes(each)


# -- servers


@pytest.fixture(scope="module")
def server():
    """A server in this process."""
    model, tokenizer = demo_model()
    engine = Engine.of(model, tokenizer, chunk_steps=8, kv_bytes=1 << 27)
    loop = EngineLoop(engine, "demo").start()
    with listening(create_app(loop, Limits(api_keys=(KEY,)), model)) as url:
        yield SimpleNamespace(model=model, engine=engine, loop=loop, url=url)
    loop.close()


@pytest.mark.heavy
def test_a_torn_or_late_upload_is_never_used(server):
    remote = RemoteServer(server.url, KEY, 60.0)
    specs = model_specs(server.model.config)
    tensors = host_tensors(specs, param_leaves(specs, perturbed(server.engine.params, 5)))
    path, before = "/groupax/v1/weights", server.engine.params
    state = remote.request("GET", path)["state"]
    metadata = {"version": "9", "replaces": state}
    parts = bytes_of(tensors, metadata)
    with closing(remote.connection()) as connection:
        connection.putrequest("PUT", path)
        connection.putheader("authorization", f"Bearer {KEY}")
        connection.putheader("content-length", str(sum(map(len, parts))))
        connection.endheaders(parts[2])  # and the client is gone
    adapter = adapter_config_dict(add_adapter(server.model, LORA).adapter, server.model.config)
    size = sum(map(len, parts))
    for body, status, code in (
        (bytes_of(tensors, {**metadata, "replaces": "of old"}), 409, "other_weights"),
        (parts[:-1], 400, None),
        ([*parts, bytes(2 * size + (32 << 20))], 413, None),
        (bytes_of({"x": np.zeros(1, np.float32)}, metadata), 400, None),
        (bytes_of({"model.norm.weight": np.zeros(3, np.float32)}, metadata), 400, None),
        (bytes_of(tensors, {**metadata, "version": "-1"}), 400, None),
        (bytes_of(tensors, {"version": "9"}), 400, None),
        (bytes_of(tensors, {**metadata, "adapter": '{"r": 0}'}), 400, None),
        (bytes_of(tensors, {**metadata, "adapter": json.dumps(adapter)}), 400, None),
    ):
        with pytest.raises(RefusedError, match=str(status)) as caught:
            remote.request("PUT", path, body)
        assert caught.value.code == code
        assert server.engine.params is before
    assert remote.request("PUT", path, parts)["version"] == 9
    assert server.engine.version == 9
    for one, other in zip(param_leaves(specs, server.engine.params), param_leaves(specs, before), strict=True):
        assert not np.array_equal(one, other)
    with pytest.raises(RefusedError, match="the server has others"):
        remote.request("PUT", path, parts)


@pytest.mark.heavy
def test_weights_change_between_two_chunks_and_answers_say_so(server):
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


@pytest.mark.heavy
def test_without_a_key_nobody_changes_weights(server):
    app = create_app(server.loop, Limits(), server.model)
    says = "403: weights can be changed only on a server with keys"
    with listening(app) as address, pytest.raises(RefusedError, match=says):
        RemoteServer(address, None, 60.0).request("PUT", "/groupax/v1/weights", [b"x"])
