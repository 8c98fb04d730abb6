"""The program in which chat templates are rendered. It runs in a process of its own and imports nothing of groupax.

A chat template is a program that comes with a model: it can loop for ever or fill the memory, also within one operation
that no exception interrupts. So the kernel ends this process when a request takes too long, and refuses it memory.

A request is a line of JSON, {"action": ..., **arguments}. So are its answers: a {"value": ...} for each thing that was
asked for, up to the first {"error": ...}.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30  # beside what the process has when it is ready
MOST_CHARACTERS = 1 << 26  # of a rendered conversation
GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def render(template: str, conversations: list[list[dict[str, Any]]], arguments: list[dict[str, Any]]) -> Iterator[str]:
    """Yields each conversation as the template writes it.

    Args:
        template: in Jinja.
        conversations: their messages.
        arguments: for each conversation.

    Raises:
        ValueError: a text is longer than `MOST_CHARACTERS`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages, more in zip(conversations, arguments, strict=True):
        [text], _ = render_jinja_template(conversations=[messages], chat_template=template, **more)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it writes {len(text):,} characters, at most {MOST_CHARACTERS:,} are allowed")
        yield text


def variables(template: str) -> Iterator[list[str]]:
    """Yields the names, all at once, of the variables that the template reads and does not set itself."""
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    used = meta.find_undeclared_variables(environment.parse(GENERATION_TAGS.sub("", template)))
    yield sorted(used - {*environment.globals, "raise_exception", "strftime_now"})


# What a request can ask for, by name.
ACTIONS: dict[str, Callable[..., Iterator[Any]]] = {"render": render, "variables": variables}


def answers(line: str, deadline_s: int) -> Iterator[dict[str, Any]]:
    """Yields the answers to a request, of which the first error is the last one."""
    request = json.loads(line)
    signal.alarm(deadline_s)
    try:
        for value in ACTIONS[request.pop("action")](**request):
            yield {"value": value}
    except MemoryError:
        yield {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - whatever a template can cause is told to whoever asked
        yield {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
    finally:
        signal.alarm(0)


def main(deadline_s: int) -> None:
    """Answers requests until there are no more.

    Args:
        deadline_s: the longest that a request may take.
    """
    import transformers.utils.chat_template_utils

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the requests ends this process
    memory = Path("/proc/self/statm")
    if memory.exists():
        size = int(memory.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    assert transformers.utils.chat_template_utils, "imported before the limit of memory, and not within a deadline"
    told, sys.stdout = sys.stdout, sys.stderr  # what is printed by others is no answer
    for line in sys.stdin:
        for answer in answers(line, deadline_s):
            print(json.dumps(answer), file=told, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
