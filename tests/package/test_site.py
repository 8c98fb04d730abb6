"""The documentation's site: what is generated from the code is complete, and it builds without a warning."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import groupax
from dev.site_pages import DIAGNOSTICS_MARK, diagnostics_list, generated_pages, on_page_markdown
from groupax.cli.main import COMMANDS
from groupax.core.config import GRPOConfig, SFTConfig
from groupax.runs.diagnostics import SEVERITIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    return generated_pages()


@pytest.mark.parametrize(("page", "record"), [("settings", GRPOConfig), ("sft_settings", SFTConfig)])
def test_the_reference_has_every_setting_once(pages, page, record):
    text = pages[f"reference/{page}.md"]
    assert sorted(re.findall(r"^### `(\w+)`", text, re.MULTILINE)) == sorted(each.name for each in fields(record))
    linked = set(re.findall(r"\]\(#(\w+)\)", text))
    assert len(linked) > 5
    assert linked <= {each.name for each in fields(record)}


def test_the_reference_has_every_public_name_and_command(pages):
    names = re.findall(r"^::: groupax\.[\w.]+\.(\w+)$", pages["reference/python.md"], re.MULTILINE)
    assert set(groupax.__all__) <= set(names)
    assert re.findall(r"^## (\w+)$", pages["reference/command_line.md"], re.MULTILINE) == [*COMMANDS]
    assert "\x1b" not in pages["reference/command_line.md"]


def test_troubleshooting_has_every_diagnostic():
    text = "\n".join(diagnostics_list())
    of_names = {"reward NAME", "tracker_NAME_failed"}
    assert set(re.findall(r"^### ([\w ]+)$", text, re.MULTILINE)) == {*SEVERITIES, *of_names}
    assert "is ..., which is not among the metrics so far; no checkpoint is the best one..." in text
    assert text.index("### rewards_equal") < text.index("### all_truncated") < text.index("### slow_reward")
    assert "for 5 steps the KL to the reference was above 1 nats per token (now ...)" in text
    assert on_page_markdown(f"a\n{DIAGNOSTICS_MARK}\n") == f"a\n{text}\n"
    assert DIAGNOSTICS_MARK in (ROOT / "docs" / "troubleshooting.md").read_text()


def test_the_navigation_has_every_page():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for each in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(each)]

    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(nav) == sorted([*written, *generated_pages()]), "list the pages in nav of mkdocs.yml"


@pytest.mark.heavy
def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_machines(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    # without --quiet, which keeps --strict from seeing warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "settings" / "index.html").read_text()
    assert 'id="learning_rate"' in page
    loaded = re.findall(
        r'<(?:script|img)[^>]*?src="(http[^"]*)|<link[^>]*?rel="stylesheet"[^>]*?href="(http[^"]*)', page
    )
    assert loaded == []
