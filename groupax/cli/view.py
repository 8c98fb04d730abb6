"""`groupax view`."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from groupax.parallel.sockets import is_loopback, listen
from groupax.settings.command_line import parsed
from groupax.view.guard import new_token

PORT = 4747


@dataclass(frozen=True, kw_only=True)
class View:
    """Show runs on a local web page, while they go on and afterwards."""

    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or folders with such folders in them."""
    host: str = "127.0.0.1"
    """Address to listen at. At any other than the loopback the page needs a token, which is part of the address that
    is printed."""
    port: int | None = None
    """By default 4747, or a free one if that is taken."""
    token: bool = False
    """Need a token on the loopback too, where other users of this machine can reach the page."""


def view(arguments: Sequence[str]) -> None:
    """`groupax view`: serve until it is interrupted.

    Raises:
        ValueError: a folder is not there, the address cannot be listened at, or the extra `view` is not installed.
    """
    command = parsed(View, "view", arguments)
    if not command.run_dirs:
        raise ValueError("which run? groupax view RUN_DIR [RUN_DIR ...]")
    try:
        from groupax.view.server import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs {error.name}; pip install 'groupax[view]'") from error

    from groupax.view.runs import Runs

    runs = Runs(command.run_dirs)
    listening = _listen(command.host, command.port)
    token = new_token() if command.token or not is_loopback(command.host) else None
    serve(runs, listening, command.host, token, tell=lambda text: print(text, flush=True))


def _listen(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return listen(host, port)
    try:
        return listen(host, PORT)
    except ValueError:  # taken
        return listen(host, 0)
