"""Rollouts from vLLM: what it is asked, what of its answers counts, and that it has the weights."""

import asyncio
import threading
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax import SamplingParams, load_model
from groupax.core.errors import RewardError, RunError
from groupax.episodes.play import Prompts
from groupax.parallel.preemption import RolloutCancelled
from groupax.rollouts.collector import sample_groups
from groupax.serve import client
from groupax.serve.client import RemoteSampler
from groupax.serve.dialects import WeightsFolder, identify_server
from groupax.serve.remote import RemoteServer
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_trainer import a_trainer, lines_of

from .other_servers import VLLM
from .test_remote_rollouts import saved_model
from .test_server import listening

PARAMS = SamplingParams(n=3, max_tokens=7, top_k=4, temperature=0.5, seed=3, logit_bias={5: -1.0}, stop=("x",))
PATIENCE_S = 10.0  # with a server that fails


# -- what travels


def test_servers_that_take_no_weights_are_refused(tiny_model, tmp_path):
    shared = WeightsFolder(tmp_path, tiny_model, jnp.float32)
    cards = [{"id": "gpt", "object": "model", "owned_by": "somebody"}]

    async def models(_):
        return JSONResponse({"object": "list", "data": cards})

    with listening(Starlette(routes=[Route("/v1/models", models)])) as address:
        server = RemoteServer(address, None, 10.0)
        for owner, model, folder, message in (
            ("somebody", None, shared, "a server of 'somebody', which is not supported; use groupax serve or vLLM"),
            ("vllm", "other", shared, "has no model 'other'; it has gpt"),
            ("vllm", None, None, "is a server of vLLM.*set rollout_correction, e.g. to 'token_truncate'"),
        ):
            cards[0]["owned_by"] = owner
            with pytest.raises(RunError, match=message):
                identify_server(server, model, tiny_model.config, None, folder)
        found = []
        for owner in ("groupax", "vllm"):
            cards[0]["owned_by"] = owner
            found.append(type(identify_server(server, None, tiny_model.config, None, shared)).__name__)
        assert found == ["Groupax", "VLLM"]


# -- servers that do not do it at once


