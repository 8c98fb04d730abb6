"""Completions from servers instead of an engine in this process. Needs no server software.

params = newest weights            each server has them before it samples (`serve.weights`)
stream ──► a request per prompt ──► server 0, 1, ... ──► sequences, a prompt's completions together
                  └────── what one server cannot do now, the next one is asked for
"""

import http.client
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from http import HTTPStatus
from typing import Any

import numpy as np

from groupax.engine.engine import new_sequences
from groupax.engine.sequence import Sequence as Completion
from groupax.errors import RunError
from groupax.models.config import ModelConfig
from groupax.models.lora import Adapter, adapter_specs
from groupax.models.named_tensors import host_tensors, param_leaves, specs_by_name, trained_params
from groupax.models.peft_format import adapter_config_dict
from groupax.models.specs import Params, model_specs
from groupax.parallel.preemption import RolloutCancelled
from groupax.serve.protocol import PIECE_BYTES, manifest_of, pieces_of
from groupax.serve.remote import Refused, Remote
from groupax.serve.vllm_sglang import Other, WeightsFolder, dialect_of
from groupax.settings.sampling import SamplingParams

MAX_REQUESTS = 64  # at once
SENDERS = 2  # of pieces: one makes checksums while the server works on the other's
PIECE_ATTEMPTS = 4
LATER = (429, 500, 502, 503, 504)  # what another server, or the same one a little later, may do
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0


