"""The dialects of servers that sample rollouts: groupax and vLLM.

groupax:  changed tensors ──► an upload ──► taken over between two chunks
vLLM:     weights ──► a shared folder ──► the server loads it, and clears its prefix cache
both:     prompts ──► token ids, with the log-probs of the sampled tokens

Source: vLLM's entrypoints/openai/completion/protocol.py and entrypoints/serve/dev (rpc, cache, server_info).
"""

import json
import secrets
import shutil
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.errors import RunError
from groupax.core.settings.sampling import SAMPLER
from groupax.engine.sequence import Sequence as Completion
from groupax.models.config import ModelConfig
from groupax.models.lora import Adapter, adapter_config_dict, adapter_specs, as_plain, trained_params
from groupax.models.specs import Params, model_specs
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import host_tensors, param_leaves, save_model, specs_by_name
from groupax.serve.remote import RefusedError, RemoteServer, bytes_of, reading

BUSY = (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
NEEDED = "token ids, log-probs and a reason of the end (of vLLM, 0.10.2 or newer)"
NUM_KEPT_VERSIONS = 2  # a server may still be loading the previous one
UNKNOWN = -1  # version of the weights of a server that may have any


@dataclass(frozen=True)
class RemoteCompletion:
    """A completion as a server has sent it, which `client.check_completions` checks.

    Attributes:
        tokens: The sampled tokens, including a stop token.
        logps: The server's natural log-prob of each.
        text: Their text.
        finish_reason: "stop" or "length"; with another reason the completion is discarded.
        sampler_logps: Log-probs under the distribution that was sampled from, the only ones of vLLM.
    """

    tokens: Any
    logps: Any
    text: Any
    finish_reason: Any
    sampler_logps: Any


class Groupax:
    """A `groupax serve` with a key, to which only the tensors are sent that have changed.

    Only the adapter is sent if there is one. `pushed` is our version of the weights that it has.
    """

    def __init__(self, server: RemoteServer, model: str | None, config: ModelConfig, adapter: Adapter | None) -> None:
        self._server, self._model = server, model
        adapter = adapter and as_plain(adapter)
        self._settings = None if adapter is None else adapter_config_dict(adapter, config)
        self._specs = model_specs(config) if adapter is None else adapter_specs(config, adapter.config)
        self.pushed = UNKNOWN
        self._state: str | None = None  # the server's name of its weights; None if it may have others
        self._version = UNKNOWN  # the server's version of them
        self._leaves: list[weakref.ref[Any]] = []  # their arrays, of which some may be gone

    def complete(self, group: list[Completion], connection: HTTPConnection) -> list[RemoteCompletion]:
        """Samples the completions of a prompt with the weights that were pushed last."""
        params, state, version = group[0].params, self._state, self._version
        if state is None:
            raise RefusedError(HTTPStatus.CONFLICT, "its weights are being replaced", "other_weights")
        body = {
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
            "model": self._model,
        }
        response = self._server.request("POST", "/v1/completions", body, connection)
        names = ("token_ids", "policy_logps", "text", "finish_reason", "sampler_logps")
        with reading(self._server.url, "token ids, log-probs and the version of the weights of each token"):
            choices = response["choices"]
            completions = [RemoteCompletion(*(choice[name] for name in names)) for choice in choices]
            versions = {made_by for choice in choices for made_by, _ in choice["weight_versions"]}
        if versions != {version}:
            raise RefusedError(
                HTTPStatus.CONFLICT, f"sampled with weights {sorted(versions)}, not {version}", "other_weights"
            )
        return completions

    def push(self, params: Params, version: int) -> None:
        """Gives the server our weights: only what has changed, if it still has the previous ones.

        Raises:
            RefusedError: The server refuses.
            OSError, http.client.HTTPException: The server is gone; its weights are unchanged.
        """
        part = params if self._settings is None else trained_params(self._specs, params)
        leaves, places = param_leaves(self._specs, part), specs_by_name(self._specs)
        with closing(self._server.connection()) as connection:
            held = self._server.request("GET", "/groupax/v1/weights", None, connection)
            with reading(self._server.url, "the state of its weights"):
                held = {name: held[name] for name in ("state", "version")}
            known = self._leaves if held["state"] == self._state else []
            same = {index for index, leaf in enumerate(known) if leaf() is leaves[index]}
            self.pushed, self._state = UNKNOWN, None
            wanted = {name for name, parts in places.items() if not all(index in same for index, _ in parts)}
            if wanted:
                held = self.upload(held, version, host_tensors(self._specs, leaves, wanted))
        self.pushed, self._state, self._version = version, held["state"], held["version"]
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    def upload(self, held: dict[str, Any], version: int, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        """Replaces tensors of the weights that the server holds, and returns what it holds then."""
        metadata = {"version": str(version), "replaces": held["state"], "adapter": json.dumps(self._settings)}
        # a new connection, since an idle one may have been closed while the tensors were copied
        return self._server.request("PUT", "/groupax/v1/weights", bytes_of(tensors, metadata))


class WeightsFolder:
    """A folder with the newest two versions of the weights, for servers on this and other machines.

    The folder is removed when the process ends.

    Args:
        path: Path at which all machines see the parent folder.
        model: The architecture, and how its files are written.
        dtype: Dtype of the weights in the files.
        is_own: Whether nobody else writes to `path`, so that leftovers of a killed process are removed first.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self, path: Path, model: Model, dtype: Any, is_own: bool = False) -> None:
        self.path = path.absolute() / secrets.token_hex(4)
        self._model, self._dtype, self._is_own = replace(model, adapter=None), dtype, is_own
        self._lock = threading.Lock()
        self._written: list[int] = []
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def save(self, params: Params, version: int) -> Path:
        """Saves a version of the weights, unless it is there, and returns its folder; adapters are merged."""
        with self._lock:
            folder = self.path / f"version-{version}"
            if version not in self._written:
                if self._is_own and not self._written:
                    shutil.rmtree(self.path.parent, ignore_errors=True)
                self.path.mkdir(parents=True, exist_ok=True)
                save_model(replace(self._model, params=params), folder, dtype=self._dtype)
                self._written.append(version)
                for old in self._written[:-NUM_KEPT_VERSIONS]:
                    shutil.rmtree(self.path / f"version-{old}", ignore_errors=True)
                del self._written[:-NUM_KEPT_VERSIONS]
            return folder


class VLLM:
    """A server of vLLM, started with VLLM_SERVER_DEV_MODE=1 (see `Groupax`)."""

    def __init__(self, server: RemoteServer, model: str, shared: WeightsFolder) -> None:
        self._server, self._model, self._shared = server, model, shared
        self._logprobs_mode: str | None = None
        self.pushed = UNKNOWN

    def complete(self, group: list[Completion], connection: HTTPConnection) -> list[RemoteCompletion]:
        """Samples the completions of a prompt; a `RunError` tells that the server cannot do it at all."""
        params = group[0].params
        if not (params.is_plain and params.temperature == 1 and params.constraint is None):  # not softmax(logits)
            self._check_mode()
        response = self._server.request("POST", "/v1/completions", vllm_request(group, self._model), connection)
        with reading(self._server.url, NEEDED):
            return parse_vllm(response)

    def push(self, params: Params, version: int) -> None:
        """Has the weights loaded from the shared folder, and clears the prefix cache."""
        self.pushed, folder = UNKNOWN, self._shared.save(params, version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        needs = "it must be a vLLM whose reload_weights takes a weights_path, started with VLLM_SERVER_DEV_MODE=1"
        _control(self._server, "POST", "/collective_rpc", body, f"{needs}, and it must see {folder}")
        _control(self._server, "POST", "/reset_prefix_cache?reset_running_requests=true", None, needs)
        self.pushed, self._logprobs_mode = version, None

    def _check_mode(self) -> None:
        if self._logprobs_mode is None:
            needs = "it reports its settings only if started with VLLM_SERVER_DEV_MODE=1"
            info = _control(self._server, "GET", "/server_info?config_format=json", None, needs)
            try:
                self._logprobs_mode = str(info["vllm_config"]["model_config"]["logprobs_mode"])
            except (KeyError, TypeError) as error:
                raise RunError(f"{self._server.url} does not report its logprobs_mode; use a newer vLLM") from error
        if self._logprobs_mode != "processed_logprobs":
            raise RunError(
                f"{self._server.url} returns {self._logprobs_mode}, which differ from the distribution that it samples "
                "from unless temperature is 1 and nothing is truncated; start vllm serve with "
                "--logprobs-mode processed_logprobs"
            )


Dialect = Groupax | VLLM


def identify_server(
    server: RemoteServer, model: str | None, config: ModelConfig, adapter: Adapter | None, shared: WeightsFolder | None
) -> Dialect:
    """Returns the dialect of a server.

    Its model is the one of a name, or the first. Without a shared folder vLLM, which loads weights from it, is refused.

    Raises:
        RunError: Its program is not supported, or it has no such model.
        RefusedError, OSError, http.client.HTTPException: See `RemoteServer.request`.
    """
    response = server.request("GET", "/v1/models")
    with reading(server.url, "a list of models"):
        cards = [(card["id"], card.get("owned_by")) for card in response["data"]]
    owner = str(cards[0][1]) if cards else "nobody"
    if owner == "groupax":
        return Groupax(server, model, config, adapter)
    if owner != "vllm":
        raise RunError(f"{server.url} is a server of {owner!r}, which is not supported; use groupax serve or vLLM")
    names = [name for name, _ in cards]
    if model is not None and model not in names:
        raise RunError(f"{server.url} has no model {model!r}; it has {', '.join(names)}")
    if shared is None:
        raise RunError(
            f"{server.url} is a server of vLLM, whose log-probs differ from those of training; set "
            "rollout_correction, e.g. to 'token_truncate', which corrects for the difference, or use groupax serve"
        )
    return VLLM(server, model or names[0], shared)


# Parameters that vLLM has under these names, and those with other forms.
SHARED = (
    *("temperature", "top_p", "min_p", "top_k", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_VLLM_NAMES = {"regex": "regex", "json_schema": "json"}  # of constraints


def vllm_request(group: Sequence[Completion], model: str) -> dict[str, Any]:
    """Returns the body for vLLM's /v1/completions, which samples with `seed`, `seed` + 1, ..."""
    params = group[0].params
    for name in SAMPLER.keys() - {*SHARED, "logit_bias"}:
        if getattr(params, name) != SAMPLER[name]:
            raise RunError(f"servers of vLLM have no {name}; leave it out, or sample with groupax serve")
    constraint = params.constraint and {"structured_outputs": {_VLLM_NAMES[params.constraint[0]]: params.constraint[1]}}
    return {
        **{name: getattr(params, name) for name in SHARED},
        "model": model,
        "prompt": group[0].prompt.tolist(),
        "n": len(group),
        "seed": seed_from_key(group[0].key),
        "max_tokens": params.max_tokens,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "stop": list(params.stop),
        "stop_token_ids": list(group[0].stop_ids),
        "ignore_eos": True,  # stop_token_ids include the end-of-sequence tokens
        **(constraint or {}),
        "logprobs": 1,
        "return_token_ids": True,
    }


def parse_vllm(response: Any) -> list[RemoteCompletion]:
    """Returns the completions in a response of /v1/completions."""
    completions = []
    for choice in sorted(response["choices"], key=lambda choice: choice["index"]):
        tokens, logps = list(choice["token_ids"]), choice["logprobs"]["token_logprobs"]
        completions.append(RemoteCompletion(tokens, logps, choice["text"], choice["finish_reason"], logps))
    return completions


def seed_from_key(key: np.ndarray) -> int:
    """Returns a seed of 62 bits, to which small numbers can be added, from a key [2] uint32."""
    return (int(key[0]) << 32 | int(key[1])) >> 2


def _control(server: RemoteServer, method: str, path: str, body: Any, needs: str) -> Any:
    """Sends a control request, whose refusal ends the run unless the server is busy."""
    try:
        return server.request(method, path, body)
    except RefusedError as refused:
        if refused.status in BUSY:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"{path} returned {refused}") from refused
        raise RunError(f"{server.url}{path} returned {refused}; {needs}") from refused
