"""The servers that programs ask for turns: the protocols of `groupax serve`, each address a session. Imports no jax.

http://HOST:PORT/SESSION/v1/chat/completions ──► the session's `ask` ──► its answer, in the client's protocol

The settings of sampling are those of the run, whatever a request says: the policy is trained as it samples there.
"""

import asyncio
import secrets
import threading
import time

from groupax.episodes.program import MODEL, Endpoint, Listening, Session
from groupax.episodes.transcript import Templates
from groupax.errors import RunError
from groupax.parallel import processes
from groupax.parallel.processes import listen

START_S = 30.0
MAX_CONNECTIONS = 1 << 16  # of programs, which may all wait for a turn

_taken: dict[Listening, tuple["ProgramServer", int]] = {}  # with the numbers of those that use them
_lock = threading.Lock()


class ProgramServer:
    """A server for the sessions of programs.

    Args:
        listening: Where it listens; on the loopback alone, nobody else reaches it, and sessions have no keys.

    Attributes:
        listening: Where it listens.

    Raises:
        ImportError: The packages of `groupax serve` are not installed.
        RunError: It cannot listen there, or does not start.
    """

    def __init__(self, listening: Listening) -> None:
        import uvicorn

        from groupax.episodes.program_http import OpenSession, application
        from groupax.serve.connections import limited

        self.listening = listening
        self._sessions: dict[str, OpenSession] = {}
        port = listening.port and listening.port + processes.process_index()
        try:
            self._socket = listen(listening.host, port)
        except ValueError as error:
            raise RunError(f"the sessions of programs need an address of this machine: {error}") from error
        self._url = listening.url(self._socket.getsockname()[1])
        config = uvicorn.Config(
            application(self._sessions),
            http=limited(MAX_CONNECTIONS),  # pyright: ignore[reportArgumentType]
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="program server", daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            if time.monotonic() > deadline_s or not self._thread.is_alive():
                raise RunError("the server that programs ask for turns did not start")
            time.sleep(0.005)

    def _serve(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def add(self, session: Session, templates: Templates) -> Endpoint:
        """Returns the endpoint of a new session.

        Args:
            session: The session.
            templates: Templates of its run.
        """
        from groupax.episodes.program_http import OpenSession

        name, key = secrets.token_urlsafe(24), secrets.token_urlsafe(24) if self.listening.is_open else None
        self._sessions[name] = OpenSession(session, templates, key)
        model = next(iter(templates.adapters), MODEL)
        return Endpoint(f"{self._url}/{name}", key or "groupax", model, is_over=lambda: session.has_ended)

    def remove(self, session: Session) -> None:
        """Forgets a session, whose address is not found any more."""
        for name in [name for name, each in self._sessions.items() if each.session is session]:
            del self._sessions[name]

    def close(self) -> None:
        """Ends the server; what was asked of it is answered, or not at all."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_S)
        self._socket.close()


def take_server(listening: Listening) -> ProgramServer:
    """Returns the server that listens there, which all rollouts of this process share, and starts it if need be."""
    with _lock:
        server, num_users = _taken.get(listening) or (ProgramServer(listening), 0)
        _taken[listening] = server, num_users + 1
        return server


def give_back_server(server: ProgramServer) -> None:
    """Ends a server that nobody uses any more."""
    with _lock:
        _, num_users = _taken.pop(server.listening)
        if num_users > 1:
            _taken[server.listening] = server, num_users - 1
        else:
            server.close()
