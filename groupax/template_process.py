"""The program in which chat templates are rendered. It runs in a process of its own and imports nothing of groupax.

A chat template is a program that comes with a model: it can loop for ever or fill the memory, also within one operation
that no exception interrupts. So the kernel ends this process when a request takes too long, and refuses it memory.

Requests and answers are lines of JSON: {"action": ..., **arguments} -> {"value": ...} or {"error": ...}.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 10
MEMORY_BYTES = 1 << 30  # beside what the process has when it is ready
MOST_CHARACTERS = 1 << 26  # of a rendered conversation
GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def render(template: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    """Returns the conversation as the template writes it.

    Raises:
        ValueError: the text is longer than `MOST_CHARACTERS`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template(conversations=[messages], chat_template=template, **arguments)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it writes {len(text):,} characters, at most {MOST_CHARACTERS:,} are allowed")
    return text


def variables(template: str) -> list[str]:
    """Returns the names of the variables that the template reads and does not set itself."""
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    used = meta.find_undeclared_variables(environment.parse(GENERATION_TAGS.sub("", template)))
    return sorted(used - {*environment.globals, "raise_exception", "strftime_now"})


# What a request can ask for, by name.
ACTIONS: dict[str, Callable[..., Any]] = {"render": render, "variables": variables}


def answer(line: str) -> dict[str, Any]:
    """Returns the answer to a request; an error of the template is an answer too."""
    request = json.loads(line)
    signal.alarm(DEADLINE_S)
    try:
        return {"value": ACTIONS[request.pop("action")](**request)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - whatever a template can cause is told to whoever asked
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
    finally:
        signal.alarm(0)


def main() -> None:
    """Answers requests until there are no more."""
    import transformers.utils.chat_template_utils

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the requests ends this process
    memory = Path("/proc/self/statm")
    if memory.exists():
        size = int(memory.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    assert transformers.utils.chat_template_utils, "imported before the limit of memory, and not within a deadline"
    answers, sys.stdout = sys.stdout, sys.stderr  # what is printed by others is no answer
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
