"""Samples completions on servers instead of an engine in this process. Needs no server packages.

params = newest weights            each server receives them before it samples (`serve.dialects`)
stream ──► a request per prompt ──► server 0, 1, ... ──► sequences, the completions of a prompt together
                  └────── if one server cannot run it now, the next one is tried
"""

import http.client
import itertools
import math
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from typing import Any

import jax
import numpy as np

from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import FinishReason
from groupax.engine.engine import new_sequences
from groupax.engine.sequence import Sequence as Completion
from groupax.models.config import ModelConfig
from groupax.models.lora import Adapter
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.collectives import to_host_on_primary
from groupax.parallel.preemption import RolloutCancelled
from groupax.serve.dialects import UNKNOWN, Dialect, RemoteCompletion, WeightsFolder, identify_server
from groupax.serve.remote import RefusedError, RemoteServer

MAX_REQUESTS = 64  # simultaneous
RETRIED = (429, 500, 502, 503, 504)  # statuses after which the request is repeated, here or on another server
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
LONGEST_STEP_S = 0.05  # of waiting for a request, after which a session's user may submit others
UPDATED_FIELDS = ("tokens", "policy_logps", "sampler_logps", "versions", "text", "finish_reason")


class RemoteSampler:
    """Samples completions on servers with the current weights: a `engine.sequence.PolicySampler`.

    The same seed gives the completions of an `Engine` in this process, independent of which server samples which.
    Servers of vLLM have their own arithmetic and randomness (see `serve.dialects`).

    Of several processes the primary one asks the servers, with a copy of the weights in its host's memory, and
    broadcasts the completions; all processes must submit the same sequences.

    Args:
        urls: Addresses of `groupax serve`s with the model, each with a key; or of vLLM.
        config: The model's architecture.
        params: The weights; set them before each rollout. Servers receive what has changed before they sample.
        eos_ids: Tokens that end every completion.
        adapter: The adapter, if `params` contain one: only it is sent, and the servers must have its base.
        shared: Folder from which vLLM loads weights; None refuses such servers.
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
        self._adapter, self._shared = adapter, shared
        self._dialects: dict[RemoteServer, Dialect] = {}
        self.begun: set[RemoteSession] = set()
        self.version = 0
        self._params: Params | None = None
        self._copied: Params | None = None  # the weights that `_to_push` is a copy of, if there are several processes
        self._to_push: Params | None = None
        self._copies: dict[int, tuple[weakref.ref[Any], Any]] = {}  # by id of the array that was copied
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
            if processes.num_processes() == 1:  # else `session` copies them first
                self._to_push = params
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
        """Runs sequences to their ends; yields those of a prompt together (see `RemoteSession.step` for errors)."""
        with closing(self.session()) as session:
            session.submit(sequences)
            while session.busy:
                for sequence, _ in session.step():
                    yield sequence

    def session(self) -> "RemoteSession":
        """Returns a new session, in which further sequences can be submitted while others run."""
        if processes.num_processes() > 1 and self._copied is not self.params:
            copies = {}

            def copied(leaf: Any) -> Any:
                if not isinstance(leaf, jax.Array):  # a number, as an adapter's scale
                    return leaf
                known, copy = self._copies.get(id(leaf), (None, None))
                if known is None or known() is not leaf:
                    copy = to_host_on_primary(leaf)
                copies[id(leaf)] = weakref.ref(leaf), copy
                return copy

            self._to_push, self._copied = jax.tree.map(copied, self.params), self.params
            self._copies = copies
            self.version += 1  # after the weights, which another session's requests may push
        return RemoteSession(self)

    def cancel(self) -> None:
        """Cancels everything under way, whose consumers get a `RolloutCancelled`. From any thread."""
        for session in list(self.begun):
            session.cancel()

    def complete(self, number: int, group: list[Completion], session: "RemoteSession") -> list[Completion]:
        """Samples a prompt's completions on the server of this number, or on the next ones."""
        silent_since_s: float | None = None
        attempt, wait_s = 0, FIRST_WAIT_S
        while not session.cancelled.is_set():
            server, is_full, advice = self.servers[(number + attempt) % len(self.servers)], False, ""
            try:
                return self._sample_on(server, group, session)
            except RefusedError as refused:
                if refused.code == "other_weights":  # another upload was earlier
                    self._forget_weights(server)
                elif refused.status not in RETRIED:
                    raise RunError(f"{server.url} refuses to sample: {refused}") from refused
                last, is_full = f"{server.url}: {refused}", refused.status == HTTPStatus.TOO_MANY_REQUESTS
                is_slow = refused.status == HTTPStatus.GATEWAY_TIMEOUT
            except (OSError, http.client.HTTPException) as error:
                if session.cancelled.is_set():
                    break
                self._forget_weights(server)  # it may have restarted
                last = f"{server.url}: {error!r}"
                is_slow = isinstance(error, TimeoutError) and error.errno is None  # our timeout, not the system's
            if is_slow:
                advice = (
                    f"; the {len(group)} completions of a prompt, of up to {group[0].params.max_tokens} tokens, took "
                    f"too long: raise rollout_timeout_s, now {self.timeout_s:g} s, and the servers' own limit "
                    "(--request_timeout_s of groupax serve), or sample fewer or shorter ones"
                )
            now_s = time.monotonic()
            silent_since_s = None if is_full else silent_since_s or now_s
            if silent_since_s is not None and now_s - silent_since_s > self.patience_s:
                raise RunError(f"no server has sampled for {self.patience_s:.0f} s; the last error is: {last}{advice}")
            attempt += 1
            if attempt % len(self.servers) == 0:
                session.cancelled.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise RolloutCancelled

    def push(self, server: RemoteServer) -> tuple[Dialect, int]:
        """Gives a server the current weights, unless it has them; returns its dialect and their version."""
        with server.lock:
            if server not in self._dialects:
                dialect = identify_server(server, self.model, self.config, self._adapter, self._shared)
                self._dialects[server] = dialect
            dialect = self._dialects[server]
            version = self.version  # before the weights, which are set before it
            if dialect.pushed != version:
                assert self._to_push is not None, "set by __init__, or copied by the session"
                dialect.push(self._to_push, version)
            return dialect, dialect.pushed

    def _forget_weights(self, server: RemoteServer) -> None:
        """Has the weights of a server looked at before it samples again."""
        if (dialect := self._dialects.get(server)) is not None:
            dialect.pushed = UNKNOWN

    def _sample_on(self, server: RemoteServer, group: list[Completion], session: "RemoteSession") -> list[Completion]:
        if group[0].params.grammar is not None:
            raise RunError("servers take no grammar; set regex or json_schema, or sample without rollout_servers")
        dialect, made_by = self.push(server)
        with session.connection(server) as connection:
            completions = dialect.complete(group, connection)
        check_completions(completions, group, server.url, self.config.vocab_size)
        for sequence, each in zip(group, completions, strict=True):
            sequence.tokens, sequence.text = each.tokens, each.text
            sequence.policy_logps, sequence.sampler_logps = each.logps, each.sampler_logps
            sequence.versions = [made_by] * len(each.tokens)
            sequence.finish_reason = FINISH_REASONS[each.finish_reason]
        return group


