"""Programs that ask the model for turns over HTTP, and the session of each. Imports no jax.

                 thread of the server            thread that plays
program ──HTTP──► ask ──► event ──► report ──────► a turn is sampled
        ◄────────────────────────── answer ◄────── its tokens
        ──► returns ──► end ──────► report ──────► the episode has ended
"""

import concurrent.futures
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.environment import EnvironmentClass
from groupax.parallel.processes import is_loopback
from groupax.tools.runner import Outcome

MODEL = "policy"  # name of the model for programs
EVERYWHERE = ("0.0.0.0", "::", "")  # hosts that are no address to connect to
Event = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """The address at which a program asks the model.

    Attributes:
        url: Address of the session; requests to it belong to one episode.
        api_key: Key that clients send; on the loopback any is accepted, since the address is secret.
        model: Name of the model; any is accepted.
        is_over: Returns whether the episode has ended, so that nobody waits for the program any more.
    """

    url: str
    api_key: str = "groupax"
    model: str = MODEL
    is_over: Callable[[], bool] = lambda: False

    @property
    def base_url(self) -> str:
        """Base URL for clients of OpenAI's protocols."""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for clients of Anthropic's protocol, which add the version themselves."""
        return self.url


@dataclass(frozen=True)
class Listening:
    """The address of the sessions of programs.

    Attributes:
        host: Name or address of this machine to listen on; "0.0.0.0" for all networks.
        port: Port; 0 for a free one. Each further process of a run has the next one.
        public_url: Base address at which programs reach it, with "{port}" for the port; None for this machine's name.
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_url: str | None = None

    @property
    def is_open(self) -> bool:
        """True if other machines may reach it, so that requests must have the key of their session."""
        return not is_loopback(self.host)

    def url(self, port: int) -> str:
        """Returns the base address for programs, of a server at a port."""
        if self.public_url is not None:
            return self.public_url.rstrip("/").replace("{port}", str(port))
        host = socket.gethostname() if self.host in EVERYWHERE else self.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, eq=False)
class ProgramClass(EnvironmentClass):
    """A program of which each episode is a run.

    Attributes:
        run: Runs it with an endpoint, the dataset's row, and the seed of the group, and returns its score: a number or
            None. It may raise anything.
        timeout_s: Time limit of a run in seconds.
        max_concurrent: Most runs at the same time in one process; None for no limit.
        error_reward: Reward of a run that raises; None leaves the episode out, as that of an environment that fails.
        listening: Where its requests are answered.
    """

    run: Callable[[Endpoint, Mapping[str, Any], int], Any] = field(default=lambda *_: None)
    timeout_s: int | float = 600.0
    max_concurrent: int | None = None
    error_reward: int | float | None = None
    listening: Listening = Listening()


@dataclass(frozen=True)
class TurnRequest:
    """A program's request for turns, which can be written as JSON.

    Attributes:
        prompt: Messages.
        tools: Schemas of functions in OpenAI's format.
        template_kwargs: Arguments for the chat template.
        n: Number of turns to sample.
        max_tokens: Most tokens of a turn; None for the limit of the run.
        stop: Texts that end a turn, in addition to those of the run.
        tool_choice: "auto", "required", or the name of the function to call as {"name": ...}.
        parallel: Whether a turn may have several calls.
        regex, json_schema: Constraint of the turn; None for none.
    """

    prompt: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    tool_choice: Any = "auto"
    parallel: bool = True
    regex: str | None = None
    json_schema: str | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The turns that answer a request, or the reason why there are none.

    Attributes:
        turns: Sequences that have ended, after the same prompt.
        refusal: Status and code of an error, with its message; None without one.
    """

    turns: Sequence[Completion] = ()
    refusal: tuple[int, str, str] | None = None

    @property
    def digest(self) -> str:
        """Digest of the tokens."""
        return hashlib.blake2b(json.dumps([turn.tokens for turn in self.turns]).encode(), digest_size=8).hexdigest()


ENDED = Answer(refusal=(410, "ended", "the episode has ended"))


class Session:
    """One run of a program, in the process that runs it. Threads may share it.

    Attributes:
        has_ended: Whether the program has ended, or nobody waits for it.
        refusal: Why a request was refused that could not be read; empty if none was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report: Callable[[Outcome], None] | None = None
        self._events: list[Event] = []  # that were not reported
        self._answered: list[tuple[int, str]] = []  # since the last event
        self._futures: list[concurrent.futures.Future[Answer]] = []  # by the number of the request
        self.has_ended, self.refusal = False, ""

    def listen(self, report: Callable[[Outcome], None]) -> None:
        """Has the next events reported, as the value of an outcome: once, as soon as there are any."""
        with self._lock:
            self._report = report
            self._flush()

    def ask(self, request: TurnRequest) -> "tuple[int, concurrent.futures.Future[Answer]]":
        """Asks for turns; returns the number of the request, and its answer as soon as there is one."""
        with self._lock:
            number, future = len(self._futures), concurrent.futures.Future()
            self._futures.append(future)
            if self.has_ended:
                future.set_result(ENDED)
            else:
                self._add({"kind": "ask", "number": number, "asked": asdict(request)})
            return number, future

    def leave(self, number: int) -> None:
        """Notes that the client of a request has gone without its answer."""
        with self._lock:
            self._add({"kind": "gone", "number": number})

    def answer(self, number: int, answer: Answer) -> None:
        """Answers a request."""
        with self._lock:
            self._answered.append((number, answer.digest))
            self._futures[number].set_result(answer)

    def end(self, value: Any = None, kind: str = "", message: str = "") -> None:
        """Notes that the program has ended, once."""
        with self._lock:
            if not self.has_ended:
                end = {"kind": "end", "value": value, "error": kind, "message": message, "refusal": self.refusal}
                self._add(end)
                self.has_ended = True

    def close(self) -> None:
        """Refuses what was not answered."""
        with self._lock:
            self.has_ended = True
            for future in self._futures:
                if not future.done():
                    future.set_result(ENDED)

    def _add(self, event: Event) -> None:
        if self.has_ended:
            return
        self._events.append({**event, "after": self._answered})
        self._answered = []
        self._flush()

    def _flush(self) -> None:
        if self._events and self._report is not None:
            events, self._events = self._events, []
            report, self._report = self._report, None
            report(Outcome(events))
