"""A client of `groupax.data.template_worker`, which runs templates and tries out tokenizers. Imports no jax."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupax.terminal.printable import error_line

WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(Exception):
    """A template, or a tokenizer, failed.

    Args:
        message: The reason, on one line.
        index: Index of the requested value that failed.
        ended: Whether the process ended because of it.
    """

    def __init__(self, message: str, index: int, ended: bool) -> None:
        super().__init__(message)
        self.index, self.ended = index, ended


class TemplateProcess:
    """A template worker that starts at the first request. Threads take turns.

    Args:
        deadline_s: Time limit of a request.
    """

    def __init__(self, deadline_s: int = 10) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any], count: int, deadline_s: int | None = None) -> list[Any]:
        """Returns the values that answer a request.

        Args:
            request: Action and arguments.
            count: Number of values that the action yields.
            deadline_s: Time limit, if it is not that of other requests.

        Raises:
            TemplateError: The template fails, or exceeds its time or memory limit.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        line = json.dumps({"deadline_s": deadline_s, **request})
        values: list[Any] = []
        with self._lock:
            process = self._running()
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            try:
                with suppress(BrokenPipeError):  # then there is no answer either
                    process.stdin.write(line + "\n")
                    process.stdin.flush()
                while len(values) < count:
                    answered = process.stdout.readline()
                    if not answered.endswith("\n"):
                        raise TemplateError(self._end(deadline_s), len(values), ended=True)
                    answer = json.loads(answered)
                    if "error" in answer:
                        raise TemplateError(error_line(answer["error"], 1100), len(values), ended=False)
                    values.append(answer["value"])
            except TemplateError:
                raise
            except BaseException:  # unread answers would be taken for those to the next request
                process.kill()
                self._end()
                raise
        return values

    def close(self) -> None:
        """Ends the process, unless it belongs to a parent of this process."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():
            self._process = None  # a forked process has its parent's pipes
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            # -P: modules next to the worker's file must not shadow those that it imports
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is meant for this process only
            )
            self._owner = os.getpid()
        return self._process

    def _end(self, deadline_s: int | None = None) -> str:
        """Ends the process and returns why it does not answer any more."""
        assert self._process is not None, "it is running"
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "they are pipes"
            with suppress(BrokenPipeError):  # nobody reads the last request any more
                pipe.close()
        status, self._process = self._process.wait(), None
        if status == -signal.SIGALRM:
            return f"it was still running after {deadline_s} s"
        return f"the process that runs it ended with status {status}; is there too little memory?"


TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.close)
