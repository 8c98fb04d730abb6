"""Runs programs in threads of this process, each with a session of its own. Imports no jax."""

import copy
import threading
from collections.abc import Mapping
from typing import Any

from groupax.episodes.program import Endpoint, Listening, ProgramClass, Session
from groupax.episodes.program_server import ProgramServer, give_back_server, take_server
from groupax.episodes.transcript import Templates
from groupax.tools.results import checked_reward, message_of
from groupax.tools.runner import TIMED_OUT


class Runs:
    """The runs of programs of one rollout in this process.

    Args:
        templates: Templates of the run.
    """

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._servers: dict[Listening, ProgramServer] = {}
        self._sessions: list[Session] = []
        self._slots: dict[ProgramClass, threading.Semaphore] = {}

    def start(self, program: ProgramClass, example: Mapping[str, Any], seed: int) -> Session:
        """Starts a program in another thread, as soon as no more than allowed are running.

        Args:
            program: The program.
            example: Dataset row with the prompt.
            seed: Seed of the group.
        """
        if program.listening not in self._servers:
            self._servers[program.listening] = take_server(program.listening)
        server, session = self._servers[program.listening], Session()
        self._sessions.append(session)
        slots = self._slots.setdefault(program, threading.Semaphore(program.max_concurrent or 1 << 30))
        given = program, server.add(session, self._templates), copy.deepcopy(dict(example)), seed, session, slots
        threading.Thread(target=_run, args=given, name="program", daemon=True).start()
        return session

    def end(self, session: Session) -> None:
        """Ends a session: what its program still asks is refused."""
        session.close()
        for server in self._servers.values():
            server.remove(session)

    def close(self) -> None:
        """Ends all sessions, and the servers that nobody else uses."""
        for session in self._sessions:
            self.end(session)
        for server in self._servers.values():
            give_back_server(server)


def _run(
    program: ProgramClass,
    endpoint: Endpoint,
    example: Mapping[str, Any],
    seed: int,
    session: Session,
    slots: threading.Semaphore,
) -> None:
    """Runs a program to its end and notes its score in the session."""
    with slots:
        if session.has_ended:
            return
        seconds = program.timeout_s
        timer = threading.Timer(seconds, session.end, (None, TIMED_OUT, f"the program took longer than {seconds:g} s"))
        timer.daemon = True
        timer.start()
        try:
            value = program.run(endpoint, example, seed)
            score = None if value is None else checked_reward(value)
        except BaseException as error:  # noqa: BLE001 - the program is the user's
            session.end(kind=type(error).__name__, message=message_of(error))
        else:
            session.end(score)
        finally:
            timer.cancel()
