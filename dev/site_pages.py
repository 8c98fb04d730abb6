"""Pages of the documentation's site that are generated from the code: settings, public names, commands, diagnostics.

mkdocs calls `on_files` and `on_page_markdown` (see `mkdocs.yml`).
"""

import ast
import contextlib
import inspect
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any, get_args

import groupax
from groupax.cli.main import COMMANDS, run_command, usage
from groupax.core.config import GRPOConfig, SFTConfig
from groupax.core.settings.command_line import descriptions, parts, title
from groupax.runs import diagnostics
from groupax.runs.checkpoints import saver
from groupax.runs.diagnostics import SEVERITIES as SEVERITY_BY_NAME
from groupax.runs.diagnostics import Severity, severity_of

SETTINGS = "reference/settings.md"
# What a reader of the file in the repository sees in the list's place.
DIAGNOSTICS_MARK = (
    "*The list is generated: it is on the site that `make docs` builds, in `build/site/troubleshooting/index.html`.*"
)
OTHER_MODULES = ("groupax.events", "groupax.runs.trackers.tracker")  # public, but not at the top of the package
SEVERITIES = get_args(Severity)
RESUMES = {
    "free": "A resumed run may change it.",
    "explicit": "A resumed run may change it where `resume` names the checkpoint.",
    "fixed": "A resumed run keeps it.",
    "fixed_zero": "A resumed run may change it between values that are not 0.",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to those of the folder."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the mark of the diagnostics with their list."""
    return (
        markdown.replace(DIAGNOSTICS_MARK, "\n".join(diagnostics_list())) if DIAGNOSTICS_MARK in markdown else markdown
    )


def generated_pages() -> dict[str, str]:
    """Returns the generated pages as Markdown, by path."""
    return {
        SETTINGS: "\n".join(settings_page(GRPOConfig, "Settings", "groupax train")),
        "reference/sft_settings.md": "\n".join(
            settings_page(SFTConfig, "Settings of supervised fine-tuning", "groupax sft")
        ),
        "reference/python.md": "\n".join(python_page()),
        "reference/command_line.md": "\n".join(command_page()),
    }


def settings_page(record: type, heading: str, command: str) -> Iterator[str]:
    """Yields the lines of the page about the settings of a config."""
    yield f"# {heading}"
    yield ""
    yield (
        f"The fields of `{record.__name__}`. Each is an argument in Python, an option of `{command}` and a key of a "
        "`--config` file."
    )
    texts, declared = descriptions(record), {each.name: each for each in fields(record)}
    shown: set[str] = set()
    for part in parts(record):
        names = [each.name for each in fields(part) if each.name in declared and each.name not in shown]
        if not names:
            continue
        shown |= set(names)
        yield from ("", f"## {title(part).replace('_', ' ').capitalize()}", "", _linked(part.__doc__ or "", ""))
        for name in names:
            yield from (
                "",
                f"### `{name}` {{ #{name} }}",
                "",
                _facts(declared[name]),
                "",
                _linked(texts[name], "", declared),
            )


def python_page() -> Iterator[str]:
    """Yields the lines of the page about the public names."""
    yield from ("# Python", "", "The names that `groupax` exports, then modules whose names are public too.")
    for name in sorted(groupax.__all__, key=str.lower):
        module = groupax._HOME[name]
        yield from ("", f"::: {module}.{name}")
        if name.endswith("Config"):
            yield from ("    options:", "      members: false", "      show_signature: false")
    for module in OTHER_MODULES:
        yield from ("", f"::: {module}", "    options:", "      show_root_full_path: true")


def command_page() -> Iterator[str]:
    """Yields the lines of the page about the commands: what their help prints, with settings on pages of their own."""
    yield from ("# Command line", "", "```text", usage(), "```")
    for name in COMMANDS:
        yield from ("", f"## {name}", "", "```text", _help_of(name), "```")


def diagnostics_list() -> Iterator[str]:
    """Yields a section per diagnostic, with its texts and with `...` for what depends on the run."""
    found: dict[str, list[str]] = {}
    for module in (diagnostics, saver):
        for name, text in _diagnosed(module):
            found.setdefault(name, []).append(text)
    for name, texts in sorted(found.items(), key=lambda each: SEVERITIES.index(severity_of(each[0]))):
        yield from (f"### {name}", "", f"*{severity_of(name).capitalize()}*", "")
        for text in texts:
            yield from (f"> {_linked(text)}", "")


def _diagnosed(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yields names and texts of a module: of `found[name] = ...`, and of dicts."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="found"), slice=ast.Constant(value=name))]):
                yield str(name), _template(node.value, module)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in SEVERITY_BY_NAME:
                        yield str(key.value), _template(value, module)
            case ast.DictComp(key=ast.JoinedStr()):
                yield _template(node.key, module, "NAME"), _template(node.value, module)
            case _:
                pass


def _template(node: ast.expr, module: ModuleType, unknown: str = "...") -> str:
    """Returns a text with the values of the module's constants, and `...` or another text for other values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr), ast.dump(node)
    return "".join(
        str(each.value) if isinstance(each, ast.Constant) else _value(each, module, unknown) for each in node.values
    )


def _value(node: ast.expr, module: ModuleType, unknown: str) -> str:
    assert isinstance(node, ast.FormattedValue)
    if not isinstance(node.value, ast.Name) or not hasattr(module, node.value.id):
        return unknown
    spec = node.format_spec.values[0].value if isinstance(node.format_spec, ast.JoinedStr) else ""  # type: ignore
    return format(getattr(module, node.value.id), spec)


def _linked(text: str, path: str = SETTINGS, known: Iterable[str] | None = None) -> str:
    """Returns Markdown in which the names of settings lead to their descriptions on a page."""
    declared = [each.name for each in fields(GRPOConfig)] if known is None else known
    names = sorted((name for name in declared if "_" in name), key=len, reverse=True)
    text = " ".join(text.split()).replace("<", "&lt;")
    return re.sub(rf"(?<![\w`/.])({'|'.join(names)})(?![\w`/])", rf"[`\1`]({path}#\1)", text)


def _facts(field: Any) -> str:
    """Returns the type, the default and the range of a setting, and how it may change when a run is resumed."""
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    kind = re.sub(r"\b(?:typing|collections\.abc)\.", "", kind)
    default = field.default if field.default is not MISSING else field.default_factory()
    range_ = f", {allowed}" if (allowed := field.metadata.get("range")) else ""
    return f"`{kind}`, default `{default!r}`{range_}. {RESUMES[field.metadata.get('resume', 'explicit')]}"


def _help_of(command: str) -> str:
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            run_command(command, ["--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).rstrip()
