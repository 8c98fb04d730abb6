"""Docstrings are sentences that stand alone, and code and pages use the words of docs/glossary.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "groupax").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# First words of fragments, which only make sense after a name or a heading.
FRAGMENT_STARTS = {
    *("Of", "That", "Those", "What", "Who", "Whether", "Where", "How", "As", "Its", "Their", "So"),
    *("With", "In", "To", "Beside", "Which", "From"),
}
# Expressions with a plainer one: a number or "this many"; again; query tile; must; concatenated; next to or in addition
# to; reported, logged or passed; continues.
UNUSUAL = re.compile(
    r"(?<![a-z])"
    r"(so many|anew|stairs?|(is|are) to be|(one )?behind (another|one another)|beside|told|tells? of|goes? on)"
    r"(?![a-z])",
    re.IGNORECASE,
)


def texts_of(paths: list[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", "module"), text


def fault_of(docstring: str) -> str | None:
    first = docstring.partition("\n\n")[0].strip()
    if not first:
        return "is empty"
    if first.split()[0].rstrip(",") in FRAGMENT_STARTS:
        return f"begins with {first.split()[0]!r}"
    return None if first.endswith((".", ":")) else "does not end with a full stop"


def test_docstrings_are_sentences_that_stand_alone():
    faults = [
        f"{file}: {name} {fault}: {text.partition(chr(10))[0]}"
        for file, source in texts_of(SOURCES)
        for name, text in docstrings(source)
        if (fault := fault_of(text))
    ]
    assert not faults, "\n".join(faults)


def test_code_and_pages_use_plain_words():
    found = [
        f"{name}: {match[0]!r} in {source[max(0, match.start() - 30) : match.end() + 30]!r}"
        for name, text in texts_of([*SOURCES, *PAGES])
        for source in [" ".join(text.split())]
        for match in UNUSUAL.finditer(source)
    ]
    assert not found, "\n".join(found)
