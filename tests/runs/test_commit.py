"""The commit of a user's program is found without running the hooks of its repository."""

import os
import shutil
import subprocess

import pytest

from groupax.runs.process import commit_of

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder, *arguments):
    settings = ("user.name=x", "user.email=x", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", *(each for setting in settings for each in ("-c", setting)), *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "work"
    (folder / "inside").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "inside" / "more.py").write_text("print(2)")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_tree_has_its_commit_and_a_changed_one_says_so(repository, tmp_path, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository) == commit_of(repository / "inside") == commit
    (repository / "untracked.py").write_text("")
    os.utime(repository / "train.py", (1, 1))  # another time, the same content
    assert commit_of(repository / "inside") == commit
    (repository / "train.py").write_text("print(3)")
    assert commit_of(repository / "inside") == f"{commit}-dirty"
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q", "empty")
    assert commit_of(tmp_path / "empty") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(repository) is None


def test_hooks_and_monitors_of_a_repository_are_not_run(repository):
    ran = repository.parent / "ran"
    program = repository.parent / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "core.pager", "diff.evil.command"):
        git(repository, "config", name, str(program))
    (repository / ".git" / "info" / "attributes").write_text("* diff=evil\n")
    for hook in ("post-index-change", "pre-commit", "fsmonitor-watchman"):
        shutil.copy(program, repository / ".git" / "hooks" / hook)
    os.utime(repository / "train.py", (1, 1))
    assert commit_of(repository) is not None
    (repository / "train.py").write_text("print(4)")
    assert str(commit_of(repository)).endswith("-dirty")
    assert not ran.exists()
