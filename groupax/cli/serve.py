"""The command `groupax serve`, which imports its dependencies when it runs."""

import os
import resource
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupax.core.errors import require
from groupax.core.settings import environment as env
from groupax.core.settings.command_line import parsed
from groupax.core.settings.compute import DecodingWeights
from groupax.parallel.processes import is_loopback, listen

OTHER_FILES = 256  # open files of the server in addition to its connections

if TYPE_CHECKING:
    import uvicorn

    from groupax.engine.engine import Engine
    from groupax.models.weights.checkpoint import Model
    from groupax.serve.loop import EngineLoop


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model with OpenAI's API for completions and chats, with /health and /metrics."""

    model: str
    """Folder or Hugging Face Hub id of a model or an adapter."""
    name: str | None = None
    """Name of the model for clients; by default the value of --model."""
    adapter: tuple[str, ...] = ()
    """Adapters of the model, each as NAME=FOLDER, served under their names in addition to the model. They share its
    weights, and its requests and theirs are decoded in one batch."""
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can connect."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which every request must have; GROUPAX_API_KEY in the environment is another one."""
    mesh: tuple[int, int, int, int, int] | None = None
    """Sizes of the axes dp, fsdp, ep, tp, sp, one of them -1, over which the stored weights are sharded; without --tp
    each device decodes with all of them. By default as --tp requires; without it a copy on every device, or on one
    device for large weights on CPU."""
    tp: int = 1
    """Number of devices that share the weights, each with some of the heads: for models that do not fit one device, or
    for lower latency. With 1 each device has all weights and its own rows."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights in memory; by default that of the files."""
    chat_template: str | None = None
    """Template for a tokenizer without one: chatml, plain, or a file."""
    weights: DecodingWeights = "same"
    """Weights to decode with: the model's own, or with fewer bits."""
    kv_cache_gb: float | None = None
    """Most memory of a device for the KV cache, in GB; by default 80 % of the free memory."""
    max_concurrent_rows: int = 256
    """Most completions decoded at once."""
    max_queue: int = 1024
    """Most completions that wait or run; further requests get status 429."""
    max_completions: int = 256
    """Most completions of one request, prompts times n."""
    chunk_steps: int = 32
    """Most tokens per decode chunk. Chunks have fewer where they take longer than about 25 ms, so that tokens and new
    requests wait less, and more where the work between two chunks takes a tenth of their time."""
    warmup: tuple[int, ...] = (1, 8, 32)
    """Numbers of simultaneous clients to compile for at the start; with most of them requests of any kind find a
    program. /ready returns 200 afterwards. If empty, requests wait for their compilation. Compiled programs are kept on
    disk for the next start."""
    warmup_tokens: int = 256
    """Most tokens of prompts and of completions that the warm-up compiles for."""
    default_max_tokens: int = 1024
    """Longest completion, in tokens, of a chat that sets no limit."""
    max_body_mb: float = 4.0
    """Largest request, in MB."""
    request_timeout_s: float = 600.0
    """Seconds after which a request is cancelled."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call a server without keys (the Host of their requests), in addition to addresses and,
    where others can reach it, this machine's own names. Other names are refused: another site's page could use them."""
    max_connections: int = 1024
    """Most connections at once; while there are more, requests get status 503. A proxy in front keeps slow clients
    away."""
    receive_timeout_s: float = 30.0
    """Seconds in which the body of a request must arrive; else it gets status 408."""
    log_requests: bool = True
    """Print a line for each finished request: status, model, tokens and seconds, not its text."""
    drain_s: int = 60
    """Seconds for running requests to finish after SIGTERM, when no new connections are accepted."""


