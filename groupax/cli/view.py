"""The commands `groupax view` and `groupax export`, which show runs."""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from groupax.core.errors import require
from groupax.core.settings.command_line import Positional, parsed
from groupax.parallel.processes import is_loopback, listen

PORT = 4747


@dataclass(frozen=True, kw_only=True)
class View:
    """Show runs on a local web page, during training and afterwards."""

    run_dirs: Positional[tuple[Path, ...]]
    """Run folders, or folders that contain run folders."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address other than the loopback requires a token, which is part of the printed URL."""
    port: int | None = None
    """Port to listen on; by default 4747, or a free port if that one is in use."""
    token: bool = False
    """Require a token on the loopback too, to keep out other users of this machine."""


def view(arguments: Sequence[str]) -> None:
    """Runs `groupax view` until it is interrupted."""
    command = parsed(View, "view", arguments)
    if not command.run_dirs:
        raise ValueError("no run folder is given; usage: groupax view RUN_DIR [RUN_DIR ...]")
    require("view", "the page")
    from groupax.satellites.view.runs import Runs
    from groupax.satellites.view.server import serve

    runs = Runs(command.run_dirs)
    listening = _listen(command.host, command.port)
    token = secrets.token_urlsafe(32) if command.token or not is_loopback(command.host) else None
    serve(runs, listening, command.host, token)


def _listen(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return listen(host, port)
    try:
        return listen(host, PORT)
    except ValueError:  # in use
        return listen(host, 0)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Save a run as one HTML file, which shows its page in any browser without a server."""

    run_dir: Positional[Path]
    """The run's folder."""
    to: Annotated[Path | None, "-o"] = None
    """The file; by default RUN_DIR.html next to the run's folder."""


def export(arguments: Sequence[str]) -> None:
    """Runs `groupax export`."""
    command = parsed(Export, "export", arguments)
    require("view", "the page")
    from groupax.satellites.view.export import write_export

    to = command.to or command.run_dir.absolute().with_name(f"{command.run_dir.absolute().name}.html")
    print(f"{to}: {write_export(command.run_dir, to) / 1e6:.1f} MB")
