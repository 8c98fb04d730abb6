"""Rollouts from servers of vLLM and SGLang.

weights ──► a shared folder ──► the server loads it, and clears its prefix cache
prompts ──► token ids, with the log-probs of the sampled tokens

Sources: vLLM's entrypoints/openai/completion/protocol.py and entrypoints/serve/dev (rpc, cache, server_info); SGLang's
srt/entrypoints/http_server.py and srt/managers/io_struct.py.
"""

import secrets
import shutil
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from groupax.engine.sequence import Sequence as Completion
from groupax.errors import RunError
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import save_model
from groupax.serve.remote import RefusedError, RemoteServer, reading
from groupax.settings.sampling import SAMPLER, SamplingParams

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}  # by `owned_by` of their models
BUSY = (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
NEEDED = "token ids, log-probs and a reason of the end (of vLLM, 0.10.2 or newer)"
NUM_KEPT_VERSIONS = 2  # a server may still be loading the previous one


@dataclass(frozen=True)
class RemoteCompletion:
    """A completion as a server has sent it, which `client.check_completions` checks.

    Attributes:
        tokens: The sampled tokens, including a stop token.
        logps: The server's natural log-prob of each.
        text: Their text.
        finish_reason: "stop" or "length"; with another reason the completion is discarded.
        sampler_logps: Log-probs under the distribution that was sampled from, the only ones of other programs.
    """

    tokens: Any
    logps: Any
    text: Any
    finish_reason: Any
    sampler_logps: Any


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


def identify_server(server: RemoteServer, model: str | None) -> "ForeignServer | None":
    """Returns the interface of a server; None for one of groupax.

    Args:
        server: The server.
        model: Name of its model; None takes the first.

    Raises:
        RunError: its program is not supported, or it has no such model.
        RefusedError, OSError, http.client.HTTPException: see `RemoteServer.request`.
    """
    response = server.request("GET", "/v1/models")
    with reading(server.url, "a list of models"):
        cards = [(card["id"], card.get("owned_by")) for card in response["data"]]
    owner = str(cards[0][1]) if cards else "nobody"
    if owner == "groupax":
        return None
    if owner not in NAMES:
        raise RunError(
            f"{server.url} is a server of {owner!r}, which is not supported; use groupax serve, "
            f"{' or '.join(NAMES.values())}"
        )
    if owner == "sglang":
        return SGLang(server)
    names = [name for name, _ in cards]
    if model is not None and model not in names:
        raise RunError(f"{server.url} has no model {model!r}; it has {', '.join(names)}")
    return VLLM(server, model or names[0])


class VLLM:
    """A server of vLLM, started with VLLM_SERVER_DEV_MODE=1."""

    name = NAMES["vllm"]

    def __init__(self, server: RemoteServer, model: str) -> None:
        self._server, self._model = server, model
        self._logprobs_mode: str | None = None

    def complete(self, group: list[Completion], connection: HTTPConnection) -> list[RemoteCompletion]:
        """Samples the completions of a prompt.

        Raises:
            RefusedError: the server refuses for now.
            RunError: the server cannot do it at all, e.g. because its log-probs are not those of its samples.
        """
        if not samples_from_logits(group[0].params):
            self._check_mode()
        response = self._server.request("POST", "/v1/completions", vllm_request(group, self._model), connection)
        with reading(self._server.url, NEEDED):
            return parse_vllm(response)

    def reload(self, folder: Path) -> None:
        """Loads the weights in a folder and clears the prefix cache.

        Raises:
            RefusedError: the server is busy.
            RunError: the server cannot do it at all.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        needs = "it must be a vLLM whose reload_weights takes a weights_path, started with VLLM_SERVER_DEV_MODE=1"
        _control(self._server, "POST", "/collective_rpc", body, f"{needs}, and it must see {folder}")
        _control(self._server, "POST", "/reset_prefix_cache?reset_running_requests=true", None, needs)
        self._logprobs_mode = None

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


class SGLang:
    """A server of SGLang."""

    name = NAMES["sglang"]

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._state = ""  # `weight_version` in its responses

    def complete(self, group: list[Completion], connection: HTTPConnection) -> list[RemoteCompletion]:
        """Samples the completions of a prompt (see `VLLM.complete`). The response must name the current weights."""
        response = self._server.request("POST", "/generate", sglang_request(group), connection)
        rows = response if isinstance(response, list) else [response]
        with reading(self._server.url, NEEDED):
            found = {row["meta_info"].get("weight_version") for row in rows}
            completions = parse_sglang(rows)
        if found != {self._state}:
            raise RefusedError(HTTPStatus.CONFLICT, f"sampled with weights {sorted(map(str, found))}", "other_weights")
        return completions

    def reload(self, folder: Path) -> None:
        """Loads the weights in a folder (see `VLLM.reload`)."""
        body = {"model_path": str(folder), "weight_version": str(folder), "flush_cache": True}
        _control(self._server, "POST", "/update_weights_from_disk", body, f"it must see {folder}")
        self._state = str(folder)


ForeignServer = VLLM | SGLang


def samples_from_logits(params: SamplingParams) -> bool:
    """Returns whether completions are sampled from softmax(logits), neither scaled nor changed nor truncated."""
    return params.is_plain and params.temperature == 1 and params.constraint is None


# Parameters that both servers have under these names, and those with other names or forms.
SHARED = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
KNOWN = {*SHARED, "top_k", "min_tokens", "logit_bias"}
_VLLM_NAMES = {"regex": "regex", "json_schema": "json"}  # of constraints


def vllm_request(group: Sequence[Completion], model: str) -> dict[str, Any]:
    """Returns the body for vLLM's /v1/completions, which samples with `seed`, `seed` + 1, ..."""
    params = group[0].params
    return {
        "model": model,
        "prompt": group[0].prompt.tolist(),
        "n": len(group),
        "seed": seed_from_key(group[0].key),
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        **_shared_settings(params),
        "top_k": params.top_k,
        "stop_token_ids": list(group[0].stop_ids),
        "ignore_eos": True,  # stop_token_ids include the end-of-sequence tokens
        **(
            {"structured_outputs": {_VLLM_NAMES[params.constraint[0]]: params.constraint[1]}}
            if params.constraint
            else {}
        ),
        "logprobs": 1,
        "return_token_ids": True,
    }


def parse_vllm(response: Any) -> list[RemoteCompletion]:
    """Returns the completions in a response of /v1/completions."""
    completions = []
    for choice in sorted(response["choices"], key=lambda choice: choice["index"]):
        logps = choice["logprobs"]["token_logprobs"]
        completions.append(
            RemoteCompletion(list(choice["token_ids"]), logps, choice["text"], choice["finish_reason"], logps)
        )
    return completions


def sglang_request(group: Sequence[Completion]) -> dict[str, Any]:
    """Returns the body for SGLang's /generate, without a seed, which all rows would share."""
    params = group[0].params
    settings = {
        "n": len(group),
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        **_shared_settings(params),
        "top_k": params.top_k or -1,
        "stop_token_ids": list(group[0].stop_ids),
        "ignore_eos": not group[0].stop_ids,  # which ignores the stop tokens too
        **(dict([params.constraint]) if params.constraint else {}),
    }
    return {"input_ids": group[0].prompt.tolist(), "sampling_params": settings, "return_logprob": True}


def parse_sglang(rows: Sequence[Any]) -> list[RemoteCompletion]:
    """Returns the completions in a response of /generate."""
    completions = []
    for row in rows:
        info = row["meta_info"]
        logps = [logp for logp, *_ in info["output_token_logprobs"]]
        tokens = [token for _, token, *_ in info["output_token_logprobs"]]
        completions.append(RemoteCompletion(tokens, logps, row["text"], info["finish_reason"]["type"], logps))
    return completions


def seed_from_key(key: np.ndarray) -> int:
    """Returns a seed of 62 bits, to which small numbers can be added, from a key [2] uint32."""
    return (int(key[0]) << 32 | int(key[1])) >> 2


def _shared_settings(params: SamplingParams) -> dict[str, Any]:
    """Returns what both servers call and mean as `SamplingParams` does: its real numbers, and the stop strings.

    Raises:
        RunError: A parameter is set that these servers do not have.
    """
    for name in SAMPLER.keys() - KNOWN:
        if getattr(params, name) != SAMPLER[name]:
            raise RunError(f"servers of vLLM and SGLang have no {name}; leave it out, or sample with groupax serve")
    return {
        **{name: getattr(params, name) for name in SHARED},
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "stop": list(params.stop),
    }


def _control(server: RemoteServer, method: str, path: str, body: Any, needs: str) -> Any:
    """Sends a control request, whose refusal ends the run unless the server is busy."""
    try:
        return server.request(method, path, body)
    except RefusedError as refused:
        if refused.status in BUSY:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"{path} returned {refused}", None) from refused
        raise RunError(f"{server.url}{path} returned {refused}; {needs}") from refused
