"""An interpreter for untrusted Python code, in the sandbox of `code_tests`. Imports no jax.

    run(code) ──► pipe ──► bwrap: interpreter    runs the code, with a filter of system calls
              ◄── what was printed ──┘

This process limits the time of a run and the size of a reply, and takes a reply as nothing but text.
"""

import json
import os
import signal
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from groupax.core.errors import InfrastructureError
from groupax.rewards.sandbox import Limits, Sandbox, end_isolated, frame, start_isolated

START_S = 60.0  # in which an interpreter must start, on a busy machine too
MAX_CODE_BYTES = 1 << 20
LOST = "the interpreter was restarted, and its variables are lost"


class PythonError(RuntimeError):
    """A program had no reply; the message is for the model."""


class Interpreter:
    """The interpreter of an episode, which starts with the first call.

    Args:
        limits: Limits of its process.
        timeout_s: Time limit of a call.
        output_chars: Most characters of a reply.
        sandbox: "none" runs it with the permissions of this process.
        seed: Seed of hashes and of `random`.
    """

    def __init__(self, limits: Limits, timeout_s: int | float, output_chars: int, sandbox: Sandbox, seed: int) -> None:
        self._limits, self._timeout_s, self._output_chars = limits, timeout_s, output_chars
        self._sandbox: Sandbox = sandbox
        self._seed = seed % (1 << 32)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, code: str) -> str:
        """Runs code and returns what it printed.

        Raises:
            PythonError: It exceeded a limit, or ended its interpreter.
            InfrastructureError: The interpreter could not start.
        """
        if len(code.encode(errors="replace")) > MAX_CODE_BYTES:
            raise PythonError(f"the code has more than {MAX_CODE_BYTES:,} bytes")
        if self._process is None:
            self._start()
        try:
            return self._reply(code, self._timeout_s)[: self._output_chars + 100]
        except TimeoutError as error:
            raise PythonError(f"timed out after {self._timeout_s:g} s; {LOST}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise PythonError(
                f"the interpreter has ended, through the code or a limit of its resources; {LOST}"
            ) from error

    def close(self) -> None:
        """Ends the interpreter."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> None:
        start = partial(start_isolated, "interpreter", self._limits, self._sandbox, hash_seed=str(self._seed))
        try:
            # bubblewrap ends with the thread that has started it, and that of a call ends with the call
            self._process, limits = _starter().submit(start).result()
            self._end = weakref.finalize(self, end_isolated, self._process)
            self._reply(limits | {"seed": self._seed, "output_chars": self._output_chars}, START_S)
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"the Python interpreter did not start: {error!r}") from error

    def _reply(self, request: Any, timeout_s: int | float) -> str:
        """Returns the reply to a request. If there is none in this time, the process is killed, and reading ends."""
        process, expired = self._process, threading.Event()
        assert process is not None and process.stdin is not None and process.stdout is not None, "started"  # noqa: PT018
        timer = threading.Timer(timeout_s, lambda: (expired.set(), os.killpg(process.pid, signal.SIGKILL)))
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(frame(request))
            process.stdin.flush()
            size = int.from_bytes(process.stdout.read(8), "little")
            data = process.stdout.read(size) if size <= 12 * self._output_chars + 1000 else b""  # 12 of JSON for one
            return str(json.loads(data))
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            if expired.is_set():
                raise TimeoutError from error
            raise
        finally:
            timer.cancel()


@cache
def _starter() -> ThreadPoolExecutor:
    """Returns the thread that starts interpreters, which lives as long as this process."""
    return ThreadPoolExecutor(1, "python tool")
