"""The command `groupax serve`. Imports what it needs when it runs."""

import os
import resource
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupax.parallel.sockets import is_loopback, listen
from groupax.serve.notices import Notices
from groupax.settings import environment as env
from groupax.settings.command_line import parsed
from groupax.settings.compute import DecodingWeights

OTHER_FILES = 256  # that the server has open beside its connections

if TYPE_CHECKING:
    from groupax.engine.engine import Engine
    from groupax.models.checkpoint import Model
    from groupax.serve.loop import EngineLoop


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model with OpenAI's interface: completions and chats; with /health and /metrics."""

    model: str
    """A folder or a Hugging Face hub id, of a model or an adapter."""
    name: str | None = None
    """What clients call the model; by default as --model has it."""
    adapter: tuple[str, ...] = ()
    """Adapters of the model, each NAME=FOLDER, served under their names beside it. They share its weights, but for
    copies of all of them that --weights and a --mesh other than that of --tp make for each; each has an engine and a
    part of the memory for keys and values of its own."""
    host: str = "127.0.0.1"
    """Where to listen: by default only this machine can connect."""
    port: int = 8000
    """0 takes a free one."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which has to come with each request, also from the environment variable GROUPAX_API_KEY."""
    mesh: tuple[int, int, int, int, int] | None = None
    """Sizes of the axes dp, fsdp, ep, tp, sp, one of them -1, over which the weights are spread in memory; without --tp
    each device decodes with all of them. By default what --tp says, and a copy on every device without it, for large
    weights on CPU on one."""
    tp: int = 1
    """So many devices share the weights, each with some of the heads: for models that one cannot hold, or to answer
    sooner. With 1 each device has all weights and rows of its own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights in memory; by default as the files have them."""
    chat_template: str | None = None
    """A template for a tokenizer without one: chatml, plain, or a file."""
    weights: DecodingWeights = "same"
    """Weights to decode with: as the model has them, or with fewer bits."""
    kv_cache_gb: float | None = None
    """Most memory of a device for keys and values, in GB; by default 80 % of what is free."""
    prefix_cache_gb: float = 0.0
    """Host memory for what was computed for finished requests, so that conversations go on quicker."""
    max_concurrent_rows: int = 256
    """Most completions decoded at once."""
    max_queue: int = 1024
    """Most completions that wait or run; further requests are told to come back (429)."""
    max_completions: int = 256
    """Most completions of one request, prompts times n."""
    chunk_steps: int = 32
    """Tokens between two visits to the host: fewer bring the first ones sooner, more are quicker."""
    warmup: tuple[int, ...] = (1, 8)
    """Numbers of clients at once for which all is compiled at the start; /ready answers 200 when it is. None compiles
    for requests as they come, which wait for that. Compiled programs are kept on disk for the next start."""
    warmup_tokens: int = 256
    """Tokens of prompts and of completions, at most, for which that is done."""
    default_max_tokens: int = 1024
    """The longest answer of a chat that sets no limit."""
    max_body_mb: float = 4.0
    """Largest request, in MB."""
    request_timeout_s: float = 600.0
    """A request that takes longer is given up."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call a server without keys (the Host of their requests), beside addresses and, where
    others can reach it, this machine's own names. Other names are refused: a stranger's web page could use them."""
    max_connections: int = 1024
    """Most connections at once. For one more, the one is closed that has waited longest for its client."""
    max_header_kb: float = 32.0
    """Largest head of a request, in KB."""
    receive_timeout_s: float = 30.0
    """A request has to arrive in that time; large ones get one second more for each 64 KiB that arrive."""
    drain_s: int = 60
    """After SIGTERM no connection is accepted; what runs has so long to end."""