PLAIN = SamplingParams(n=2, max_tokens=1)
ONE = {"text": "", "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}


@dataclass
class Scripted:
    """A server that answers as it is told, and otherwise (200) with completions of one token."""

    address: str
    told: list = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)  # where the answer is nothing
    left: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.0)
    server = Scripted("")

    async def models(_):
        return JSONResponse({"data": [{"id": "tiny", "owned_by": "vllm"}]})

    async def takes(_):
        return JSONResponse({})

    async def complete(request):
        answer = server.told.pop(0) if server.told else 200
        if answer == "nothing":
            server.asked.set()
            while (await request.receive())["type"] != "http.disconnect":
                pass
            server.left.set()
        if answer == "slow":
            await asyncio.sleep(1.0)
        if callable(answer):
            answered = JSONResponse(answer({"choices": [{"index": index, **ONE} for index in range(PLAIN.n)]}))
            answered.body = answered.body.replace(b'"NaN"', b"NaN")
            return Response(answered.body, media_type="application/json")
        if answer != 200:
            return JSONResponse({}, answer if isinstance(answer, int) else 500)
        num = (await request.json())["n"]
        return JSONResponse({"choices": [{"index": index, **ONE} for index in range(num)]})

    routes = [Route(path, takes, methods=["POST"]) for path in ("/collective_rpc", "/reset_prefix_cache")]
    routes += [Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    with listening(Starlette(routes=routes)) as server.address:
        yield server


@pytest.fixture
def sampler_of(tiny_model, tmp_path):
    """Makes a sampler without patience."""
    given = {"shared": WeightsFolder(tmp_path, tiny_model, jnp.float32), "patience_s": 0.0}
    return lambda *addresses, **more: RemoteSampler(
        addresses, tiny_model.config, tiny_model.params, (1,), **given, **more
    )


def sampled(sampler, num_prompts=1):
    sequences = sampler.sequences([np.array([4, 5])] * num_prompts, PLAIN)
    return [sequence.tokens for sequence in sampler.stream(sequences)]


def test_patience_is_with_servers_that_say_nothing(scripted, sampler_of):
    sampler = sampler_of(scripted.address)
    for answers in ([429, 429, 429], [503, 429, 503]):
        scripted.told = answers
        assert sampled(sampler) == [[5]] * PLAIN.n
    scripted.told = [503, 503, 503]
    with pytest.raises(RunError, match=r"no server has sampled for 0 s; the last error is: .*503"):
        sampled(sampler)


def test_the_next_server_samples_what_the_first_cannot(scripted, sampler_of):
    sampler = sampler_of("http://127.0.0.1:1", scripted.address)
    assert [server.url for server in sampler.servers] == ["http://127.0.0.1:1", scripted.address]
    assert sampled(sampler, num_prompts=3) == [[5]] * 3 * PLAIN.n


@pytest.mark.parametrize(("answer", "says"), [(504, "504"), ("slow", "timed out")])
def test_requests_that_take_too_long_name_the_limits(scripted, sampler_of, answer, says):
    scripted.told = [answer] * 9
    expected = f"{says}.*; the 2 completions of a prompt, of up to 1 tokens, took too long: raise rollout_timeout_s"
    with pytest.raises(RunError, match=expected + r", now 0.3 s, and .* \(--request_timeout_s"):
        sampled(sampler_of(scripted.address, timeout_s=0.3))


def without(name):
    return lambda whole: {"choices": [{k: v for k, v in each.items() if k != name} for each in whole["choices"]]}


def with_(**changes):
    return lambda whole: {"choices": [{**each, **changes} for each in whole["choices"]]}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda _: [], "responds without token ids"),
        (lambda whole: {"choices": whole["choices"][1:]}, "responds with 1 completions instead of 2"),
        *((without(name), "responds without token ids") for name in ("token_ids", "logprobs", "text", "finish_reason")),
        *(
            (with_(**changed), "responds without a text and 1 to 1 tokens of the model's vocabulary of 96")
            for changed in (
                {"token_ids": []},
                {"token_ids": [5] * 99, "logprobs": {"token_logprobs": [-1.0] * 99}},
                *({"token_ids": [token]} for token in (10**6, -1, "5")),
                {"text": None},
                *({"logprobs": {"token_logprobs": logps}} for logps in ([], ["NaN"], [None], ["-1"], [True], None)),
            )
        ),
    ],
)
def test_answers_that_cannot_be_right_end_the_run_by_name(scripted, sampler_of, answer, fault):
    scripted.told = [answer]
    with pytest.raises(RunError, match=f"{scripted.address} .*{fault}"):
        sampled(sampler_of(scripted.address))


def test_versions_belong_to_their_process(tiny_model, tmp_path):
    (tmp_path / "left").mkdir()  # by a process that was killed
    one, other = (WeightsFolder(tmp_path, tiny_model, jnp.float32) for _ in range(2))
    folders = [each.save(tiny_model.params, version) for each in (one, other) for version in (1, 2, 3)]
    assert [folder.is_dir() for folder in folders] == 2 * [False, True, True]
    path = one.path
    del one
    assert not path.exists()
    assert folders[-1].is_dir()
    own = WeightsFolder(tmp_path, tiny_model, jnp.float32, is_own=True)
    assert tmp_path / "left" in tmp_path.iterdir()
    own.save(tiny_model.params, 1)
    assert [*tmp_path.iterdir()] == [own.path]


def rollout_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


def test_what_is_given_up_keeps_neither_the_server_nor_the_process(scripted, sampler_of):
    sampler = sampler_of(scripted.address)
    scripted.told = [200, "nothing"]
    stream = sampler.stream(sampler.sequences([np.array([4, 5])] * 2, PLAIN))
    assert next(stream).tokens == [5]
    assert scripted.asked.wait(60)
    stream.close()
    assert scripted.left.wait(60)
    scripted.asked.clear()
    scripted.told = ["nothing"]
    giving_up = threading.Thread(target=lambda: scripted.asked.wait(60) and sampler.cancel())
    giving_up.start()
    with pytest.raises(RolloutCancelled):
        sampled(sampler)
    for thread in (giving_up, *rollout_threads()):
        thread.join(60)
    assert not rollout_threads()
    assert sampled(sampler) == [[5]] * PLAIN.n