class RemoteSampler:
    """Samples completions on servers, with the weights that it is given: a `rollout.Sampler`.

    The same seed gives the completions of an `Engine` in this process, whichever server makes which. Servers that are
    not groupax's have an arithmetic and a randomness of their own (see `serve.others`).

    Args:
        urls: of `groupax serve`s with the model, each with a key; or of vLLM or SGLang.
        config: the model's architecture.
        params: its weights; set them anew before each rollout. Servers get what has changed before they sample.
        eos_ids: tokens that end every completion.
        adapter: if `params` are a base with one: only it is sent, and the servers must have that base.
        shared: where servers that are not groupax's find the weights; None refuses those.
        model: its name on the servers; None for their first.
        api_key: of all servers.
        timeout_s: the longest that a request, of all completions of a prompt, may take.
        patience_s: how long to go on trying when no server answers, as while they start again; one that is full does.
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
            raise ValueError("give the address of at least one server")
        self.config, self.eos_ids, self.model = config, eos_ids, model
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.servers = [Remote(url, api_key, timeout_s) for url in urls]
        self._shared = shared
        self._others: dict[Remote, Other | None] = {}  # of those that have been asked what they are
        self._settings = None if adapter is None else adapter_config_dict(adapter, config)
        self._specs = model_specs(config) if adapter is None else adapter_specs(config, adapter.config)
        self._under_way: set[_Requests] = set()
        self.version = 0
        self._params: Params | None = None
        self.params = params

    @property
    def params(self) -> Params:
        """The weights that completions are sampled from."""
        assert self._params is not None, "set at once"
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if params is not self._params:
            self._params = params
            self.version += 1

    def release(self) -> None:
        """Nothing: weights to decode with are the servers' own."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Unstarted sequences (see `Engine.sequences`)."""
        if params.logprobs:
            raise ValueError("alternatives (logprobs) of remote completions are not fetched; ask the server itself")
        return new_sequences(prompts, params, self.eos_ids, step, first_prompt)

    def stream(self, sequences: Iterable[Completion]) -> Iterator[Completion]:
        """Run sequences to their ends, those of a prompt yielded as soon as all of them are finished.

        Raises:
            RunError: no server does it, or the servers do not fit the model.
        """
        groups: dict[int, list[Completion]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.prompt_index, []).append(sequence)
        if not groups:
            return
        requests = _Requests()
        self._under_way.add(requests)
        pool = ThreadPoolExecutor(min(len(groups), MAX_REQUESTS), thread_name_prefix="rollout")
        try:
            work = [pool.submit(self._complete, *item, requests) for item in enumerate(groups.values())]
            for done in as_completed(work):
                yield from done.result()
        finally:
            self._under_way.discard(requests)
            requests.cancel()
            pool.shutdown(wait=False, cancel_futures=True)

    def cancel(self) -> None:
        """Cancels everything under way, whose consumers get a `RolloutCancelled`. From any thread."""
        for requests in list(self._under_way):
            requests.cancel()

    def _complete(self, number: int, group: list[Completion], requests: "_Requests") -> list[Completion]:
        """A prompt's completions, from the server whose turn it is or from one after it."""
        silent_since_s: float | None = None
        attempt, wait_s = 0, FIRST_WAIT_S
        while not requests.given_up.is_set():
            server, is_full, is_slow = self.servers[(number + attempt) % len(self.servers)], False, False
            try:
                return self._asked(server, group, requests)
            except Refused as refused:
                if refused.code == "other_weights":
                    server.state = None
                elif refused.status not in LATER:
                    raise RunError(f"{server.url} refuses to sample: {refused}") from refused
                last, is_full = f"{server.url}: {refused}", refused.status == HTTPStatus.TOO_MANY_REQUESTS
                is_slow = refused.status == HTTPStatus.GATEWAY_TIMEOUT
            except (OSError, http.client.HTTPException) as error:
                if requests.given_up.is_set():
                    break
                if self._others.get(server) is not None:
                    server.state = None  # it may start again without a word of it
                last = f"{server.url}: {error!r}"
                is_slow = isinstance(error, TimeoutError) and error.errno is None  # ours, and not that of the system
            now_s = time.monotonic()
            if is_full:
                silent_since_s = None
            elif silent_since_s is None:
                silent_since_s = now_s
            elif now_s - silent_since_s > self.patience_s:
                raise RunError(self._too_slow(group, last) if is_slow else self._silent(last))
            attempt += 1
            if attempt % len(self.servers) == 0:
                requests.given_up.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise RolloutCancelled

    def _silent(self, last: str) -> str:
        return f"no server has sampled for {self.patience_s:.0f} s; the last one asked says: {last}"

    def _too_slow(self, group: list[Completion], last: str) -> str:
        return (
            f"the {len(group)} completions of a prompt, of up to {group[0].params.max_tokens} tokens, took too long: "
            f"{last}; raise rollout_timeout_s, now {self.timeout_s:g} s, and the servers' own limit "
            "(--request_timeout_s of groupax serve), or ask for fewer or shorter ones"
        )

    def _asked(self, server: Remote, group: list[Completion], requests: "_Requests") -> list[Completion]:
        with server.lock:
            if server not in self._others:
                self._others[server] = self._dialect_of(server)
            other = self._others[server]
            if server.pushed != self.version or server.state is None:
                self.push(server)
            state, version = server.state, server.version
        if other is not None:
            with requests.connection(server) as connection:
                return other.complete(group, version, connection)
        params = group[0].params
        left_out = ("n", "seed", "logprobs", "logit_bias", "stop_token_ids", "ignore_eos", "stop")
        settings = {each.name: getattr(params, each.name) for each in fields(params) if each.name not in left_out}
        request = {
            **settings,
            "prompt": group[0].prompt.tolist(),
            "n": len(group),
            "stop": list(params.stop),
            "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
            "stop_token_ids": list(group[0].stop_ids),
            "ignore_eos": True,  # the stop tokens are all there are
            "row_keys": [sequence.key.tolist() for sequence in group],
            "weights_state": state,
            "return_token_ids": True,
            **({} if self.model is None else {"model": self.model}),
        }
        with requests.connection(server) as connection:
            choices = server.ask("POST", "/v1/completions", request, connection)["choices"]
        versions = {made_by for choice in choices for made_by, _ in choice["weight_versions"]}
        if versions != {version}:
            raise Refused(409, f"weights {sorted(versions)} have made it, not {version}", "other_weights")
        for sequence, choice in zip(group, choices, strict=True):
            sequence.tokens = list(choice["token_ids"])
            sequence.policy_logps, sequence.sampler_logps = choice["policy_logps"], choice["sampler_logps"]
            sequence.versions = [self.version] * len(sequence.tokens)
            sequence.text, sequence.finish_reason = choice["text"], choice["finish_reason"]
        return group

    def push(self, server: Remote) -> None:
        """Have a server take over the weights: what has changed since the last time, if it still has those.

        Raises:
            Refused: the server says no.
            OSError, http.client.HTTPException: it is gone; it goes on with what it had.
        """
        if (other := self._others.get(server)) is not None:
            assert self._shared is not None, "others are refused without"
            server.state = None
            version = self.version
            other.reload(self._shared.written(self.params, version))
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

    def _dialect_of(self, server: Remote) -> Other | None:
        other = dialect_of(server, self.model)
        if other is not None and self._shared is None:
            raise RunError(
                f"{server.url} is a server of {other.name}, whose log-probs are not those that training computes; set "
                "rollout_correction, e.g. to 'token_truncate', which makes up for the difference, or use groupax serve"
            )
        return other

    def _held_by(self, server: Remote, connection: http.client.HTTPConnection) -> dict[str, Any]:
        models = server.ask("GET", "/groupax/v1/weights", None, connection)["models"]
        found = [each for each in models if self.model in (None, each["model"])]
        if not found:
            names = ", ".join(each["model"] for each in models) or "none"
            raise RunError(f"{server.url} has no model {self.model!r} whose weights can be changed; it has {names}")
        return found[0]

    def _upload(
        self,
        server: Remote,
        connection: http.client.HTTPConnection,
        held: dict[str, Any],
        tensors: dict[str, np.ndarray],
    ) -> dict[str, Any]:
        begin = {"model": held["model"], "version": self.version, "replaces": held["state"]}
        begin |= {"adapter": self._settings, "tensors": manifest_of(tensors), "piece_bytes": PIECE_BYTES}
        path = "/groupax/v1/weights"
        path += "/" + server.ask("POST", path, begin, connection)["upload"]
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

        with ThreadPoolExecutor(SENDERS) as pool:
            for sender in [pool.submit(send) for _ in range(SENDERS)]:
                sender.result()
        return server.ask("POST", f"{path}/commit")  # the other connection may have been idle for too long


