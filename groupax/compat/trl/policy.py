"""The model that a script hands to a trainer: what the native trainer trains, and the object that shows it."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from groupax.compat import hf
from groupax.compat.fields import warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.compat.trl.model_kwargs import resolve_model
from groupax.events import Event, Message, RunEnded, RunStarted, StepEnded
from groupax.models.adapted import LowRank
from groupax.models.checkpoint import Model
from groupax.models.lora import Adapter, as_lora_config
from groupax.parallel import processes
from groupax.runs.results import PolicyResults

MUCH = 0.05  # of the time of training, which is reported


@dataclass(frozen=True)
class Policy:
    """The model to train, its adapter config, and the quantization of its base weights.

    Attributes:
        model: What the native trainer receives.
        peft_config: Settings of an adapter that the native trainer adds.
        weights: Quantization of base weights that are not loaded yet.
        owner: Object of the script that is trained in place; None if there is none.
    """

    model: Any
    peft_config: Any
    weights: Any
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
        _check_processes(model)
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
    return Policy(given, peft_config, weights, owner)


def check_dropout(peft_config: Any) -> None:
    """Raises a ValueError if an adapter is asked for whose dropout `disable_dropout` would disable."""
    if peft_config is not None and as_lora_config(peft_config).lora_dropout:
        raise ValueError("disable_dropout=True would disable the adapter's lora_dropout; set one of them to 0")


def _check_reference(adapter: Adapter, beta: float) -> None:
    """Refuses an adapter that changes its base already, as a new one does not, if there is a reference."""
    changes = jax.tree.leaves(adapter.trained, is_leaf=lambda node: isinstance(node, LowRank))
    if any(bool(jnp.any(change.b != 0)) for change in changes if isinstance(change, LowRank)):
        raise ValueError(
            f"beta is {beta}, and the model's adapter was trained before: TRL's reference is a copy of that adapter, "
            "groupax's is the base without it; merge it (model.merge_and_unload()) and pass peft_config for a new one, "
            "or set beta to 0"
        )


def _check_processes(model: Any) -> None:
    if processes.num_processes() > 1:
        raise ValueError(
            f"a {type(model).__name__} of PyTorch cannot be trained by {processes.num_processes()} processes, since "
            "each has its own; pass the model's folder or hub id"
        )


def adapter_settings(peft_config: Any) -> dict[str, Any]:
    """Returns an adapter config as native settings, which a base that is quantized while loading needs."""
    if peft_config is None:
        return {}
    lora = as_lora_config(peft_config)
    names = lora.target_modules
    if isinstance(names, str) and names != "all-linear":
        raise ValueError("target_modules as a regular expression needs a loaded model; name the modules")
    return {
        "lora_r": lora.r,
        "lora_alpha": float(lora.lora_alpha),
        "lora_dropout": float(lora.lora_dropout),
        "lora_target_modules": (names,) if isinstance(names, str) else tuple(names),
        "lora_bias": lora.bias,
        "use_rslora": lora.use_rslora,
        "lora_modules_to_save": tuple(lora.modules_to_save),
    }


class TrainedModel:
    """The object that scripts know as the model, which has the trained weights after every step.

    A model of `compat.hf` refers to them, which costs nothing; to a PyTorch model they are copied.

    Args:
        owner: Object of the script; None for a new `compat.hf` model.
        trainer: Trainer of the weights, which starts from those of `owner`.

    Attributes:
        model: The object.
        seconds: Time that the copies took.
    """

    def __init__(self, owner: Any, trainer: PolicyResults) -> None:
        self._trainer, self.seconds = trainer, 0.0
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
        started = time.perf_counter()
        model = _master_model(self._trainer)
        if self._torch is None:
            self.model.model = model
        else:
            self._torch.write(model)
            self.seconds += time.perf_counter() - started

    def report_cost(self, train_seconds: float) -> None:
        """Reports what the copies cost if it is much of the training's time."""
        if self.seconds > MUCH * train_seconds:
            self._trainer.emit(
                Message(
                    f"copying the trained weights into the given {type(self.model).__name__} after every step took "
                    f"{self.seconds:.1f} s of {train_seconds:.1f} s; a folder or hub id as model needs no copies"
                )
            )


def _master_model(trainer: PolicyResults) -> Model:
    """Returns the present policy with the weights that updates change, in float32, not with those that sample."""
    model = trainer.model
    learner = trainer.learner
    return model if model.adapter is not None else replace(model, params={**learner.untrained, **learner.state.params})
