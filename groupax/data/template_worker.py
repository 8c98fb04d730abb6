"""A program that renders chat templates, reads turns by response templates and tries out tokenizers.

It imports nothing of groupax. Chat templates are programs that come with a model, and response templates and tokenizers
have its regular expressions and replacements. All can run forever or fill the memory, even within one operation that no
exception interrupts. So the kernel ends this process when a request takes too long, and limits its memory.

A request is a line of JSON, {"action": ..., **arguments}. So are its answers: one {"value": ...} for each requested
value, up to the first {"error": ...}.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30  # in addition to what the process has when it is ready
MAX_CHARACTERS = 1 << 26  # of a rendered conversation
GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def render(template: str, conversations: list[list[dict[str, Any]]], arguments: list[dict[str, Any]]) -> Iterator[str]:
    """Yields each conversation as the template renders it.

    Raises:
        ValueError: A text is longer than `MAX_CHARACTERS`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages, more in zip(conversations, arguments, strict=True):
        [text], _ = render_jinja_template(conversations=[messages], chat_template=template, **more)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it writes {len(text):,} characters, at most {MAX_CHARACTERS:,} are allowed")
        yield text


def variables(template: str) -> Iterator[list[str]]:
    """Yields one list with the names of the variables that the template reads and does not set itself."""
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    used = meta.find_undeclared_variables(environment.parse(GENERATION_TAGS.sub("", template)))
    yield sorted(used - {*environment.globals, "raise_exception", "strftime_now"})


def parse_response(response_template: dict[str, Any], prefix: str, text: str) -> Iterator[tuple[Any, int]]:
    """Yields the message that a response template reads from a turn, and how many of its tool calls are complete."""
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(response_template, prefix=prefix)
    parser.feed(text)
    message, _ = parser.finalize()
    # the character shows that what precedes it is complete
    events = ResponseParser(response_template, prefix=prefix).feed(text + "\0")
    yield message, sum(event["type"] == "region_close" and event["field"] == "tool_calls" for event in events)


def tokenize(path: str, text: str) -> Iterator[int]:
    """Yields the number of tokens of a text, which is also decoded, by a `tokenizer.json`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    ids = tokenizer.encode(text).ids
    tokenizer.decode(ids, skip_special_tokens=False)
    yield len(ids)


# Actions of a request, by name.
ACTIONS: dict[str, Callable[..., Iterator[Any]]] = {
    "render": render,
    "variables": variables,
    "parse_response": parse_response,
    "tokenize": tokenize,
}


def answers(line: str) -> Iterator[dict[str, Any]]:
    """Yields the answers to a request, up to the first error."""
    request = json.loads(line)
    signal.alarm(request.pop("deadline_s"))
    try:
        for value in ACTIONS[request.pop("action")](**request):
            yield {"value": value}
    except MemoryError:
        yield {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except BaseException as error:  # noqa: BLE001 - whatever a template raises, or Rust, goes to the client
        yield {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
    finally:
        signal.alarm(0)


def main() -> None:
    """Answers requests until standard input is closed."""
    import transformers.utils.chat_template_utils

    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # threads reserve memory
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends when its input does
    memory = Path("/proc/self/statm")
    if memory.exists():
        size = int(memory.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    assert transformers.utils.chat_template_utils, (
        "imported before the memory limit, and outside of a request's time limit"
    )
    out, sys.stdout = sys.stdout, sys.stderr  # only answers go to standard output
    for line in sys.stdin:
        for answer in answers(line):
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