class _Requests:
    """Those of a rollout, which are given up together."""

    def __init__(self) -> None:
        self.given_up = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @contextmanager
    def connection(self, server: Remote) -> Iterator[http.client.HTTPConnection]:
        """An open connection, until it is given up.

        Raises:
            OSError: there is none to be had.
            RolloutCancelled: it was given up before.
        """
        with closing(server.connection()) as connection:
            connection.connect()
            opened = connection.sock  # which the connection forgets at the beginning of the answer
            with self._lock:
                if self.given_up.is_set():
                    raise RolloutCancelled
                self._open.add(opened)
            try:
                yield connection
            finally:
                with self._lock:
                    self._open.discard(opened)

    def cancel(self) -> None:
        """Have them end at once: threads that wait for an answer would keep the process, and servers busy."""
        with self._lock:
            self.given_up.set()
            for opened in self._open:
                with suppress(OSError):  # it has just ended
                    opened.shutdown(socket.SHUT_RDWR)


def _put(server: Remote, connection: http.client.HTTPConnection, path: str, parts: list[memoryview], crc: int) -> None:
    """Send a piece, anew if it does not come as it was sent."""
    for attempt in range(PIECE_ATTEMPTS):
        try:
            server.ask("PUT", path, parts, connection, x_crc32=f"{crc:08x}")
            return
        except Refused as refused:
            if refused.code != "torn" or attempt == PIECE_ATTEMPTS - 1:
                raise
