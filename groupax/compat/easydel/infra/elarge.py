"""EasyDeL's `eLargeModel`: the model, its loading and its training, described by one dict or file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from groupax.compat.easydel.config import GRPOConfig
from groupax.compat.easydel.models import AutoEasyDeLModelForCausalLM, EasyDeLModel
from groupax.compat.easydel.trainers import GRPOTrainer
from groupax.compat.fields import warn
from groupax.data.examples import load_examples
from groupax.data.tokenizer import load_tokenizer
from groupax.settings.fields import nearest
from groupax.storage.folders import resolve_folder

# Sections of the description, each with its known entries; None for those that are checked where they are used.
SECTIONS: dict[str, tuple[str, ...] | None] = {
    "model": ("name_or_path", "tokenizer", "task", "extra_kwargs"),
    "loader": None,
    "sharding": ("axis_dims", "axis_names", "auto_shard_model"),
    "base_config": ("values",),
    "reward_model": ("name_or_path", "tokenizer", "task", "extra_kwargs"),
    "quantization": (),
    "esurge": None,
    "mixture": ("informs", "batch_size", "streaming"),
    "trainer": None,
    "actions": None,
}
TRAINERS = ("grpo",)


class eLargeModel:  # noqa: N801 - EasyDeL's name
    """A model with the description of its training.

    Args:
        config: The description: a dict of `SECTIONS`, or a JSON or YAML file of one.

    Attributes:
        config: The description as a dict.

    Raises:
        ValueError: The description has unknown sections or entries, or names no model.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path) -> None:
        self.config = _read(config)
        _check_known("eLargeModel", self.config, SECTIONS)
        for name, known in SECTIONS.items():
            if known is not None:
                _check_known(f"the section {name} of eLargeModel", self._section(name), known)
        if not self._section("model").get("name_or_path"):
            raise ValueError("the section model of eLargeModel needs name_or_path, the folder or hub id of the model")
        if self._section("esurge"):
            warn("the section esurge changes nothing in groupax: its own engine samples, as the memory allows")
        self._model: EasyDeLModel | None = None

    @classmethod
    def from_json(cls, json_path: str | Path) -> "eLargeModel":
        """Returns the model that a JSON file describes."""
        return cls(json_path)

    @classmethod
    def from_yaml(cls, yaml_path: str | Path) -> "eLargeModel":
        """Returns the model that a YAML file describes."""
        return cls(yaml_path)

    def to_dict(self) -> dict[str, Any]:
        """Returns a copy of the description."""
        return dict(self.config)

    def set_trainer(self, trainer_type: str, **settings: Any) -> "eLargeModel":
        """Replaces the section of the trainer."""
        self.config["trainer"] = {"trainer_type": trainer_type, **settings}
        return self

    def build_model(self) -> EasyDeLModel:
        """Loads the model, once."""
        if self._model is None:
            sharding, loader = self._section("sharding"), dict(self._section("loader"))
            for name in ("dtype", "param_dtype"):
                if isinstance(loader.get(name), str):
                    loader[name] = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}.get(
                        loader[name], loader[name]
                    )
            self._model = AutoEasyDeLModelForCausalLM.from_pretrained(
                self._section("model")["name_or_path"],
                sharding_axis_dims=sharding.get("axis_dims"),
                config_kwargs=self._section("base_config").get("values"),
                **loader,
                **self._section("model").get("extra_kwargs", {}),
            )
        return self._model

    def build_tokenizer(self) -> Any:
        """Loads the tokenizer: `tokenizer` of the section model, by default the model's."""
        model = self._section("model")
        return load_tokenizer(resolve_folder(model.get("tokenizer") or model["name_or_path"]))

    def build_dataset(self) -> Any:
        """Loads the training dataset of the section mixture.

        Raises:
            ValueError: It is not one local file or folder.
        """
        informs = self._section("mixture").get("informs", [])
        if len(informs) != 1:
            raise ValueError(
                f"the section mixture has {len(informs)} datasets; pass a train_dataset, which may be a mixture made "
                "with datasets.concatenate_datasets"
            )
        return load_examples(informs[0].get("data_files") or informs[0].get("type"))

    def build_trainer(
        self, train_dataset: Any = None, eval_dataset: Any = None, reward_funcs: Any = None, **more: Any
    ) -> GRPOTrainer:
        """Returns the trainer.

        Args:
            train_dataset: Prompts to train on; by default those of the section mixture.
            eval_dataset: Prompts to evaluate on.
            reward_funcs: One or several reward functions; by default the model of the section reward_model.
            more: `reward_processing_classes` and `data_tokenize_fn`.

        Raises:
            ValueError: The trainer is not GRPO's, or one of its settings is not supported.
        """
        settings = dict(self._section("trainer"))
        kind = str(settings.pop("trainer_type", "")).lower()
        if kind not in TRAINERS:
            raise ValueError(
                f"trainer_type {kind!r} is not a trainer of groupax.compat.easydel; it has {', '.join(TRAINERS)}"
            )
        if reward_funcs is None:
            reward_funcs = self._section("reward_model").get("name_or_path")
        arguments = GRPOConfig(**settings)
        train_dataset = self.build_dataset() if train_dataset is None else train_dataset
        return GRPOTrainer(
            arguments=arguments,
            model=self.build_model(),
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.build_tokenizer(),
            **more,
        )

    def train(self, train_dataset: Any = None, eval_dataset: Any = None, **more: Any) -> Any:
        """Trains the model with the trainer of `build_trainer`, whose arguments it takes."""
        return self.build_trainer(train_dataset, eval_dataset, **more).train()

    def _section(self, name: str) -> dict[str, Any]:
        return self.config.get(name) or {}


def _read(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    text = Path(config).read_text(encoding="utf-8")
    found = json.loads(text) if Path(config).suffix == ".json" else yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"{config} must contain a mapping of sections: {', '.join(SECTIONS)}")
    return found


def _check_known(owner: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{owner} has no {name!r}; it has {', '.join(known) or 'nothing'}{nearest(name, known)}")