class RemoteSession:
    """The requests of a rollout, one per prompt: a `engine.sequence.SamplingSession`.

    Attributes:
        cancelled: Set when they are cancelled, all together.
    """

    def __init__(self, sampler: RemoteSampler) -> None:
        self._sampler, self.cancelled = sampler, threading.Event()
        sampler.begun.add(self)
        self._pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="rollout")
        self._work: set[Future[list[Completion]]] = set()
        self._num_submitted = 0
        self._numbers = itertools.count()
        self._under_way: dict[int, Completion] = {}  # by number, which all processes give alike
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self._under_way)

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences; those of one prompt are one request."""
        groups: dict[int, list[Completion]] = {}
        for sequence in sequences:
            self._under_way[next(self._numbers)] = sequence
            groups.setdefault(sequence.prompt_index, []).append(sequence)
        for group in groups.values() if processes.is_primary() else ():
            self._work.add(self._pool.submit(self._sampler.complete, self._num_submitted, group, self))
            self._num_submitted += 1

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Waits a moment for a request to end; yields its sequences with their numbers of tokens.

        Raises:
            RunError: No server can sample, or the servers do not fit the model. It is raised in all processes.
            RolloutCancelled: `RemoteSampler.cancel` was called.
        """
        for number, values in processes.run_on_primary(self._finished):
            sequence = self._under_way.pop(number)
            for name, value in zip(UPDATED_FIELDS, values, strict=True):
                setattr(sequence, name, value)
            yield sequence, len(sequence.tokens)

    def _finished(self) -> list[tuple[int, list[Any]]]:
        """Returns the numbers and the new values of sequences that have finished."""
        done, self._work = wait(self._work, LONGEST_STEP_S, FIRST_COMPLETED)
        numbers = {id(sequence): number for number, sequence in self._under_way.items()}
        return [
            (numbers[id(sequence)], [getattr(sequence, name) for name in UPDATED_FIELDS])
            for each in done
            for sequence in each.result()
        ]

    def close(self) -> None:
        """Cancels what is under way."""
        self._under_way.clear()
        self._sampler.begun.discard(self)
        self.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def connection(self, server: RemoteServer) -> Iterator[http.client.HTTPConnection]:
        """Opens a connection that `cancel` shuts down; raises a `RolloutCancelled` after that."""
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


def check_completions(
    completions: Sequence[RemoteCompletion], group: Sequence[Completion], url: str, vocab_size: int
) -> None:
    """Raises a `RunError` if a server's completions cannot be right, a `RefusedError` if one was not finished."""
    if len(completions) != len(group):
        raise RunError(f"{url} responds with {len(completions)} completions instead of {len(group)}")
    most = group[0].params.max_tokens
    for each in completions:
        if each.finish_reason not in FINISH_REASONS:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"a completion ended with {each.finish_reason!r}")
        is_sound = _is_list(each.tokens, int) and 0 < len(each.tokens) <= most and isinstance(each.text, str)
        is_sound = is_sound and all(0 <= token < vocab_size for token in each.tokens)
        for logps in (each.logps, each.sampler_logps):
            is_sound = is_sound and _is_list(logps, int | float) and len(logps) == len(each.tokens)
            is_sound = is_sound and all(map(math.isfinite, logps))
        if not is_sound:
            raise RunError(
                f"{url} responds without a text and 1 to {most} tokens of the model's vocabulary of {vocab_size}, each "
                f"with finite log-probs; has it another model? It is {each!r:.400}"
            )


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)
