"""Samples completions on servers instead of an engine in this process. Needs no server packages.

params = newest weights            each server receives them before it samples (`serve.weights`)
stream ──► a request per prompt ──► server 0, 1, ... ──► sequences, the completions of a prompt together
                  └────── if one server cannot run it now, the next one is tried
"""

import http.client
import math
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import numpy as np

from groupax.engine.engine import new_sequences
from groupax.engine.sequence import Sequence as Completion
from groupax.errors import RunError
from groupax.models.config import ModelConfig
from groupax.models.lora import Adapter, adapter_config_dict, adapter_specs
from groupax.models.specs import Params, model_specs
from groupax.models.weights.saving import host_tensors, param_leaves, specs_by_name, trained_params
from groupax.parallel.preemption import RolloutCancelled
from groupax.serve.protocol import PIECE_BYTES, manifest_of, pieces_of
from groupax.serve.remote import RefusedError, RemoteServer, reading
from groupax.serve.vllm_sglang import ForeignServer, RemoteCompletion, WeightsFolder, identify_server
from groupax.settings.sampling import SamplingParams
from groupax.types import FinishReason

MAX_REQUESTS = 64  # simultaneous
NUM_SENDERS = 2  # threads that send pieces: one computes checksums while the server receives the other's
PIECE_ATTEMPTS = 4
RETRIED = (429, 500, 502, 503, 504)  # statuses after which the request is repeated, here or on another server
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
LONGEST_STEP_S = 0.05  # of waiting for a request, after which a session's user may submit others