def serve(arguments: Sequence[str]) -> None:
    """`groupax serve`."""
    command = parsed(Serve, "serve", arguments)
    try:
        import uvicorn

        from groupax.serve.app import Limits, create_app
        from groupax.serve.connections import Bounds, Connection, Connections
    except ImportError as error:
        raise ValueError(f"a server needs starlette and uvicorn: pip install 'groupax[serve]' ({error})") from error
    from groupax.serve.loop import EngineLoop

    keys = tuple(key for key in (*command.api_key, os.environ.get(env.API_KEY, "")) if key)
    listener = listen(command.host, command.port)  # before the model is loaded, so that one in use is told at once
    models = models_of(command)
    loop = EngineLoop(engines_of(command, models), command.max_queue).start()
    limits = Limits(
        api_keys=keys,
        max_body_bytes=int(command.max_body_mb * 1e6),
        max_completions=command.max_completions,
        default_max_tokens=command.default_max_tokens,
        request_timeout_s=command.request_timeout_s,
        host=command.host,
        allowed_hosts=command.allowed_hosts,
    )
    bounds = Bounds(
        max_connections=command.max_connections,
        max_header_bytes=int(command.max_header_kb * 1e3),
        receive_timeout_s=command.receive_timeout_s,
        send_timeout_s=limits.send_timeout_s,
    )
    _allow_open_files(command.max_connections)
    notices = Notices()
    config = uvicorn.Config(
        create_app(loop, limits, models, notices),
        http=partial(Connection, Connections(bounds, notices)),  # pyright: ignore[reportArgumentType]
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=command.drain_s,
    )
    if not is_loopback(command.host) and not keys:
        print(
            "anyone who reaches this address can use the server, other web sites' pages excepted; set --api_key to "
            "prevent that",
            flush=True,
        )
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(f"{', '.join(loop.engines)} at http://{host}:{address[1]}/v1", flush=True)
    loop.is_ready = False
    threading.Thread(target=_warm_up, args=(command, loop), name="warm-up", daemon=True).start()
    # uvicorn raises the signal that stopped it once more when all is answered; then there is nothing to stop
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        loop.close()


def _warm_up(command: Serve, loop: "EngineLoop") -> None:
    from groupax.serve.loop import ClosedError

    begun_s = time.monotonic()
    try:
        num = loop.warm_up(command.warmup, command.warmup_tokens)
    except ClosedError:  # stopped meanwhile
        return
    loop.is_ready = True
    clients = " and ".join(map(str, command.warmup)) or "no"
    print(
        f"ready: {num} programs for {clients} clients at once and {command.warmup_tokens} tokens were compiled in "
        f"{time.monotonic() - begun_s:.1f} s",
        flush=True,
    )


def models_of(command: Serve) -> "dict[str, Model]":
    """The models that a command asks for, by their names.

    Raises:
        ValueError: there is no such model or adapter, two have one name, or devices cannot share the weights.
    """
    from groupax.engine.tensor_parallel import load_sharded
    from groupax.models.checkpoint import load_adapter
    from groupax.parallel.mesh import make_mesh

    folders = dict(_named(text) for text in command.adapter)
    name = command.name or command.model
    if name in folders or len(folders) < len(command.adapter):
        raise ValueError(f"each model needs a name of its own, got {name} and {', '.join(command.adapter)}")
    mesh = make_mesh(command.mesh) if command.mesh else None
    base = load_sharded(command.model, command.dtype, mesh, command.tp)
    return {name: base, **{each: load_adapter(base, folder) for each, folder in folders.items()}}


def engines_of(command: Serve, models: "Mapping[str, Model]") -> "dict[str, Engine]":
    """An engine for each of these models; what their weights leave free is shared out for keys and values."""
    import jax

    from groupax.data.tokenizer import load_tokenizer
    from groupax.engine.engine import Engine
    from groupax.engine.plan import FREE_FRAC
    from groupax.parallel.peak import free_memory_bytes

    base = next(iter(models.values()))
    assert base.source is not None, "a loaded model has a folder"
    tokenizer = load_tokenizer(base.source, command.chat_template)
    settings: dict[str, Any] = {
        "max_slots": command.max_concurrent_rows,
        "chunk_steps": command.chunk_steps,
        "weights": command.weights,
        "tp": command.tp,
        "prefix_bytes": int(command.prefix_cache_gb * 1e9 / len(models)),
    }
    engines = {each: Engine.of(model, tokenizer, **settings) for each, model in models.items()}
    jax.block_until_ready([engine.params for engine in engines.values()])  # which may be copies
    kv_gb = command.kv_cache_gb
    kv_bytes = FREE_FRAC * free_memory_bytes(base.mesh) if kv_gb is None else kv_gb * 1e9
    for engine in engines.values():
        engine.kv_bytes = int(kv_bytes / len(engines))
    return engines


def _allow_open_files(num_connections: int) -> None:
    """Have the system allow this process a file for each connection.

    Raises:
        ValueError: the system's limit is too low.
    """
    needed = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed:
        raise ValueError(
            f"--max_connections {num_connections} needs {needed} open files, and this system allows a process {hard}; "
            f"set --max_connections to at most {hard - OTHER_FILES}, or raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _named(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ValueError(f"--adapter must be NAME=FOLDER, got {text!r}")
    return name, Path(folder)
