"""A server that answers as vLLM does, by its schemas, with tokens from our engine."""

import json
import threading
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax import Engine, SamplingParams, load_model

# Of vLLM's CompletionRequest: those that a client may send.
VLLM_FIELDS = {
    *("model", "prompt", "n", "seed", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos"),
    *("logprobs", "return_token_ids"),
}


class VLLM:
    """`vllm serve FOLDER`."""

    def __init__(self, folder, tokenizer, dev_mode=True, logprobs_mode="raw_logprobs", with_ids=True):
        routes = [("GET", "/v1/models", self.models), ("POST", "/v1/completions", self.complete)]
        if dev_mode:  # VLLM_SERVER_DEV_MODE=1
            routes += [
                ("POST", "/collective_rpc", self.collective_rpc),
                ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
                ("GET", "/server_info", self.server_info),
            ]
        self.engine = Engine.of(load_model(folder), tokenizer, chunk_steps=8, kv_bytes=1 << 27)
        self.lock, self.seen, self.num_sampled = threading.Lock(), [], 0
        self.app = Starlette(routes=[Route(path, self.serving(what), methods=[how]) for how, path, what in routes])
        self.name, self.logprobs_mode, self.with_ids = str(folder), logprobs_mode, with_ids
        self.cached = False  # prefixes under other weights

    def serving(self, what):
        async def endpoint(request):
            body = await request.body()
            if body and request.headers.get("content-type") != "application/json":
                return JSONResponse({"detail": "Unsupported Media Type: Only 'application/json' is allowed"}, 415)
            self.seen.append((request.url.path, json.loads(body) if body else dict(request.query_params)))
            return await run_in_threadpool(self.answer, what, self.seen[-1][1])

        return endpoint

    def answer(self, what, body):
        with self.lock:
            return what(body)

    def rows(self, ids, settings, seeds):
        """A completion per seed."""
        prompt, sequences = np.array(ids, np.int32), []
        for index, seed in enumerate(seeds):
            sequences += self.engine.sequences([prompt], SamplingParams(seed=seed, **settings), first_prompt=index)
        return sorted(self.engine.stream(sequences), key=lambda sequence: sequence.prompt_index)

    def models(self, _):
        card = {"id": self.name, "object": "model", "created": 1, "owned_by": "vllm", "root": self.name, "parent": None}
        return JSONResponse({"object": "list", "data": [card]})

    def complete(self, body):
        if body["model"] != self.name:
            return told(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if unknown := body.keys() - VLLM_FIELDS:
            return told(400, f"what is {unknown}?", "BadRequestError")
        assert not self.cached, "tokens of old weights"
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        settings = {name: body[name] for name in (*names, "top_k", "max_tokens", "min_tokens", "ignore_eos")}
        settings |= {"stop": tuple(body["stop"]), "stop_token_ids": tuple(body["stop_token_ids"])}
        settings["logit_bias"] = {int(token): bias for token, bias in (body["logit_bias"] or {}).items()}
        rows = self.rows(body["prompt"], settings, range(body["seed"], body["seed"] + body["n"]))
        self.num_sampled += len(rows)
        of_draws = self.logprobs_mode == "processed_logprobs"
        choices = []
        for index, row in reversed([*enumerate(rows)]):
            logps = row.sampler_logps if of_draws else row.policy_logps
            tops = [{f"token {token}": logp} for token, logp in zip(row.tokens, logps, strict=True)]
            lists = {"text_offset": [0] * len(logps), "tokens": [*map(str, row.tokens)], "top_logprobs": tops}
            choice = {"index": index, "text": row.text, "logprobs": {"token_logprobs": logps, **lists}}
            choice |= {"finish_reason": row.finish_reason, "stop_reason": None}
            ids = {"token_ids": row.tokens, "prompt_token_ids": body["prompt"]}
            choices.append({**choice, **(ids if self.with_ids and body["return_token_ids"] else {})})
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "model": self.name, "choices": choices})

    def collective_rpc(self, body):
        assert body["method"] == "reload_weights"
        if not Path(body["kwargs"]["weights_path"]).is_dir():
            return Response("Internal Server Error", 500, media_type="text/plain")
        self.engine.params = load_model(body["kwargs"]["weights_path"]).params
        self.cached = True
        return JSONResponse({"results": [None]})

    def reset_prefix_cache(self, _):
        self.cached = False
        return Response(status_code=200)

    def server_info(self, query):
        assert query == {"config_format": "json"}
        return JSONResponse({"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}, "vllm_env": {}})


def told(status, message, kind):
    """vLLM's error object."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
