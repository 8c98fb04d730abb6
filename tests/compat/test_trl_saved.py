"""What scripts written for TRL save is what was trained: each trains a few steps, saves and loads in its way."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

MODEL = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IN_CI = ("merge_and_unload", "checkpoint_folder")
SCRIPTS = ("save_pretrained", "save_adapter", "merge_and_unload", "adapter_folder", "model_folder", "checkpoint_folder")
CASES = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in SCRIPTS]


@pytest.fixture
def trl_saved(monkeypatch):
    """The benchmark, whose scripts are run here."""
    if not MODEL.exists():
        pytest.skip(f"there is no {MODEL}")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("trl_saved")
    for name in ("trl_saved", "trl_curves", "models"):
        sys.modules.pop(name, None)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_is_the_trained_one(trl_saved, monkeypatch, tmp_path, name):
    from groupax.compat import trl
    from groupax.models.weights.casts import dense_params

    trainers = []

    class Remembered(trl.GRPOTrainer):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            trainers.append(self)

    monkeypatch.setattr(trl, "GRPOTrainer", Remembered)
    assert [*trl_saved.SCRIPTS] == [*SCRIPTS]
    loaded = trl_saved.SCRIPTS[name](trl, str(MODEL), tmp_path, 2, 0)
    if hasattr(loaded, "merge_and_unload"):
        loaded = loaded.merge_and_unload()
    [trainer] = trainers
    trained = dense_params(trainer.native.model.params, "float32")
    untrained = trl_saved._load(str(MODEL))
    for index, layer in enumerate(trained["layers"]):
        path = f"model.layers.{index}.self_attn.q_proj.weight"
        np.testing.assert_allclose(loaded.get_parameter(path).detach(), layer["q"], atol=1e-6)
        assert np.abs(untrained.get_parameter(path).detach().numpy() - layer["q"]).max() > 1e-4
