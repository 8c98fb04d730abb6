"""The commit of a user's program is found without running the hooks of its repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from groupax.runs import header as commits
from groupax.runs.header import commit_of, program_folder

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


def test_a_clean_tree_has_its_commit_and_a_changed_one_says_so(repository):
    commit = git(repository, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert commit_of(repository) == commit_of(repository / "inside") == commit
    (repository / "untracked.py").write_text("")
    os.utime(repository / "train.py", (1, 1))  # another time, the same content
    assert commit_of(repository / "inside") == commit
    (repository / "train.py").write_text("print(3)")
    assert commit_of(repository / "inside") == f"{commit}-dirty"
    git(repository, "checkout", "-q", "train.py")
    assert commit_of(repository) == commit
    (repository / "train.py").unlink()
    assert commit_of(repository) == f"{commit}-dirty"


def test_without_a_commit_or_git_there_is_none(repository, tmp_path, monkeypatch):
    assert commit_of(tmp_path) is None
    assert commit_of(tmp_path / "missing") is None
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert commit_of(tmp_path / "empty") is None
    monkeypatch.setattr(commits, "TIMEOUT_S", 0.0)
    assert commit_of(repository) is None
    monkeypatch.undo()
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


def test_the_program_is_the_script_or_what_is_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = sys.modules["__main__"]
    for script, folder in (
        (tmp_path / "mine" / "train.py", tmp_path / "mine"),
        (Path(sys.prefix) / "bin" / "groupax", tmp_path),
        (Path(commits.__file__).parents[1] / "__main__.py", tmp_path),
    ):
        monkeypatch.setattr(main, "__file__", str(script), raising=False)
        assert program_folder() == folder
    monkeypatch.delattr(main, "__file__")
    assert program_folder() == tmp_path
