"""Weights over the wire: what arrives is what was sent, or nothing."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from groupax import Engine
from groupax.models.lora import LoRAConfig, adapter_config_dict
from groupax.models.specs import model_specs
from groupax.models.weights.checkpoint import add_adapter
from groupax.models.weights.saving import host_tensors, param_leaves
from groupax.serve.app import Limits, create_app
from groupax.serve.client import RemoteSampler
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


# -- servers


@pytest.fixture(scope="module")
def server():
    """A server in this process."""
    model, tokenizer = demo_model()
    engine = Engine.of(model, tokenizer, chunk_steps=8, kv_bytes=1 << 27)
    loop = EngineLoop({"demo": engine}).start()
    with listening(create_app(loop, Limits(api_keys=(KEY,)), {"demo": model})) as url:
        yield SimpleNamespace(model=model, engine=engine, loop=loop, url=url)
    loop.close()


@pytest.mark.heavy
def test_a_torn_or_late_upload_is_never_used(server):
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
    app = create_app(server.loop, Limits(), {"demo": server.model})
    says = "403: weights can be changed only on a server with keys"
    with listening(app) as address, pytest.raises(RefusedError, match=says):
        RemoteServer(address, None, 60.0).request("POST", "/groupax/v1/weights", {})
