"""Servers that answer as vLLM and SGLang do, by their schemas, with tokens from our engine."""

import json
import threading
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax import Engine, SamplingParams, load_model

# Of vLLM's CompletionRequest and SGLang's SamplingParams: those that a client may send.
VLLM_FIELDS = {
    *("model", "prompt", "n", "seed", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos"),
    *("logprobs", "return_token_ids"),
}
SGLANG_FIELDS = {
    *("n", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos"),
}


class Server:
    """What both have: a model whose weights come from a folder."""

    def __init__(self, folder, tokenizer, routes):
        self.model, self.tokenizer = load_model(folder), tokenizer
        self.engine = Engine.of(self.model, tokenizer, chunk_steps=8, kv_bytes=1 << 27)
        self.lock, self.seen, self.num_sampled = threading.Lock(), [], 0
        self.app = Starlette(routes=[Route(path, self.serving(what), methods=[how]) for how, path, what in routes])

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
            return what(self, body)

    def load(self, folder):
        self.engine.params = load_model(folder).params

    def rows(self, ids, settings, seeds):
        """A completion per seed."""
        prompt, sequences = np.array(ids, np.int32), []
        for index, seed in enumerate(seeds):
            sequences += self.engine.sequences([prompt], SamplingParams(seed=seed, **settings), first_prompt=index)
        return sorted(self.engine.stream(sequences), key=lambda sequence: sequence.prompt_index)


def settings_of(body):
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    biases = {int(token): bias for token, bias in (body["logit_bias"] or {}).items()}
    stops = {"stop": tuple(body["stop"]), "stop_token_ids": tuple(body["stop_token_ids"])}
    return {name: body[name] for name in names} | stops | {"logit_bias": biases}


class VLLM(Server):
    """`vllm serve FOLDER`."""

    def __init__(self, folder, tokenizer, dev_mode=True, logprobs_mode="raw_logprobs", with_ids=True):
        routes = [("GET", "/v1/models", VLLM.models), ("POST", "/v1/completions", VLLM.complete)]
        if dev_mode:  # VLLM_SERVER_DEV_MODE=1
            routes += [
                ("POST", "/collective_rpc", VLLM.collective_rpc),
                ("POST", "/reset_prefix_cache", VLLM.reset_prefix_cache),
                ("GET", "/server_info", VLLM.server_info),
            ]
        super().__init__(folder, tokenizer, routes)
        self.name, self.logprobs_mode, self.with_ids = str(folder), logprobs_mode, with_ids
        self.cached = False  # prefixes under other weights

    def models(self, _):
        card = {"id": self.name, "object": "model", "created": 1, "owned_by": "vllm", "root": self.name, "parent": None}
        return JSONResponse({"object": "list", "data": [card]})

    def complete(self, body):
        if body["model"] != self.name:
            return told(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if unknown := body.keys() - VLLM_FIELDS:
            return told(400, f"what is {unknown}?", "BadRequestError")
        assert not self.cached, "tokens of old weights"
        settings = settings_of(body) | {name: body[name] for name in ("top_k", "max_tokens", "min_tokens")}
        seeds = range(body["seed"], body["seed"] + body["n"])
        rows = self.rows(body["prompt"], {**settings, "ignore_eos": body["ignore_eos"]}, seeds)
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
        self.load(body["kwargs"]["weights_path"])
        self.cached = True
        return JSONResponse({"results": [None]})

    def reset_prefix_cache(self, _):
        self.cached = False
        return Response(status_code=200)

    def server_info(self, query):
        assert query == {"config_format": "json"}
        return JSONResponse({"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}, "vllm_env": {}})


class SGLang(Server):
    """`python -m sglang.launch_server --model-path FOLDER`."""

    def __init__(self, folder, tokenizer):
        routes = [
            ("GET", "/v1/models", SGLang.models),
            ("POST", "/generate", SGLang.generate),
            ("POST", "/update_weights_from_disk", SGLang.update_weights_from_disk),
        ]
        super().__init__(folder, tokenizer, routes)
        self.name = str(folder)
        self.weight_version = "default"

    def models(self, _):
        card = {"id": self.name, "object": "model", "created": 1, "owned_by": "sglang", "root": self.name}
        return JSONResponse({"object": "list", "data": [card]})

    def generate(self, body):
        params = body["sampling_params"]
        if (
            unknown := (body.keys() - {"input_ids", "sampling_params", "return_logprob"})
            | params.keys() - SGLANG_FIELDS
        ):
            return JSONResponse({"error": {"message": f"what is {unknown}?"}}, 400)
        settings = settings_of(params) | {
            "max_tokens": params["max_new_tokens"],
            "min_tokens": params["min_new_tokens"],
        }
        settings |= {"top_k": max(params["top_k"], 0), "ignore_eos": params["ignore_eos"]}
        if params["ignore_eos"]:
            settings["stop_token_ids"] = ()
        seeds = range(self.num_sampled, self.num_sampled + params["n"])  # as it pleases
        rows = self.rows(body["input_ids"], settings, seeds)
        self.num_sampled += len(rows)
        answers = []
        for row in rows:
            ends = {"stop": {"type": "stop", "matched": row.tokens[-1]}, "length": {"type": "length", "length": 12}}
            logps = [[logp, token, None] for logp, token in zip(row.policy_logps, row.tokens, strict=True)]
            meta = {"id": "1", "finish_reason": ends[row.finish_reason], "weight_version": self.weight_version}
            meta |= {"output_token_logprobs": logps, "input_token_logprobs": []}
            answers.append({"text": row.text, "output_ids": row.tokens, "meta_info": meta})
        return JSONResponse(answers[0] if params["n"] == 1 else answers)

    def update_weights_from_disk(self, body):
        if not Path(body["model_path"]).is_dir():
            answer = {"success": False, "message": "Failed to get model weights", "num_paused_requests": 0}
            return JSONResponse(answer, 400)
        self.load(body["model_path"])
        self.name, self.weight_version = body["model_path"], body["weight_version"]
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )


def told(status, message, kind):
    """vLLM's error object."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
