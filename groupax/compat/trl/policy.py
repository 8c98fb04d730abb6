"""The model that a script hands to a trainer: what is trained, and the object that shows it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from groupax.compat import hf
from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.core.settings.fields import nearest
from groupax.core.settings.optimizer import BaseWeights
from groupax.core.storage.folders import at_revision
from groupax.events import Event, RunEnded, RunStarted, StepEnded
from groupax.models.adapted import LowRank
from groupax.models.lora import Adapter, as_lora_config
from groupax.models.weights.checkpoint import Model
from groupax.parallel import processes
from groupax.runs.trainer import Trainer

# Arguments of `from_pretrained` in model_init_kwargs without effect in groupax, each with the reason.
INERT = hf.INERT | dict.fromkeys(
    ("dtype", "torch_dtype"), "master weights are float32, and bf16 chooses the dtype of the computation"
)


def resolve_model(model: Any, args: TrainingArguments, quantization_config: Any) -> tuple[Any, Any]:
    """Returns the model, or its name with the revision, and its quantization, for the arguments of a trainer.

    Raises:
        ValueError: An argument changes which model is trained in a way that groupax cannot honour, or is unknown.
    """
    given = dict(parse_mapping(getattr(args, "model_init_kwargs", None), "model_init_kwargs"))
    quantized = given.pop("quantization_config", None)
    if quantization_config is not None and quantized is not None:
        raise ValueError("quantization_config is given twice: to the trainer and in model_init_kwargs")
    given.pop("attn_implementation", None)  # read by `GRPOConfig.to_native`
    if not isinstance(model, (str, Path)):
        if given:
            warn(f"model_init_kwargs {', '.join(given)} change nothing: the model is already loaded")
        given = {}
    revision = given.pop("revision", None)
    for name, value in given.items():
        if str(value).removeprefix("torch.") in ("None", "False", "float32", "auto"):  # as it is anyway
            continue
        if name not in INERT:
            raise ValueError(
                f"model_init_kwargs has {name!r}; groupax cannot tell what it would change in the model, so load the "
                f"model with transformers and pass the object{nearest(name, INERT)}"
            )
        warn(f"model_init_kwargs {name}={value!r} changes nothing in groupax: {INERT[name]}")
    named = model if revision in (None, "main") else at_revision(str(model), revision)
    return named, quantized if quantization_config is None else quantization_config


@dataclass(frozen=True)
class Policy:
    """The model to train, and its adapter config.

    Attributes:
        model: What the native trainer receives.
        weights: How the native trainer stores the weights of a model that it loads.
        peft_config: Settings of an adapter that the native trainer adds.
        owner: Object of the script that is trained in place; None if there is none.
    """

    model: Any
    weights: BaseWeights
    peft_config: Any
    owner: Any


def policy_of(
    model: Any, args: TrainingArguments, quantization_config: Any, peft_config: Any, beta: float = 0.0
) -> Policy:
    """Returns what to train for the arguments of a trainer, whose loss has a reference if `beta` is not 0.

    A PyTorch model that is to have an adapter is wrapped by PEFT, as TRL does.

    Raises:
        ValueError: The arguments contradict each other or are not supported by groupax.
        ImportError: PEFT is needed and not installed.
    """
    model, quantization_config = resolve_model(model, args, quantization_config)
    weights = hf.base_weights(quantization_config)
    if hf.is_torch_model(model):
        if processes.num_processes() > 1:
            raise ValueError(
                f"a {type(model).__name__} of PyTorch cannot be trained by {processes.num_processes()} processes, "
                "since each has its own; pass the model's folder or hub id"
            )
        if peft_config is not None and not hf.is_peft_model(model):
            model, peft_config = hf.wrap_with_peft(model, peft_config, args.seed), None
    given = hf.as_model(model)
    adapter = getattr(given, "adapter", None)
    if adapter is not None and peft_config is not None:
        if as_lora_config(peft_config) != adapter.config:
            raise ValueError("the model already has an adapter, and peft_config describes another one; pass only one")
        warn("peft_config describes the adapter that the model already has, which will be trained; leave it out")
        peft_config = None
    if weights != "same" and not isinstance(given, (str, Path)):
        warn("quantization_config changes nothing: the model is already loaded")
        weights = "same"
    if adapter is not None and beta:
        _check_reference(adapter, beta)
    owner = model if hf.is_torch_model(model) or isinstance(model, hf.CausalLM) else None
    return Policy(given, weights, peft_config, owner)


def _check_reference(adapter: Adapter, beta: float) -> None:
    """Refuses an adapter that changes its base already, as a new one does not, if there is a reference."""

    def changes_in(tree: Any) -> list[LowRank]:
        leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LowRank))
        return [leaf for leaf in leaves if isinstance(leaf, LowRank)]

    changes = changes_in(adapter.trained)
    began = [-each.b for each in changes_in(adapter.removed)] or [0.0] * len(changes)  # of PiSSA, or zero
    if any(bool(jnp.any(change.b != b)) for change, b in zip(changes, began, strict=True)):
        raise ValueError(
            f"beta is {beta}, and the model's adapter was trained before: TRL's reference is a copy of that adapter, "
            "groupax's is the base without it; merge it (model.merge_and_unload()) and pass peft_config for a new one, "
            "or set beta to 0"
        )


class TrainedModel:
    """The object that scripts know as the model, which has the trained weights after every step.

    A model of `compat.hf` refers to them, which costs nothing; to a PyTorch model they are copied.

    Args:
        owner: Object of the script; None for a new `compat.hf` model.
        trainer: Trainer of the weights, which starts from those of `owner`.

    Attributes:
        model: The object.
    """

    def __init__(self, owner: Any, trainer: Trainer) -> None:
        self._trainer = trainer
        started = _master_model(trainer)
        self._torch = hf.TorchWeights(owner, started) if hf.is_torch_model(owner) else None
        self.model = owner if owner is not None else hf.CausalLM(started)
        if self._torch is None:
            self.model.model = started

    def __call__(self, event: Event) -> bool:
        """Updates the object when a step or the run has ended, or it resumes; never asks the run to stop."""
        if isinstance(event, StepEnded | RunEnded) or (isinstance(event, RunStarted) and event.step):
            self.update()
        return False

    def update(self) -> None:
        """Gives the object the weights that the trainer has now."""
        model = _master_model(self._trainer)
        if self._torch is None:
            self.model.model = model
        else:
            self._torch.write(model)


def _master_model(trainer: Trainer) -> Model:
    """Returns the present policy with the weights that updates change, in float32, not with those that sample."""
    model = trainer.model
    learner = trainer.learner
    return model if model.adapter is not None else replace(model, params={**learner.untrained, **learner.state.params})
