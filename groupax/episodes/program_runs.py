"""Runs programs in threads of this process, each with a session of its own. Imports no jax."""

import copy
import threading
from collections.abc import Mapping
from typing import Any

from groupax.episodes.program import Endpoint, ProgramClass, Session
from groupax.episodes.program_server import ProgramServer
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
        self._server: ProgramServer | None = None
        self._sessions: list[Session] = []
        self._slots: dict[ProgramClass, threading.Semaphore] = {}

    def start(self, program: ProgramClass, example: Mapping[str, Any], seed: int) -> Session:
        """Starts a program in another thread, as soon as no more than allowed are running.

        Args:
            program: The program.
            example: Dataset row with the prompt.
            seed: Seed of the group.
        """
        if self._server is None:
            self._server = ProgramServer(self._templates)
        session = Session()
        self._sessions.append(session)
        slots = self._slots.setdefault(program, threading.Semaphore(program.max_concurrent or 1 << 30))
        given = program, self._server.add(session), copy.deepcopy(dict(example)), seed, session, slots
        threading.Thread(target=_run, args=given, name="program", daemon=True).start()
        return session

    def end(self, session: Session) -> None:
        """Ends a session: what its program still asks is refused."""
        session.close()
        if self._server is not None:
            self._server.remove(session)

    def close(self) -> None:
        """Ends all sessions and the server."""
        for session in self._sessions:
            session.close()
        if self._server is not None:
            self._server.close()


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