class RemoteSampler:
    """Samples completions on servers with the current weights: a `engine.sampler.PolicySampler`.

    The same seed gives the completions of an `Engine` in this process, independent of which server samples which.
    Other programs' servers have their own arithmetic and randomness (see `serve.vllm_sglang`).

    Args:
        urls: Addresses of `groupax serve`s with the model, each with a key; or of vLLM or SGLang.
        config: The model's architecture.
        params: The weights; set them before each rollout. Servers receive what has changed before they sample.
        eos_ids: Tokens that end every completion.
        adapter: The adapter, if `params` contain one: only it is sent, and the servers must have its base.
        shared: Folder from which other programs' servers load weights; None refuses such servers.
        model: Name of the model on the servers; None takes their first.
        api_key: Key of all servers.
        timeout_s: Longest time for a request, which samples all completions of a prompt.
        patience_s: Time for which to retry while no server responds, as during a restart; a full server does respond.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: ModelConfig,
        params: Params,
        eos_ids: tuple[int, ...],
        adapter: Adapter | None = None,
        shared: WeightsFolder | None = None,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 300.0,
    ) -> None:
        if not urls:
            raise ValueError("urls is empty; give the address of at least one server")
        self.config, self.eos_ids, self.model = config, eos_ids, model
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.servers = [RemoteServer(url, api_key, timeout_s) for url in urls]
        self._shared = shared
        self._foreign: dict[RemoteServer, ForeignServer | None] = {}  # None for servers of groupax
        self._settings = None if adapter is None else adapter_config_dict(adapter, config)
        self._specs = model_specs(config) if adapter is None else adapter_specs(config, adapter.config)
        self.begun: set[_RolloutRequests] = set()
        self.version = 0
        self._params: Params | None = None
        self.params = params

    @property
    def params(self) -> Params:
        """The weights that completions are sampled from."""
        assert self._params is not None, "set by __init__"
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if params is not self._params:
            self._params = params
            self.version += 1

    def release(self) -> None:
        """Does nothing: the servers have their own copies of the weights."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Returns unstarted sequences (see `Engine.sequences`)."""
        if params.logprobs:
            raise ValueError(f"logprobs={params.logprobs} is not supported by remote sampling; set it to 0")
        return new_sequences(prompts, params, self.eos_ids, step, first_prompt)

    def stream(self, sequences: Iterable[Completion]) -> Iterator[Completion]:
        """Runs sequences to their ends and yields those of a prompt when all of them are finished.

        Raises:
            RunError: no server can sample, or the servers do not fit the model.
            RolloutCancelled: `cancel` was called.
        """
        with closing(self.session()) as session:
            session.submit(sequences)
            while session.busy:
                for sequence, _ in session.step():
                    yield sequence

    def session(self) -> "RemoteSession":
        """Returns a new session, in which further sequences can be submitted while others run."""
        return RemoteSession(self)

    def cancel(self) -> None:
        """Cancels everything under way, whose consumers get a `RolloutCancelled`. From any thread."""
        for requests in list(self.begun):
            requests.cancel()

    def complete(self, number: int, group: list[Completion], requests: "_RolloutRequests") -> list[Completion]:
        """Samples a prompt's completions on the server of this number, or on the next ones."""
        silent_since_s: float | None = None
        attempt, wait_s = 0, FIRST_WAIT_S
        while not requests.cancelled.is_set():
            server, is_full, is_slow = self.servers[(number + attempt) % len(self.servers)], False, False
            try:
                return self._sample_on(server, group, requests)
            except RefusedError as refused:
                if refused.code == "other_weights":
                    server.state = None
                elif refused.status not in RETRIED:
                    raise RunError(f"{server.url} refuses to sample: {refused}") from refused
                last, is_full = f"{server.url}: {refused}", refused.status == HTTPStatus.TOO_MANY_REQUESTS
                is_slow = refused.status == HTTPStatus.GATEWAY_TIMEOUT
            except (OSError, http.client.HTTPException) as error:
                if requests.cancelled.is_set():
                    break
                if self._foreign.get(server) is not None:
                    server.state = None  # it may have restarted, which it does not report
                last = f"{server.url}: {error!r}"
                is_slow = isinstance(error, TimeoutError) and error.errno is None  # our timeout, not the system's
            now_s = time.monotonic()
            if is_full:
                silent_since_s = None
            elif silent_since_s is None:
                silent_since_s = now_s
            elif now_s - silent_since_s > self.patience_s:
                raise RunError(self._too_slow(group, last) if is_slow else self._silent(last))
            attempt += 1
            if attempt % len(self.servers) == 0:
                requests.cancelled.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise RolloutCancelled

    def _silent(self, last: str) -> str:
        return f"no server has sampled for {self.patience_s:.0f} s; the last error is: {last}"

    def _too_slow(self, group: list[Completion], last: str) -> str:
        return (
            f"the {len(group)} completions of a prompt, of up to {group[0].params.max_tokens} tokens, took too long: "
            f"{last}; raise rollout_timeout_s, now {self.timeout_s:g} s, and the servers' own limit "
            "(--request_timeout_s of groupax serve), or sample fewer or shorter ones"
        )

    def _sample_on(
        self, server: RemoteServer, group: list[Completion], requests: "_RolloutRequests"
    ) -> list[Completion]:
        if group[0].params.grammar is not None:
            raise RunError("servers take no grammar; set regex or json_schema, or sample without rollout_servers")
        with server.lock:
            if server not in self._foreign:
                self._foreign[server] = self._identify(server)
            foreign = self._foreign[server]
            if server.pushed != self.version or server.state is None:
                self.push(server)
            state, version = server.state, server.version
        with requests.connection(server) as connection:
            if foreign is not None:
                completions, made_by = foreign.complete(group, connection), version
            else:
                body = self._request_body(group, state)
                response = server.request("POST", "/v1/completions", body, connection)
                with reading(server.url, "token ids, log-probs and the version of the weights of each token"):
                    completions, versions = _completions(response)
                if versions != {version}:
                    raise RefusedError(409, f"sampled with weights {sorted(versions)}, not {version}", "other_weights")
                made_by = self.version
        check_completions(completions, group, server.url, self.config.vocab_size)
        for sequence, each in zip(group, completions, strict=True):
            sequence.tokens, sequence.text = each.tokens, each.text
            sequence.policy_logps, sequence.sampler_logps = each.logps, each.sampler_logps
            sequence.versions = [made_by] * len(each.tokens)
            sequence.finish_reason = FINISH_REASONS[each.finish_reason]
        return group

    def _request_body(self, group: list[Completion], state: str | None) -> dict[str, Any]:
        params = group[0].params
        return {
            **{name: value for name, value in asdict(params).items() if name != "logprobs" and value is not None},
            "prompt": group[0].prompt.tolist(),
            "n": len(group),
            "seed": None,
            "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
            "stop_token_ids": list(group[0].stop_ids),
            "ignore_eos": True,  # stop_token_ids include the end-of-sequence tokens
            "row_keys": [sequence.key.tolist() for sequence in group],
            "weights_state": state,
            "return_token_ids": True,
            "model": self.model,
        }

    def push(self, server: RemoteServer) -> None:
        """Sends the weights to a server: only what has changed, if it still has the previous ones.

        Raises:
            RefusedError: the server refuses.
            OSError, http.client.HTTPException: the server is gone; its weights are unchanged.
        """
        if (foreign := self._foreign.get(server)) is not None:
            assert self._shared is not None, "such servers are refused without"
            server.state = None
            version = self.version
            foreign.reload(self._shared.save(self.params, version))
            server.state, server.version, server.pushed = f"version {version}", version, version
            return
        part = self.params if self._settings is None else trained_params(self._specs, self.params)
        leaves = param_leaves(self._specs, part)
        with closing(server.connection()) as connection:
            held = self._held_by(server, connection)
            known = server.leaves if held["state"] == server.state else []
            same = {index for index, leaf in enumerate(known) if leaf() is leaves[index]}
            server.state = None
            at = specs_by_name(self._specs)
            wanted = {name for name, parts in at.items() if not all(index in same for index, _ in parts)}
            if wanted:
                held = self._upload(server, connection, held, host_tensors(self._specs, leaves, wanted))
        server.state, server.version, server.pushed = held["state"], held["version"], self.version
        server.leaves = [weakref.ref(leaf) for leaf in leaves]

    def _identify(self, server: RemoteServer) -> ForeignServer | None:
        foreign = identify_server(server, self.model)
        if foreign is not None and self._shared is None:
            raise RunError(
                f"{server.url} is a server of {foreign.name}, whose log-probs differ from those of training; set "
                "rollout_correction, e.g. to 'token_truncate', which corrects for the difference, or use groupax serve"
            )
        return foreign

    def _held_by(self, server: RemoteServer, connection: http.client.HTTPConnection) -> dict[str, Any]:
        response = server.request("GET", "/groupax/v1/weights", None, connection)
        with reading(server.url, "a list of models with the state of their weights"):
            models = [{name: each[name] for name in ("model", "state")} for each in response["models"]]
        found = [each for each in models if self.model in (None, each["model"])]
        if not found:
            names = ", ".join(each["model"] for each in models) or "none"
            raise RunError(f"{server.url} has no model {self.model!r} whose weights can be changed; it has {names}")
        return found[0]

    def _upload(
        self,
        server: RemoteServer,
        connection: http.client.HTTPConnection,
        held: dict[str, Any],
        tensors: dict[str, np.ndarray],
    ) -> dict[str, Any]:
        begin = {"model": held["model"], "version": self.version, "replaces": held["state"]}
        begin |= {"adapter": self._settings, "tensors": manifest_of(tensors), "piece_bytes": PIECE_BYTES}
        path = "/groupax/v1/weights"
        path += "/" + server.request("POST", path, begin, connection)["upload"]
        pieces, lock = enumerate(pieces_of(tensors)), threading.Lock()

        def send() -> None:
            with closing(server.connection()) as own:
                while True:
                    with lock:
                        item = next(pieces, None)
                    if item is None:
                        return
                    number, (parts, crc) = item
                    _put(server, own, f"{path}/{number}", parts, crc)

        with ThreadPoolExecutor(NUM_SENDERS) as pool:
            for sender in [pool.submit(send) for _ in range(NUM_SENDERS)]:
                sender.result()
        return server.request(
            "POST", f"{path}/commit"
        )  # a new connection: the other one may have been idle for too long


