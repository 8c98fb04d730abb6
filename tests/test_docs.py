"""The Python on pages that promise to run does run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["rewards.md"])
def test_python_blocks_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert blocks


def test_the_pages_list_every_built_in_reward():
    from groupax.rewards.builtin import BUILTIN_REWARDS

    text = (DOCS / "rewards.md").read_text()
    assert [name for name in BUILTIN_REWARDS if f"`{name}" not in text] == []


def test_the_pages_list_every_setting_of_the_objective():
    from groupax.objective.settings import LossType, ObjectiveSettings

    text = (DOCS / "algorithm.md").read_text()
    own = {"entropy_bonus", "temperature"}  # ours, and told in words
    for name in {*ObjectiveSettings.__annotations__} - own:
        assert re.sub("_(pos|neg|min|max)$", "", name) in text, name
    assert [name for name in LossType.__args__ if f"`{name}`" not in text] == []