def serve(argv: Sequence[str]) -> None:
    """Runs `groupax serve`."""
    command = parsed(Serve, "serve", argv)
    require("serve", "the server")
    import uvicorn

    from groupax.serve.loop import EngineLoop

    keys = tuple(key for key in (*command.api_key, os.environ.get(env.API_KEY, "")) if key)
    listener = listen(command.host, command.port)  # before the model is loaded, so that a port in use fails at once
    _allow_open_files(command.max_connections)  # likewise
    models = models_of(command)
    loop = EngineLoop(engine_of(command, models), next(iter(models)), command.max_queue).start()
    config = _uvicorn_config(command, loop, models, keys)
    if not is_loopback(command.host) and not keys:
        print(
            "anyone who reaches this address can use the server, except pages of other web sites; set --api_key to "
            "prevent that",
            flush=True,
        )
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(f"{', '.join(loop.names)} at http://{host}:{address[1]}/v1", flush=True)
    loop.is_ready = False
    threading.Thread(target=_warm_up, args=(command, loop), name="warm-up", daemon=True).start()
    # uvicorn raises the signal that stopped it again after the last response, when nothing is left to stop
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        loop.close()


def _uvicorn_config(
    command: Serve, loop: "EngineLoop", models: "Mapping[str, Model]", keys: tuple[str, ...]
) -> "uvicorn.Config":
    import uvicorn

    from groupax.serve.app import Limits, create_app

    limits = Limits(
        api_keys=keys,
        max_body_bytes=int(command.max_body_mb * 1e6),
        max_completions=command.max_completions,
        default_max_tokens=command.default_max_tokens,
        request_timeout_s=command.request_timeout_s,
        receive_timeout_s=command.receive_timeout_s,
        host=command.host,
        allowed_hosts=command.allowed_hosts,
    )
    write_line = partial(print, flush=True) if command.log_requests else lambda _: None
    return uvicorn.Config(
        create_app(loop, limits, None if command.adapter else next(iter(models.values())), write_line),
        http="h11",  # limits the line and the headers of a request to 64 KiB, unlike httptools
        limit_concurrency=command.max_connections + 1,
        ws="none",
        log_level="error",  # not a line for each malformed request
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=command.drain_s,
    )


def _warm_up(command: Serve, loop: "EngineLoop") -> None:
    from groupax.serve.loop import ClosedError

    start_s = time.monotonic()
    try:
        num = loop.warm_up(command.warmup, command.warmup_tokens)
    except ClosedError:  # stopped meanwhile
        return
    loop.is_ready = True
    clients = " and ".join(map(str, command.warmup)) or "no"
    print(
        f"ready: compiled {num} programs for {clients} simultaneous clients and {command.warmup_tokens} tokens in "
        f"{time.monotonic() - start_s:.1f} s",
        flush=True,
    )


def models_of(command: Serve) -> "dict[str, Model]":
    """Loads the models of a command, by their names."""
    from groupax.engine.core import load_sharded
    from groupax.models.weights.checkpoint import load_adapter
    from groupax.parallel.mesh import make_mesh

    folders = dict(_named(text) for text in command.adapter)
    name = command.name or command.model
    if name in folders or len(folders) < len(command.adapter):
        raise ValueError(f"each model needs a different name, got {name} and {', '.join(command.adapter)}")
    mesh = make_mesh(command.mesh) if command.mesh else None
    base = load_sharded(command.model, command.dtype, mesh, command.tp)
    return {name: base, **{each: load_adapter(base, folder) for each, folder in folders.items()}}


def engine_of(command: Serve, models: "Mapping[str, Model]") -> "Engine":
    """Creates the engine of a command's model and its adapters."""
    from groupax.data.tokenizer import load_tokenizer
    from groupax.engine.engine import Engine

    base, *_ = models.values()
    adapters = dict(list(models.items())[1:])
    assert base.source is not None, "a loaded model has a folder"
    engine = Engine.of(
        base,
        load_tokenizer(base.source, command.chat_template),
        adapters,
        max_slots=command.max_concurrent_rows,
        chunk_steps=command.chunk_steps,
        weights=command.weights,
        tp=command.tp,
    )
    kv_gb = command.kv_cache_gb
    engine.kv_bytes = engine.plan().max_tokens * engine.bytes_per_token if kv_gb is None else int(kv_gb * 1e9)
    return engine


def _named(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ValueError(f"--adapter must be NAME=FOLDER, got {text!r}")
    return name, Path(folder)


def _allow_open_files(num_connections: int) -> None:
    """Raises this process's limit of open files to one for each connection, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
