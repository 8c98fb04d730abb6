"""Programs as environments: what already talks to a model is trained by giving it another base URL. Imports no jax."""

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groupax.core.errors import InfrastructureError, require
from groupax.episodes.program import Endpoint, Listening, ProgramClass
from groupax.parallel.processes import LAST_PORT, is_loopback

POLL_S = 0.2  # in which a program learns that nobody waits for it any more
_LOOPS: list[asyncio.AbstractEventLoop] = []  # that no program uses
LAST_CHARACTERS = 2000  # of what a command that failed has written


def program(
    run: Callable[..., Any] | str | Sequence[str],
    *,
    name: str | None = None,
    score: str | None = "default",
    timeout_s: int | float = 600.0,
    max_concurrent: int | None = None,
    error_reward: int | float | None = None,
    env: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    public_url: str | None = None,
) -> ProgramClass:
    """Returns a program as an environment, for `GRPOTrainer(environments=...)`.

    Args:
        run: A function or a coroutine function, which takes any of `row`, `seed`, `base_url`, `api_key`, `model`,
            `anthropic_base_url` and the columns of the dataset by name. Or a command, which finds these in its
            environment, and in which `{column}` stands for the text of a column, and `{base_url}` for that address.
        name: Name of the program in metrics; None for that of the function or of the command.
        score: The reward: "return" for what a function returns, a number or None; "exit" for 1 where a command exits
            with 0, else 0; "stdout" for the number in the last line that a command writes; None for none. By default
            "return" and "exit".
        timeout_s: Time limit of a run in seconds.
        max_concurrent: Most runs at the same time in each process; None for no limit.
        error_reward: Reward of a run that raises. None leaves its episode out of the comparison and of the loss after
            `environment_retries` attempts, as where an environment fails.
        env: Further variables for the environment of a command.
        host: Address of this machine at which the model is asked; "0.0.0.0" for programs that ask from elsewhere.
        port: Its port, of which each further process of the run takes the next one; 0 for a free one.
        public_url: Base address under which programs reach it, with "{port}" for the port, where this machine's name is
            not known to them; e.g. "https://trainer.example".

    Raises:
        ImportError: The packages of `groupax serve` are not installed.
        ValueError: An argument is out of range.

    Example:
        >>> async def my_agent(question, answer, base_url, api_key, model):
        ...     client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...     said = await ask(client, model, question)
        ...     return float(answer in said)
        >>> trainer = GRPOTrainer(model, environments=program(my_agent), ...)  # doctest: +SKIP
    """
    require("serve", "program(...)")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    if max_concurrent is not None and max_concurrent < 1:
        raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
    _check_listening(host, port, public_url)
    is_command = not callable(run)
    scores = ("exit", "stdout") if is_command else ("return",)
    score = scores[0] if score == "default" else score
    if score is not None and score not in scores:
        raise ValueError(f"score must be None or one of {', '.join(scores)} here, got {score!r}")
    if env and not is_command:
        raise ValueError("env is for commands; a function shares the environment of the trainer's process")
    if is_command:
        words = shlex.split(run) if isinstance(run, str) else [str(word) for word in run]
        if not words:
            raise ValueError("the command is empty")
        runner, default = partial(_run_command, words, score, dict(env or {})), Path(words[0]).name
    else:
        runner, default = partial(_run_function, run, score), getattr(run, "__name__", type(run).__name__)
    return ProgramClass(
        name=name or default,
        create=lambda: None,
        tools={},
        methods=frozenset(),
        reward_name=None if score is None else "",
        starts_alike=False,
        run=runner,
        timeout_s=timeout_s,
        max_concurrent=max_concurrent,
        error_reward=error_reward,
        listening=Listening(host, port, public_url),
    )


def _check_listening(host: str, port: int, public_url: str | None) -> None:
    if not 0 <= port <= LAST_PORT:
        raise ValueError(f"port must be between 0 and {LAST_PORT}, got {port}")
    url = urlsplit(public_url or "http://any")
    if url.scheme not in ("http", "https") or not url.netloc or url.query or url.fragment:
        raise ValueError(f"public_url must be the base of addresses, such as 'http://trainer:8100', got {public_url!r}")
    if public_url is not None and is_loopback(host):
        raise ValueError(
            f"public_url {public_url!r} is for programs that ask from elsewhere, and host {host} lets nobody in; set "
            "host, e.g. to '0.0.0.0'"
        )


def _run_function(
    function: Callable[..., Any], score: str | None, endpoint: Endpoint, example: Mapping[str, Any], seed: int
) -> Any:
    arguments = _arguments(function, endpoint, example, seed)
    returned = function(**arguments)
    if inspect.isawaitable(returned):
        returned = _run_coroutine(_unless_over(returned, endpoint))
    return returned if score == "return" else None


def _run_coroutine(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in an event loop of this thread, which is used again afterwards.

    A loop that was closed would have connections that clients have left open fail when they are collected.
    """
    loop = _LOOPS.pop() if _LOOPS else asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_end_of_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
        _LOOPS.append(loop)


async def _end_of_tasks() -> None:
    """Cancels what a program has left running."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _arguments(
    function: Callable[..., Any], endpoint: Endpoint, example: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Returns those of the arguments of a program that a function takes."""
    given = {"row": dict(example), **_words(endpoint, example, seed)}
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _words(endpoint: Endpoint, example: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns what a program is started with, by name."""
    return {
        **example,
        "seed": seed,
        "base_url": endpoint.base_url,
        "anthropic_base_url": endpoint.anthropic_base_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
    }


async def _unless_over(work: Any, endpoint: Endpoint) -> Any:
    """Returns what a coroutine returns; cancels it when the episode has ended before."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=POLL_S)
        if endpoint.is_over():
            task.cancel()
    return task.result()


def _run_command(
    words: Sequence[str],
    score: str | None,
    env: Mapping[str, str],
    endpoint: Endpoint,
    example: Mapping[str, Any],
    seed: int,
) -> float | None:
    """Runs a command, without a shell, in a process group of its own."""
    row = json.dumps(dict(example), default=str)
    variables = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "GROUPAX_MODEL": endpoint.model,
        "GROUPAX_SEED": str(seed),
        "GROUPAX_ROW": row,
    }
    values = _words(endpoint, example, seed)
    filled = [_filled(word, values) for word in words]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                filled,
                env={**os.environ, **variables, **env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"{words[0]} cannot be started: {error}") from error
        try:
            while process.poll() is None and not endpoint.is_over():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            with contextlib.suppress(OSError):  # it has left nobody behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _score_of_command(words[0], score, process.returncode, _end_of(stdout), _end_of(stderr))


def _score_of_command(name: str, score: str | None, code: int, stdout: str, stderr: str) -> float | None:
    if score == "exit":
        return float(code == 0)
    if code:
        raise InfrastructureError(f"{name} exited with {code}: {stderr.strip()[-LAST_CHARACTERS:]}")
    if score is None:
        return None
    lines = stdout.strip().splitlines()
    try:
        return float(lines[-1])
    except (IndexError, ValueError) as error:
        last = lines[-1][:200] if lines else ""
        raise InfrastructureError(f"the last line that {name} writes is not a number: {last!r}") from error


def _filled(word: str, values: Mapping[str, Any]) -> str:
    """Returns a word of a command with the texts of values in the place of their names in braces."""
    pieces = word.split("{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, brace, rest = piece.partition("}")
        is_known = bool(brace) and name in values
        filled.append(f"{values[name]}{rest}" if is_known else "{" + piece)
    return "".join(filled)


def _end_of(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8 * LAST_CHARACTERS))
    return file.read().decode(errors="replace")
