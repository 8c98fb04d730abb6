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
        self._process: _Process | None = None

    def run(self, code: str) -> str:
        """Runs code and returns what it printed.

        Raises:
            PythonError: It exceeded a limit, or ended its interpreter.
            InfrastructureError: The interpreter could not start.
        """
        if len(code.encode(errors="replace")) > MAX_CODE_BYTES:
            raise PythonError(f"the code has more than {MAX_CODE_BYTES:,} bytes")
        process = self._started()
        try:
            return process.reply(code, self._timeout_s)[: self._output_chars + 100]
        except TimeoutError as error:
            self.close()
            raise PythonError(f"timed out after {self._timeout_s:g} s; {LOST}") from error
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            raise PythonError(
                f"the interpreter has ended, through the code or a limit of its resources; {LOST}"
            ) from error

    def close(self) -> None:
        """Ends the interpreter."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _started(self) -> "_Process":
        if self._process is not None:
            return self._process
        start = partial(start_isolated, "interpreter", self._limits, self._sandbox, hash_seed=str(self._seed))
        try:
            # bubblewrap ends with the thread that has started it, and that of a call ends with the call
            own, limits = _starter().submit(start).result()
        except OSError as error:
            raise InfrastructureError(f"the Python interpreter did not start: {error}") from error
        process = _Process(own, 12 * self._output_chars + 1000)  # a character takes up to 12 bytes in JSON
        try:
            process.reply(limits | {"seed": self._seed, "output_chars": self._output_chars}, START_S)
        except (OSError, ValueError) as error:
            process.end()
            raise InfrastructureError(f"the Python interpreter did not start: {error!r}") from error
        self._process = process
        return process


class _Process:
    """A process with two pipes, which is killed at a deadline, so that nothing waits for it longer."""

    def __init__(self, process: "subprocess.Popen[bytes]", longest: int) -> None:
        assert process.stdin is not None and process.stdout is not None, "pipes"  # noqa: PT018
        self._writer, self._reader, self._longest = process.stdin, process.stdout, longest
        self._kill = partial(os.killpg, process.pid, signal.SIGKILL)
        self.end = weakref.finalize(self, end_isolated, process)

    def reply(self, request: Any, timeout_s: float) -> str:
        """Returns the reply to a request; the process has ended if there is none in this time."""
        expired = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (expired.set(), self._kill()))
        timer.start()
        try:
            self._writer.write(frame(request))
            self._writer.flush()
            return str(json.loads(self._read(int.from_bytes(self._read(8), "little"))))
        except (OSError, ValueError) as error:
            if expired.is_set():
                raise TimeoutError from error
            raise
        finally:
            timer.cancel()

    def _read(self, size: int) -> bytes:
        data = self._reader.read(size) if size <= self._longest else b""
        if len(data) < size:
            raise BrokenPipeError("the process has ended, or its reply is too long")
        return data


@cache
def _starter() -> ThreadPoolExecutor:
    """Returns the thread that starts interpreters, which lives as long as this process."""
    return ThreadPoolExecutor(1, "python tool")
