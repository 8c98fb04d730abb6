"""An interpreter for untrusted Python code, in the sandbox of `code_tests`. Imports no jax.

    run(code) ──► pipe ──► bwrap: guard          ends with the interpreter
                             bwrap: interpreter  runs the code, with a filter of system calls
              ◄── what was printed ──┘

This process limits the time of a run and the size of a reply, and takes a reply as nothing but text.
"""

import contextlib
import itertools
import json
import os
import select
import subprocess
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from groupax.core.errors import InfrastructureError
from groupax.rewards.isolated.start import inner_order
from groupax.rewards.sandbox import Limits, Sandbox, end_isolated, start_isolated

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
        self._seed, self._numbers = seed % (1 << 32), itertools.count(1)
        self._process: _Process | None = None

    def run(self, code: str) -> str:
        """Runs code and returns what it printed.

        Raises:
            PythonError: It exceeded a limit, or ended its interpreter.
            InfrastructureError: The interpreter could not start.
        """
        if len(code.encode(errors="replace")) > MAX_CODE_BYTES:
            raise PythonError(f"the code has more than {MAX_CODE_BYTES:,} bytes")
        process, number = self._started(), next(self._numbers)
        deadline_s = time.monotonic() + self._timeout_s
        try:
            process.send({"number": number, "code": code}, deadline_s)
            while True:
                reply = process.receive(self._longest_reply, deadline_s)
                if isinstance(reply, dict) and reply.get("number") == number and isinstance(reply.get("text"), str):
                    return reply["text"][: self._output_chars + 100]
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

    @property
    def _longest_reply(self) -> int:
        return 12 * self._output_chars + 1000  # a character takes up to 12 bytes in JSON

    def _started(self) -> "_Process":
        if self._process is not None:
            return self._process
        seed = self._seed
        order = {"environment": {"PYTHONHASHSEED": str(seed)}, "seed": seed, "output_chars": self._output_chars}
        start = partial(start_isolated, (), ("interpreter",), order, self._limits, self._sandbox)
        try:
            # bubblewrap ends with the thread that has started it, and that of a call ends with the call
            own, orders = _starter().submit(start).result()
        except OSError as error:
            raise InfrastructureError(f"the Python interpreter did not start: {error}") from error
        process = _Process(own)
        try:
            deadline_s = time.monotonic() + START_S
            process.write(orders + inner_order(order, "seed", "output_chars"), deadline_s)
            process.receive(self._longest_reply, deadline_s)
        except (OSError, ValueError) as error:
            process.end()
            raise InfrastructureError(f"the Python interpreter did not start: {error!r}") from error
        self._process = process
        return process


class _Process:
    """A process with two pipes, which are never waited for longer than a deadline."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None and process.stdout is not None, "pipes"  # noqa: PT018
        self._writer, self._reader = process.stdin.fileno(), process.stdout.fileno()
        for descriptor in (self._writer, self._reader):
            os.set_blocking(descriptor, False)
        self.end = weakref.finalize(self, end_isolated, process)

    def send(self, frame: Any, deadline_s: float) -> None:
        """Sends a frame; raises TimeoutError after the deadline."""
        data = json.dumps(frame).encode()
        self.write(len(data).to_bytes(8, "little") + data, deadline_s)

    def receive(self, longest: int, deadline_s: float) -> Any:
        """Returns the next frame."""
        size = int.from_bytes(self._read(8, deadline_s), "little")
        if size > longest:
            raise ValueError(f"a reply of {size} bytes")
        return json.loads(self._read(size, deadline_s))

    def write(self, data: bytes, deadline_s: float) -> None:
        """Sends bytes; raises TimeoutError after the deadline."""
        view = memoryview(data)
        while view:
            _wait(self._writer, select.POLLOUT, deadline_s)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._writer, view) :]

    def _read(self, size: int, deadline_s: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._reader, select.POLLIN, deadline_s)
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._reader, size - len(data))
                if not part:
                    raise BrokenPipeError("the process has ended")
                data += part
        return bytes(data)


def _wait(descriptor: int, event: int, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
        raise TimeoutError


@cache
def _starter() -> ThreadPoolExecutor:
    """Returns the thread that starts interpreters, which lives as long as this process."""
    return ThreadPoolExecutor(1, "python tool")