def test_a_run_that_fails_gives_up_the_next_rollout(tmp_path, scripted):
    scripted.told = [200, 200, "nothing", "nothing"]

    def fails(completion_ids):
        assert scripted.asked.wait(60)
        raise ValueError("no rewards today")

    settings = {"rollout_correction": "token_truncate", "max_staleness": 1, "prompts_per_step": 2}
    with pytest.raises(RewardError, match="no rewards today"):
        a_trainer(tmp_path, fails, rollout_servers=scripted.address, **settings).train()
    assert scripted.left.wait(60)


# -- servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder):
    return VLLM(folder, a_tokenizer(eos_token="<eos>"))


@pytest.fixture(scope="module")
def address(server):
    with listening(server.app) as address:
        yield address


def sampler_for(folder, address, tmp_path):
    model = load_model(folder)
    shared = WeightsFolder(tmp_path / "weights", model, jnp.float32)
    return RemoteSampler([address], model.config, model.params, (1,), shared=shared, patience_s=PATIENCE_S)


def completions(sampler, params=PARAMS):
    prompts = [np.array([4, 5, 6]), np.array([7, 8])]
    examples = [{"prompt": ""} for _ in prompts]
    groups = sample_groups(sampler, a_tokenizer(eos_token="<eos>"), Prompts(examples, prompts), params, step=1)
    return [row for group in sorted(groups, key=lambda group: group[0].prompt_index) for row in group]


@pytest.mark.drawn(2, "servers")
@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{"max_staleness": 1}, {"lora_r": 4, "lora_alpha": 8.0}], ids=str)
def test_training_goes_on_with_its_tokens_and_it_with_the_policys_weights(tmp_path, folder, server, address, settings):
    stale = settings.get("max_staleness", 0)
    shared = {"rollout_folder": str(tmp_path / "shared")} if stale else {}
    trainer = a_trainer(
        tmp_path, model=str(folder), rollout_servers=address, rollout_correction="token_truncate", **shared, **settings
    )
    trainer.collector.engine.patience_s = PATIENCE_S
    before, asked = server.num_sampled, len(server.seen)
    trainer.train()
    lines = lines_of(tmp_path)
    assert len(lines) == 3
    assert server.num_sampled - before == 3 * 16
    # log-probs under the learner's policy are those of the server: it had these weights, and not the ones before them
    same = [line["rollout/logp_diff_max"] < 1e-3 for line in lines]
    assert same == ([True] * 3 if not stale else [True, False, False])
    reloads = [body for path, body in server.seen[asked:] if path == "/collective_rpc"]
    assert len(reloads) == (2 if stale else 3)
    place, newest = tmp_path / ("shared" if stale else "run/rollout_weights"), trainer.collector.engine.version
    [own] = place.iterdir()
    assert {each.name for each in own.iterdir()} == {f"version-{newest - 1}", f"version-{newest}"}


@pytest.mark.heavy
def test_log_probs_that_are_not_of_the_draws_are_refused(tmp_path, folder, server, address):
    plain = SamplingParams(n=2, max_tokens=6, seed=1)
    sampler = sampler_for(folder, address, tmp_path)
    rows = completions(sampler, plain)
    assert [row.completion_ids.tolist() for row in rows] == [
        row.completion_ids.tolist() for row in completions(sampler_for(folder, address, tmp_path), plain)
    ]  # the same seed
    with pytest.raises(RunError, match=r"returns raw_logprobs.*--logprobs-mode processed_logprobs"):
        completions(sampler)
    server.logprobs_mode = "processed_logprobs"
    assert len(completions(sampler_for(folder, address, tmp_path))) == 6
    server.with_ids = False
    with pytest.raises(RunError, match=r"responds without token ids, log-probs .*'token_ids'"):
        completions(sampler_for(folder, address, tmp_path))
    server.logprobs_mode, server.with_ids = "raw_logprobs", True


@pytest.mark.heavy
def test_servers_that_cannot_reload_are_the_end(tmp_path, folder, address):
    sampler = sampler_for(folder, address, tmp_path)
    sampler._shared.save = lambda *_: tmp_path / "nowhere"  # a folder that it does not see
    with pytest.raises(RunError, match=r"returned 500: .* must see .*nowhere"):
        completions(sampler)
    plain = VLLM(folder, a_tokenizer(eos_token="<eos>"), dev_mode=False)
    says = r"/collective_rpc returned 404.*VLLM_SERVER_DEV_MODE=1"
    with listening(plain.app) as address, pytest.raises(RunError, match=says):
        completions(sampler_for(folder, address, tmp_path))