class RemoteSession:
    """The requests of a rollout, one per prompt: a `engine.sampler.SamplingSession`.

    Args:
        sampler: Sends the requests.
    """

    def __init__(self, sampler: RemoteSampler) -> None:
        self._sampler, self._requests = sampler, _RolloutRequests()
        sampler.begun.add(self._requests)
        self._pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="rollout")
        self._work: set[Future[list[Completion]]] = set()
        self._num_submitted = 0

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self._work)

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences; those of one prompt are one request."""
        groups: dict[int, list[Completion]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.prompt_index, []).append(sequence)
        for group in groups.values():
            self._work.add(self._pool.submit(self._sampler.complete, self._num_submitted, group, self._requests))
            self._num_submitted += 1

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Waits a moment for a request to end; yields its sequences with their numbers of tokens.

        Raises:
            RunError: no server can sample, or the servers do not fit the model.
            RolloutCancelled: `RemoteSampler.cancel` was called.
        """
        done, self._work = wait(self._work, LONGEST_STEP_S, FIRST_COMPLETED)
        for each in done:
            for sequence in each.result():
                yield sequence, len(sequence.tokens)

    def close(self) -> None:
        """Cancels what is under way."""
        self._sampler.begun.discard(self._requests)
        self._requests.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _RolloutRequests:
    """The requests of a rollout, which are cancelled together."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @contextmanager
    def connection(self, server: RemoteServer) -> Iterator[http.client.HTTPConnection]:
        """Opens a connection that `cancel` shuts down.

        Raises:
            OSError: the server cannot be reached.
            RolloutCancelled: the rollout is cancelled already.
        """
        with closing(server.connection()) as connection:
            connection.connect()
            opened = connection.sock  # the connection forgets it at the start of the response
            with self._lock:
                if self.cancelled.is_set():
                    raise RolloutCancelled
                self._open.add(opened)
            try:
                yield connection
            finally:
                with self._lock:
                    self._open.discard(opened)

    def cancel(self) -> None:
        """Ends them at once: waiting threads would keep the process alive, and servers busy."""
        with self._lock:
            self.cancelled.set()
            for opened in self._open:
                with suppress(OSError):  # it has just been closed
                    opened.shutdown(socket.SHUT_RDWR)


def _completions(response: Any) -> tuple[list[RemoteCompletion], set[int]]:
    """Returns the completions in a response of `groupax serve`, and the versions of the weights that sampled them."""
    names, choices = ("token_ids", "policy_logps", "text", "finish_reason", "sampler_logps"), response["choices"]
    completions = [RemoteCompletion(*(choice[name] for name in names)) for choice in choices]
    return completions, {made_by for choice in choices for made_by, _ in choice["weight_versions"]}


def check_completions(
    completions: Sequence[RemoteCompletion], group: Sequence[Completion], url: str, vocab_size: int
) -> None:
    """Checks that a server's completions are what was asked for.

    Raises:
        RunError: Their number, their tokens or their log-probs cannot be right.
        RefusedError: One was not finished.
    """
    if len(completions) != len(group):
        raise RunError(f"{url} responds with {len(completions)} completions instead of {len(group)}")
    most = group[0].params.max_tokens
    for each in completions:
        if each.finish_reason not in FINISH_REASONS:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"a completion ended with {each.finish_reason!r}", None)
        if not _is_list(each.tokens, int) or not all(0 <= token < vocab_size for token in each.tokens):
            raise RunError(
                f"{url} responds with token ids outside of the model's vocabulary of {vocab_size}, so it has another "
                f"model: {each.tokens!r:.200}"
            )
        if not 0 < len(each.tokens) <= most or not isinstance(each.text, str):
            raise RunError(f"{url} responds with {len(each.tokens)} tokens, where 1 to {most} and a text are expected")
        for logps in (each.logps, each.sampler_logps):
            if not _is_list(logps, int | float) or len(logps) != len(each.tokens) or not all(map(math.isfinite, logps)):
                raise RunError(
                    f"{url} responds with log-probs that are not {len(each.tokens)} finite numbers: {logps!r:.200}"
                )


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


def _put(
    server: RemoteServer, connection: http.client.HTTPConnection, path: str, parts: list[memoryview], crc: int
) -> None:
    """Sends a piece, again if it does not arrive intact."""
    for attempt in range(PIECE_ATTEMPTS):
        try:
            server.request("PUT", path, parts, connection, x_crc32=f"{crc:08x}")
            return
        except RefusedError as refused:
            if refused.code != "torn" or attempt == PIECE_ATTEMPTS - 1:
                raise
