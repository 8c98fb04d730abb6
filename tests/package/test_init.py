"""The help of commands with many settings, and the file of settings that `groupax init` writes."""

from dataclasses import fields

import pytest
import yaml

from groupax.cli.init import Init, run_yaml
from groupax.cli.main import main
from groupax.cli.train import train_defaults
from groupax.core.config import GRPOConfig, SFTConfig
from groupax.core.settings.command_line import descriptions
from groupax.recipes import load_recipe


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        main(list(argv))
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_every_setting_has_a_description_on_one_line():
    for record in (GRPOConfig, SFTConfig):
        texts = descriptions(record)
        assert [each.name for each in fields(record) if len(texts.get(each.name, "")) < 15] == []
        assert [text for text in texts.values() if "\n" in text or not text.endswith((".", ")"))] == []


@pytest.mark.parametrize("width", [40, 200])
def test_the_help_of_train_has_the_twenty_settings_that_matter_and_fits_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = help_of(capsys, "train", "--recipe", "gsm8k", "--help")
    assert text.count("\n  --") == 20 + len(["--dry_run"])
    assert max(map(len, text.splitlines())) <= max(width, 50)
    assert "\033" not in text
    assert "(default 0.04)" in " ".join(text.split()), "of the recipe"


def test_train_reads_the_file_that_init_writes(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    flags = ["--max_steps", "60", "--loss_type", "dr_grpo", "--eval_dataset", "a", "b"]
    assert main(["init", str(path), *flags]) == 0
    assert f"groupax train --config {path}" in capsys.readouterr().out
    defaults = train_defaults(["--config", str(path)])
    assert defaults.args == GRPOConfig(max_steps=60, loss_type="dr_grpo")
    assert (defaults.model, defaults.reward_funcs) == ("Qwen/Qwen3-0.6B", ("my_rewards:reward",))
    assert defaults.eval_dataset == ("a", "b")
    assert main(["init", str(path)]) == 2
    assert "exists; name another file" in capsys.readouterr().err


def test_init_keeps_what_a_recipe_changes(tmp_path):
    (tmp_path / "run.yaml").write_text(
        run_yaml(Init(**vars(train_defaults(["--recipe", "gsm8k"])) | {"model": "some/model"}))
    )
    defaults = train_defaults(["--config", str(tmp_path / "run.yaml")])
    assert defaults.args == GRPOConfig.from_mapping(load_recipe("gsm8k").config)
    assert (defaults.model, defaults.recipe, defaults.reward_funcs) == ("some/model", "gsm8k", None)


def test_every_setting_can_be_uncommented(tmp_path):
    lines = run_yaml(Init(all=True)).splitlines()
    names = {each.name for each in fields(GRPOConfig)}
    active = [line.removeprefix("# ") for line in lines if line.removeprefix("# ").partition(":")[0] in names]
    written = yaml.safe_load("\n".join(active))
    assert set(written) == names
    assert GRPOConfig.from_mapping(written | {"report_to": []}) == GRPOConfig()


def test_values_of_flags_cannot_end_their_line(tmp_path):
    text = run_yaml(Init(model="a\nbeta: 9 # \u2028", dataset="x: {", reward_funcs=("a]", "#")))
    read = yaml.safe_load(text)
    assert (read["model"], read["dataset"], read["reward_funcs"]) == ("a\nbeta: 9 # \u2028", "x: {", ["a]", "#"])
    assert read["beta"] == 0.0
