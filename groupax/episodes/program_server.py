"""The server that programs ask for turns: the protocols of `groupax serve`, each address a session. Imports no jax.

http://127.0.0.1:PORT/SESSION/v1/chat/completions ──► the session's `ask` ──► its answer, in the client's protocol

The settings of sampling are those of the run, whatever a request says: the policy is trained as it samples there.
"""

import asyncio
import secrets
import socket
import threading
import time

from groupax.episodes.program import Endpoint, Session
from groupax.episodes.transcript import Templates

START_S = 30.0


class ProgramServer:
    """A server at an address of this machine that is open to nobody else.

    Args:
        templates: Templates of the run.

    Raises:
        ImportError: The packages of `groupax serve` are not installed.
        RuntimeError: It does not start.
    """

    def __init__(self, templates: Templates) -> None:
        import uvicorn

        from groupax.episodes.program_http import application

        self._sessions: dict[str, Session] = {}
        self._socket = socket.create_server(("127.0.0.1", 0))
        app = application(self._sessions, templates)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="program server", daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            if time.monotonic() > deadline_s or not self._thread.is_alive():
                raise RuntimeError("the server that programs ask for turns did not start")
            time.sleep(0.005)

    def _serve(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def add(self, session: Session) -> Endpoint:
        """Returns the endpoint of a new session."""
        name = secrets.token_urlsafe(24)
        self._sessions[name] = session
        port = self._socket.getsockname()[1]
        return Endpoint(f"http://127.0.0.1:{port}/{name}", is_over=lambda: session.has_ended)

    def remove(self, session: Session) -> None:
        """Forgets a session, whose address is not found any more."""
        for name in [name for name, each in self._sessions.items() if each is session]:
            del self._sessions[name]

    def close(self) -> None:
        """Ends the server; what was asked of it is answered, or not at all."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_S)
        self._socket.close()
