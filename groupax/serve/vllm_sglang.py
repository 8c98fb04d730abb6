"""Rollouts from servers that are not groupax's: vLLM and SGLang.

weights ──► a folder that both sides see ──► the server loads it, and forgets what it had computed with the old ones
prompts ──► token ids, with the log-probs of those that were drawn

Sources: vLLM's entrypoints/openai/completion/protocol.py and entrypoints/serve/dev (rpc, cache, server_info); SGLang's
srt/entrypoints/http_server.py and srt/managers/io_struct.py.
"""

import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.engine.sequence import Sequence as Completion
from groupax.errors import RunError
from groupax.models.checkpoint import Model
from groupax.models.saving import save_model
from groupax.models.specs import Params
from groupax.serve.remote import Refused, Remote
from groupax.settings.sampling import SamplingParams
from groupax.types import FinishReason

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}  # by what they say of their models
BUSY = (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
KEPT_VERSIONS = 2  # in the folder: one server may still read the last but one


@dataclass(frozen=True)
class Answered:
    """A completion as a server tells it.

    Attributes:
        tokens: those that were drawn, a stop token included.
        logps: the server's natural log-prob of each.
        text: of them.
        finish_reason: "stop" or "length"; anything else is no completion.
    """

    tokens: list[int]
    logps: list[float]
    text: str
    finish_reason: str


@runtime_checkable
class Other(Protocol):
    """A server that is not groupax's.

    Attributes:
        name: of the program.
    """

    name: str

    def complete(self, group: list[Completion], version: int, connection: HTTPConnection) -> list[Completion]:
        """A prompt's sequences, completed.

        Args:
            group: new_sequences, of one prompt.
            version: of the weights that it has taken over.
            connection: an open one with it.

        Raises:
            Refused: the server says no, or has other weights.
            RunError: it can never do it.
        """
        ...

    def reload(self, folder: Path) -> None:
        """Have it take over the weights in a folder.

        Raises:
            Refused: it is busy.
            RunError: it does not do that.
        """
        ...


class WeightsFolder:
    """Where servers on this and other machines find the weights: the newest two versions, until the process ends.

    Args:
        path: of a folder, by the name that all of them have for it; the versions are in a new one there.
        model: the architecture, and how its files are written.
        dtype: of the weights in the files.
        is_own: nobody else writes to `path`: what a process that was killed has left there is removed first.

    Attributes:
        path: of the new folder.
    """

    def __init__(self, path: Path, model: Model, dtype: Any, is_own: bool = False) -> None:
        self.path = path.absolute() / secrets.token_hex(4)
        self._model, self._dtype, self._is_own = replace(model, adapter=None), dtype, is_own
        self._lock = threading.Lock()
        self._written: list[int] = []
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def written(self, params: Params, version: int) -> Path:
        """The folder with these weights as a model's files, an adapter added to its base; written at the first call.

        Args:
            params: the weights.
            version: says which they are.
        """
        with self._lock:
            folder = self.path / f"version-{version}"
            if version not in self._written:
                if self._is_own and not self._written:
                    shutil.rmtree(self.path.parent, ignore_errors=True)
                self.path.mkdir(parents=True, exist_ok=True)
                save_model(replace(self._model, params=params), folder, dtype=self._dtype)
                self._written.append(version)
                for old in self._written[:-KEPT_VERSIONS]:
                    shutil.rmtree(self.path / f"version-{old}", ignore_errors=True)
                del self._written[:-KEPT_VERSIONS]
            return folder


def dialect_of(server: Remote, model: str | None) -> Other | None:
    """How to talk with a server; None with groupax's own.

    Args:
        server: any.
        model: its name there; None for the first.

    Raises:
        RunError: it is neither groupax's nor one that takes weights, or has no such model.
        Refused, OSError, http.client.HTTPException: as `Remote.ask`.
    """
    cards = server.ask("GET", "/v1/models")["data"]
    owner = str(cards[0].get("owned_by")) if cards else "nobody"
    if owner == "groupax":
        return None
    if owner not in NAMES:
        raise RunError(
            f"{server.url} is a server of {owner!r}, which is given no weights; rollouts come from groupax serve, "
            f"{' or '.join(NAMES.values())}"
        )
    if owner == "sglang":
        return SGLang(server)
    names = [card["id"] for card in cards]
    if model is not None and model not in names:
        raise RunError(f"{server.url} has no model {model!r}; it has {', '.join(names)}")
    return VLLM(server, model or names[0])


class VLLM:
    """A server of vLLM, started with VLLM_SERVER_DEV_MODE=1.

    Args:
        server: where it is.
        model: its name there.
    """

    name = NAMES["vllm"]

    def __init__(self, server: Remote, model: str) -> None:
        self._server, self._model = server, model
        self._logprobs_mode: str | None = None

    def complete(self, group: list[Completion], version: int, connection: HTTPConnection) -> list[Completion]:
        """See `Other`. Its log-probs have to be those that it draws with."""
        if not draws_from_logits(group[0].params):
            self._check_mode()
        answer = self._server.ask("POST", "/v1/completions", vllm_request(group, self._model), connection)
        return _completed(group, vllm_answers, answer, version, self._server.url)

    def reload(self, folder: Path) -> None:
        """See `Other`. What it cached of prompts goes too."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        needs = "it has to be a vLLM whose reload_weights takes a weights_path, started with VLLM_SERVER_DEV_MODE=1"
        _control(self._server, "POST", "/collective_rpc", body, f"{needs}, and to see {folder}")
        _control(self._server, "POST", "/reset_prefix_cache?reset_running_requests=true", None, needs)
        self._logprobs_mode = None

    def _check_mode(self) -> None:
        if self._logprobs_mode is None:
            needs = "it tells of its settings only if started with VLLM_SERVER_DEV_MODE=1"
            told = _control(self._server, "GET", "/server_info?config_format=json", None, needs)
            try:
                self._logprobs_mode = str(told["vllm_config"]["model_config"]["logprobs_mode"])
            except (KeyError, TypeError) as error:
                raise RunError(f"{self._server.url} does not tell its logprobs_mode; use a newer vLLM") from error
        if self._logprobs_mode != "processed_logprobs":
            raise RunError(
                f"{self._server.url} tells {self._logprobs_mode}, which are not of the distribution that it draws "
                "from unless temperature is 1 and nothing is truncated; start vllm serve with "
                "--logprobs-mode processed_logprobs"
            )


class SGLang:
    """A server of SGLang.

    Args:
        server: where it is.
    """

    name = NAMES["sglang"]

    def __init__(self, server: Remote) -> None:
        self._server = server
        self._state = ""  # of the weights, as answers tell it

    def complete(self, group: list[Completion], version: int, connection: HTTPConnection) -> list[Completion]:
        """See `Other`. Answers tell which weights made them."""
        answer = self._server.ask("POST", "/generate", sglang_request(group), connection)
        rows = answer if isinstance(answer, list) else [answer]
        found = {row.get("meta_info", {}).get("weight_version") for row in rows}
        if found != {self._state}:
            raise Refused(HTTPStatus.CONFLICT, f"weights {sorted(map(str, found))} have made it", "other_weights")
        return _completed(group, sglang_answers, rows, version, self._server.url)

    def reload(self, folder: Path) -> None:
        """See `Other`."""
        body = {"model_path": str(folder), "weight_version": str(folder), "flush_cache": True}
        _control(self._server, "POST", "/update_weights_from_disk", body, f"it has to see {folder}")
        self._state = str(folder)


def draws_from_logits(params: SamplingParams) -> bool:
    """Whether completions are drawn from softmax(logits), neither scaled nor changed nor truncated."""
    return params == SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def vllm_request(group: Sequence[Completion], model: str) -> dict[str, Any]:
    """The body for vLLM's /v1/completions; the rows draw with `seed`, `seed` + 1, ..."""
    params = group[0].params
    return {
        "model": model,
        "prompt": group[0].prompt.tolist(),
        "n": len(group),
        "seed": seed_of(group[0].key),
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        **_shared_settings(params),
        "top_k": params.top_k,
        "stop_token_ids": list(group[0].stop_ids),
        "ignore_eos": True,  # the stop tokens are all there are
        "logprobs": 1,
        "return_token_ids": True,
    }


def vllm_answers(answer: Any) -> list[Answered]:
    """The completions in an answer of /v1/completions.

    Raises:
        KeyError, TypeError: it has no token ids or no log-probs.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [
        Answered(
            list(choice["token_ids"]), choice["logprobs"]["token_logprobs"], choice["text"], choice["finish_reason"]
        )
        for choice in choices
    ]


def sglang_request(group: Sequence[Completion]) -> dict[str, Any]:
    """The body for SGLang's /generate. No seed is sent: it would be the same for all rows."""
    params = group[0].params
    settings = {
        "n": len(group),
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        **_shared_settings(params),
        "top_k": params.top_k or -1,
        "stop_token_ids": list(group[0].stop_ids),
        "ignore_eos": not group[0].stop_ids,  # which it takes to mean the stop tokens too
    }
    return {"input_ids": group[0].prompt.tolist(), "sampling_params": settings, "return_logprob": True}


def sglang_answers(rows: Sequence[Any]) -> list[Answered]:
    """The completions in an answer of /generate.

    Raises:
        KeyError, TypeError: it has no log-probs.
    """
    told = [row["meta_info"] for row in rows]
    return [
        Answered(
            [token for _, token, *_ in meta["output_token_logprobs"]],
            [logp for logp, *_ in meta["output_token_logprobs"]],
            row["text"],
            meta["finish_reason"]["type"],
        )
        for row, meta in zip(rows, told, strict=True)
    ]


def seed_of(key: np.ndarray) -> int:
    """A seed of 62 bits, so that a few can be added, from a row's key [2] uint32."""
    return (int(key[0]) << 32 | int(key[1])) >> 2


def _shared_settings(params: SamplingParams) -> dict[str, Any]:
    """Returns what both servers call and mean as `SamplingParams` does: its real numbers, and the stop strings."""
    return {
        **{field.name: getattr(params, field.name) for field in fields(params) if field.type is float},
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "stop": list(params.stop),
    }


def _completed(
    group: list[Completion], read: Callable[[Any], list[Answered]], answer: Any, version: int, url: str
) -> list[Completion]:
    try:
        answers = read(answer)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{url} answers without token ids or log-probs ({error!r}); vLLM has to be 0.10.2 or newer"
        ) from error
    for answered in answers:
        if answered.finish_reason not in FINISH_REASONS:
            message = f"a completion ended with {answered.finish_reason!r}"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message, None)
        if not 0 < len(answered.tokens) == len(answered.logps):
            raise RunError(f"{url} answers with {len(answered.tokens)} tokens and {len(answered.logps)} log-probs")
    if len(answers) != len(group):
        raise RunError(f"{url} answers with {len(answers)} completions of {len(group)}")
    for sequence, answered in zip(group, answers, strict=True):
        sequence.tokens, sequence.text = answered.tokens, answered.text
        sequence.policy_logps = sequence.sampler_logps = answered.logps
        sequence.versions = [version] * len(answered.tokens)
        sequence.finish_reason = FINISH_REASONS[answered.finish_reason]
    return group


def _control(server: Remote, method: str, path: str, body: Any, needs: str) -> Any:
    """An answer to what only the run asks; a no is the end, unless the server is busy."""
    try:
        return server.ask(method, path, body)
    except Refused as refused:
        if refused.status in BUSY:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{path} says {refused}", None) from refused
        raise RunError(f"{server.url}{path} says {refused}; {needs}") from refused
