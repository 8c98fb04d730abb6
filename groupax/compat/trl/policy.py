"""The model that a script hands to a trainer: what is trained, the object that shows it, its own `generate`."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.compat import hf
from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.config import GRPOConfig
from groupax.engine.sequence import PolicySampler
from groupax.engine.sequence import Sequence as Completion
from groupax.events import Event, Message, RunEnded, RunStarted, StepEnded
from groupax.models.adapted import LowRank
from groupax.models.lora import Adapter, as_lora_config
from groupax.models.weights.checkpoint import Model
from groupax.parallel import processes
from groupax.runs.trainer import Trainer
from groupax.settings.fields import nearest, shown
from groupax.settings.sampling import SamplingParams
from groupax.storage.folders import at_revision
from groupax.training.adapters import PolicyLearner
from groupax.types import Row

# Arguments of transformers' `from_pretrained` without effect, besides those of `hf.INERT`.
_INERT_ARGUMENTS = {
    "cache_dir": "the hub's cache is chosen by HF_HUB_CACHE",
    "local_files_only": "the hub's client is offline with HF_HUB_OFFLINE=1",
    "force_download": "files are downloaded once; remove them from the hub's cache to download them again",
    "resume_download": "interrupted downloads always continue",
    "proxies": "the hub's client reads HTTPS_PROXY",
    "use_kernels": "programs are compiled by XLA",
    "disable_mmap": "weights are read straight to the devices",
    "weights_only": "weights are always safetensors",
    "offload_folder": "weights are put on all devices",
    "offload_state_dict": "weights are read straight to the devices",
    "offload_buffers": "weights are put on all devices",
    "experts_implementation": "experts are computed by groupax's own kernels",
}
# Arguments that change which model is trained, and what to do instead.
_REFUSED_ARGUMENTS = {
    "config": "the model's own config.json counts; edit a copy of the folder",
    "subfolder": "download the repository and name the subfolder as the model",
    "variant": "only the files without a variant are read; convert the model into a folder of its own",
    "gguf_file": "convert the file to safetensors, and name that folder as the model",
    "adapter_kwargs": "load the adapter with compat.hf.PeftModel.from_pretrained, and pass the model",
    "code_revision": "groupax never runs code from a model's folder; leave it out",
    "ignore_mismatched_sizes": "all weights must have the sizes of config.json; leave it out",
    "from_tf": "only safetensors are read; convert the model",
    "from_flax": "only safetensors are read; convert the model",
    "key_mapping": "weights must have the names of their family; convert the model",
    "tp_plan": "set the mesh: parallelism_config has tp_size",
    "output_loading_info": "the trainer loads the model itself; leave it out",
    "state_dict": "pass a model object instead of its name",
}
_EXACT_DTYPES = ("float32", "auto", "None")  # with which TRL trains float32 weights, as groupax does


def resolve_model(model: Any, args: TrainingArguments, quantization_config: Any) -> tuple[Any, Any]:
    """Returns the model with its revision, and its quantization.

    Args:
        model: Model, or its folder or hub id, which `model_init_kwargs` apply to.
        args: Arguments with `model_init_kwargs`.
        quantization_config: The trainer's argument of that name.

    Raises:
        ValueError: An argument changes which model is trained in a way that groupax cannot honour, or is unknown.
    """
    given = dict(parse_mapping(getattr(args, "model_init_kwargs", None), "model_init_kwargs"))
    quantized = given.pop("quantization_config", None)
    if quantization_config is not None and quantized is not None:
        raise ValueError("quantization_config is given twice: to the trainer and in model_init_kwargs")
    given.pop("attn_implementation", None)  # read by `GRPOConfig.to_native`
    revision = given.pop("revision", None)
    for name, value in given.items():
        _check_argument(name, value)
    is_named = isinstance(model, (str, Path))
    if given and not is_named:
        warn("model_init_kwargs change nothing: the model is already loaded")
    named = at_revision(str(model), revision) if is_named and revision not in (None, "main") else model
    return named, quantized if quantization_config is None else quantization_config


def _check_argument(name: str, value: Any) -> None:
    """Warns about an argument without effect, and refuses one that cannot be honoured."""
    if value is None or value is False:  # transformers' defaults
        known = {*_INERT_ARGUMENTS, *_REFUSED_ARGUMENTS, *hf.INERT, "dtype", "torch_dtype"}
        if name not in known:
            raise ValueError(f"model_init_kwargs has {name!r}{nearest(name, known)}")
        return
    if name in _REFUSED_ARGUMENTS:
        raise ValueError(f"model_init_kwargs {name}={shown(value)} is not supported: {_REFUSED_ARGUMENTS[name]}")
    if name in ("dtype", "torch_dtype"):
        if str(value).removeprefix("torch.") not in _EXACT_DTYPES:
            reason = "master weights are float32, and bf16 chooses the dtype of the computation"
            warn(f"model_init_kwargs {name}={value!r} changes nothing in groupax: {reason}")
        return
    inert = _INERT_ARGUMENTS | hf.INERT
    if name not in inert:
        raise ValueError(
            f"model_init_kwargs has {name!r}; groupax cannot tell what it would change in the model, so load the model "
            f"with transformers and pass the object{nearest(name, inert)}"
        )
    warn(f"model_init_kwargs {name}={value!r} changes nothing in groupax: {inert[name]}")


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

    def __init__(self, owner: Any, trainer: Trainer) -> None:
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


def _master_model(trainer: Trainer) -> Model:
    """Returns the present policy with the weights that updates change, in float32, not with those that sample."""
    model = trainer.model
    learner = trainer.learner
    return model if model.adapter is not None else replace(model, params={**learner.untrained, **learner.state.params})


LIBRARIES = ("transformers.", "peft.")  # whose own methods are no overrides


def own_generate(model: Any) -> Callable[..., Any] | None:
    """Returns the method `generate` of a model if a script has written it; None for that of a library."""
    models = [model, model.get_base_model()] if hf.is_peft_model(model) else [model]
    is_own = any("generate" in vars(each) or _is_overridden(type(each)) for each in models)
    return model.generate if is_own else None


def _is_overridden(cls: type) -> bool:
    function = getattr(cls, "generate", None)
    if function is None or function is hf.CausalLM.generate:
        return False
    return not str(getattr(function, "__module__", "")).startswith(LIBRARIES)


class ModelSampler:
    """A sampler that calls a model's `generate` for all that it samples.

    Args:
        generate: The method.
        engine: Engine of the run, which says how sequences start and end.
        learner: Learner that computes log-probs of the completions.
        settings: Settings of the run.
        pad_id: Token for padding.
    """

    def __init__(
        self,
        generate: Callable[..., Any],
        engine: PolicySampler,
        learner: PolicyLearner,
        settings: GRPOConfig,
        pad_id: int,
    ) -> None:
        self.generate, self.engine, self.learner = generate, engine, learner
        self.settings, self.pad_id = settings, pad_id

    @property
    def params(self) -> dict[str, Any]:
        """The weights of the engine; those of the model are the learner's."""
        return self.engine.params

    @params.setter
    def params(self, params: dict[str, Any]) -> None:
        self.engine.params = params

    def release(self) -> None:
        """Frees what the engine does not need between rollouts."""
        self.engine.release()

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Returns sequences that have not started (see `Engine.sequences`)."""
        return self.engine.sequences(prompts, params, step, first_prompt)

    def session(self) -> "GenerateSession":
        """Returns a new session."""
        return GenerateSession(self)


class GenerateSession:
    """A session whose every step samples all that waits, in one call of `generate`."""

    takes_whole_batches = True

    def __init__(self, sampler: ModelSampler) -> None:
        self._sampler, self._waiting = sampler, list[Completion]()

    @property
    def busy(self) -> bool:
        """True while any sequence waits."""
        return bool(self._waiting)

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences."""
        self._waiting += sequences

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Samples all completions and yields them.

        Raises:
            ValueError: The tensor that `generate` returns does not fit to the prompts.
        """
        rows, self._waiting = sorted(self._waiting, key=lambda row: (row.prompt_index, row.sample_index)), []
        for row, tokens in zip(rows, self._completions(rows), strict=True):
            ends = [index for index, token in enumerate(tokens) if token in row.stop_ids]
            row.tokens = tokens[: ends[0] + 1 if ends else None][: row.params.max_tokens]
            row.finish_reason = "stop" if row.tokens[-1] in row.stop_ids else "length"
        logps = self._logps(rows)
        for row, values in zip(rows, logps, strict=True):
            row.policy_logps = row.sampler_logps = values.tolist()
            row.versions = [0] * len(row.tokens)
            yield row, len(row.tokens)

    def close(self) -> None:
        """Drops everything that waits."""
        self._waiting = []

    def _completions(self, rows: Sequence[Completion]) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        sampler, args = self._sampler, self._sampler.settings
        longest = max(len(row.prompt) for row in rows)
        ids = np.full((len(rows), longest), sampler.pad_id)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, longest - len(row.prompt) :] = row.prompt
            mask[index, longest - len(row.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=args.max_completion_length,
            do_sample=True,
            pad_token_id=sampler.pad_id,
            eos_token_id=list(rows[0].stop_ids),
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or None,
            repetition_penalty=args.repetition_penalty,
        )
        with torch.no_grad():
            inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            out = sampler.generate(**inputs, generation_config=config)
        if out.ndim != 2 or len(out) != len(rows) or out.shape[1] <= longest:
            raise ValueError(
                f"the model's own generate returned {list(out.shape)} for {len(rows)} prompts of {longest} tokens; it "
                "must return the prompts, each with a completion after it"
            )
        return out[:, longest:].tolist()

    def _logps(self, sequences: Sequence[Completion]) -> list[np.ndarray]:
        """Returns the log-probs of the completions' tokens under the policy."""
        rows = [
            Row(
                group=index,
                prompt=sequence.prompt,
                completion=np.asarray(sequence.tokens, np.int32),
                mask=np.ones(len(sequence.tokens), bool),
                advantages=np.zeros(len(sequence.tokens), np.float32),
                rollout_logp=np.zeros(len(sequence.tokens), np.float32),
            )
            for index, sequence in enumerate(sequences)
        ]
        learner = self._sampler.learner
        return learner.logprobs(learner.policy, rows)[0]
