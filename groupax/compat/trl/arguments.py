"""The arguments of transformers' `TrainingArguments` that every trainer of TRL 1.16 has, as settings of groupax."""

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from groupax.compat.fields import (
    Arguments,
    arguments,
    former,
    inert,
    interval_steps,
    native_attention,
    parse_mapping,
    refused,
    same,
    warn,
    warn_replicated,
)
from groupax.models.weights.checkpoint import Model
from groupax.parallel import processes
from groupax.parallel.mesh import RULES, format_mesh, splits_model
from groupax.runs.trackers.tracker import PACKAGES, is_installed
from groupax.settings.fields import nearest
from groupax.settings.run import TRACKERS

# Shards weights, gradients and optimizer state over all devices, like ZeRO stage 3 and FSDP.
FULLY_SHARDED = "1,-1,1,1,1"
OPTIMIZERS = {"adamw": "adamw", "paged_adamw": "adamw", "adafactor": "adafactor", "lion": "lion", "sgd": "sgd"}
SCHEDULERS = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

_launcher = inert("one process drives all local devices, without PyTorch's launcher")
_loader = inert("there is no data loader: prompts are tokenized once and selected by index")
_columns = inert("reward functions receive every column, and the model only the prompt")
_compiled = inert("programs are compiled by XLA")
_recomputed = inert("gradient_checkpointing has no options: True recomputes every layer")
_logged = inert("the log has a line every logging_steps, with the numbers as they are")
_level = inert("groupax logs what changes the result, as warnings")
_evaluated = inert(
    "evaluation uses every prompt once, with num_generations_eval completions and the settings of training"
)
_done = inert("train() trains and evaluate() evaluates")
_saved = inert("checkpoints have safetensors and groupax's own state, and those of an earlier run are moved aside")
_uploaded = inert("the model is uploaded once, at the end, with the token in HF_TOKEN")


@arguments("TRL")
class TrainingArguments(Arguments):
    """The arguments of every trainer of TRL, in the order and with the defaults of TRL's own class."""

    # Fields that may be given as JSON text.
    MAPPINGS: ClassVar[tuple[str, ...]] = ("accelerator_config", "deepspeed", "lr_scheduler_kwargs")
    ABSENT: ClassVar[Mapping[str, str]] = {
        "set_dataloader": "set per_device_train_batch_size itself",
        "set_evaluate": "set eval_strategy and eval_steps themselves",
        "set_logging": "set logging_steps and report_to themselves",
        "set_lr_scheduler": "set lr_scheduler_type, num_train_epochs, max_steps and warmup_steps themselves",
        "set_optimizer": "set optim, learning_rate and weight_decay themselves",
        "set_push_to_hub": "set push_to_hub and hub_model_id themselves",
        "set_save": "set save_strategy and save_steps themselves",
        "set_testing": "set eval_strategy itself",
        "set_training": "set learning_rate, per_device_train_batch_size, num_train_epochs and max_steps themselves",
        "ddp_timeout_delta": "processes are connected by JAX",
        "is_torch_greater_or_equal_than_2_8": "it is about PyTorch's version",
        "parallel_mode": "one process drives all devices of a host; parallelism_config has the sizes of the mesh",
        "place_model_on_device": "JAX places the model on the devices",
    }

    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    num_train_epochs: float = same(3.0)
    max_steps: int = same(-1)
    learning_rate: float = same(5e-5)
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = refused(None, "set learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon")
    weight_decay: float = same(0.0)
    adam_beta1: float = same(0.9)
    adam_beta2: float = same(0.999)
    adam_epsilon: float = same(1e-08)
    optim_target_modules: list[str] | str | None = refused(
        None, "groupax has no GaLore, APOLLO or LOMO; choose another optim, or train an adapter"
    )
    gradient_accumulation_steps: int = 1
    average_tokens_across_devices: bool = _launcher(True)
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = inert("only adapters have dropout, and logits and losses are float32")(0.0)
    bf16: bool | None = None
    fp16: bool = False
    bf16_full_eval: bool = _evaluated(False)
    fp16_full_eval: bool = _evaluated(False)
    tf32: bool | None = _compiled(None)
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: dict[str, Any] | str | None = _recomputed(None)
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = _recomputed(None)
    torch_compile: bool = _compiled(False)
    torch_compile_backend: str | None = _compiled(None)
    torch_compile_mode: str | None = _compiled(None)
    use_liger_kernel: bool = _compiled(False)
    liger_kernel_config: dict[str, bool] | None = _compiled(None)
    use_cache: bool = _compiled(False)
    neftune_noise_alpha: float | None = refused(None, "groupax adds no noise to embeddings; leave it out")
    torch_empty_cache_steps: int | None = _compiled(None)
    auto_find_batch_size: bool = refused(False, "micro-batches are sized for the memory at hand; leave it out")
    logging_strategy: str = "steps"
    logging_steps: float = 10
    logging_first_step: bool = _logged(False)
    log_on_each_node: bool = _launcher(True)
    logging_nan_inf_filter: bool = _logged(True)
    include_num_input_tokens_seen: str = _logged("no")
    log_level: str = _level("passive")
    log_level_replica: str = _level("warning")
    disable_tqdm: bool | None = None
    report_to: list[str] | str | None = "none"
    run_name: str | None = None
    project: str = "huggingface"
    trackio_space_id: str | None = refused(None, "trackio reads it from the environment; set TRACKIO_SPACE_ID")
    trackio_bucket_id: str | None = refused(None, "trackio reads it from the environment; set TRACKIO_BUCKET_ID")
    trackio_static_space_id: str | None = refused(None, "trackio copies spaces itself; do so after the run")
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    per_device_eval_batch_size: int = 8
    prediction_loss_only: bool = _columns(False)
    eval_on_start: bool = False
    eval_do_concat_batches: bool = _evaluated(True)
    eval_use_gather_object: bool = _evaluated(False)
    eval_accumulation_steps: int | None = _evaluated(None)
    include_for_metrics: list[str] = _columns([])
    batch_eval_metrics: bool = _evaluated(False)
    save_only_model: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_on_each_node: bool = _launcher(False)
    save_total_limit: int | None = None
    enable_jit_checkpoint: bool = _saved(False)
    push_to_hub: bool = False
    hub_token: str | None = _uploaded(None)
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = _uploaded("every_save")
    hub_always_push: bool = _uploaded(False)
    hub_revision: str | None = _uploaded(None)
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool = refused(
        False, "a resumed run continues with the prompts after those of its checkpoint; leave it out"
    )
    restore_callback_states_from_checkpoint: bool = refused(
        False, "checkpoints do not have the state of callbacks; save it in on_save"
    )
    full_determinism: bool = _compiled(False)
    seed: int = 42
    data_seed: int | None = _loader(None)
    use_cpu: bool = _launcher(False)
    accelerator_config: dict[str, Any] | str | None = _launcher(None)
    parallelism_config: Any = None
    dataloader_drop_last: bool = _loader(False)
    dataloader_num_workers: int = _loader(0)
    dataloader_pin_memory: bool = _loader(True)
    dataloader_persistent_workers: bool = _loader(False)
    dataloader_prefetch_factor: int | None = _loader(None)
    dataloader_multiprocessing_context: str | None = _loader(None)
    dataloader_in_order: bool = _loader(True)
    remove_unused_columns: bool | None = _columns(False)
    label_names: list[str] | None = _loader(None)
    train_sampling_strategy: str = _loader("random")
    length_column_name: str = _loader("length")
    ddp_find_unused_parameters: bool | None = _launcher(None)
    ddp_bucket_cap_mb: int | None = _launcher(None)
    ddp_broadcast_buffers: bool | None = _launcher(None)
    ddp_static_graph: bool | None = _launcher(None)
    ddp_backend: str | None = _launcher(None)
    ddp_timeout: int = _launcher(1800)
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | str | None = inert("weights are sharded over a mesh, without units to wrap")(None)
    deepspeed: dict[str, Any] | str | None = None
    debug: str = _compiled("")
    skip_memory_metrics: bool = _compiled(True)
    do_train: bool = _done(False)
    do_eval: bool = _done(False)
    do_predict: bool = _done(False)
    resume_from_checkpoint: str | None = None
    local_rank: int = _launcher(-1)
    # fields of earlier versions of transformers
    warmup_ratio: float = 0.0
    logging_dir: str | None = inert("trackers write to output_dir/groupax")(None)
    no_cuda: bool = _launcher(False)
    group_by_length: bool = _loader(False)
    overwrite_output_dir: bool = _saved(False)
    save_safetensors: bool = _saved(True)
    evaluation_strategy: str | None = former("eval_strategy")

    def __post_init__(self) -> None:
        """Reads JSON texts, and derives what transformers derives from other fields.

        Raises:
            ValueError: A JSON text cannot be read.
        """
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        for name in ("deepspeed", "run_name", "metric_for_best_model"):  # whose empty texts mean None there
            if getattr(self, name) == "":
                setattr(self, name, None)
        for name in self.MAPPINGS:
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):  # other texts are paths
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    raise ValueError(f"{name} is not valid JSON: {error}") from error
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    # -- what scripts read of transformers' class

    default_optim: ClassVar[str] = "adamw_torch_fused"
    n_gpu: ClassVar[int] = 0  # accelerators on which PyTorch computes
    local_process_index: ClassVar[int] = 0  # each machine has one process
    world_size = property(lambda _: processes.num_processes())
    process_index = property(lambda _: processes.process_index())
    should_log = should_save = property(lambda _: processes.is_primary())
    train_batch_size = property(lambda self: self.per_device_train_batch_size)
    eval_batch_size = property(lambda self: self.per_device_eval_batch_size)

    @property
    def device(self) -> Any:
        """The device of PyTorch's tensors: the CPU."""
        torch = sys.modules.get("torch")
        return "cpu" if torch is None else torch.device("cpu")

    def get_process_log_level(self) -> int:
        """Returns the level of messages to print, as a number of `logging`."""
        return logging.INFO if self.should_log else logging.WARNING

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the steps of warm-up; `warmup_steps` below 1 is a fraction of all steps."""
        steps = self.warmup_steps
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs a block at once: every process has its own caches, and none waits for another."""
        del local, desc
        yield

    # -- settings of groupax

    def compute_settings(self) -> dict[str, Any]:
        """Returns the settings for attention, dtype, sharding and offloading."""
        model_settings = parse_mapping(getattr(self, "model_init_kwargs", None), "model_init_kwargs")
        recomputes = self.activation_checkpointing
        if recomputes is None and not self.gradient_checkpointing:
            recomputes = False
        if self.fp16:
            warn("fp16=True: groupax computes in bfloat16 or float32; it chooses the native dtype of the devices")
        offloads = (_zero(self.deepspeed).get(f"offload_{what}") or {} for what in ("optimizer", "param"))
        optimizer, weights = (dict(each).get("device") not in (None, "none") for each in offloads)
        both = "offload" in _options(self.fsdp)
        if weights or both:
            warn("offload_param: trained weights stay on the devices; groupax offloads the optimizer state only")
        mesh = self._mesh()
        return {
            "attn_implementation": native_attention(model_settings.get("attn_implementation")),
            "gradient_checkpointing": "auto" if recomputes is None else "full" if recomputes else "none",
            "dtype": "auto" if self.fp16 else {None: "auto", True: "bfloat16", False: "float32"}[self.bf16],
            "offload_optimizer": optimizer or both,
            **({"mesh": mesh, "mesh_replicate": tuple(RULES)} if mesh else {}),
        }

    def _mesh(self) -> str | None:
        """Returns the mesh that DeepSpeed, FSDP or accelerate's `ParallelismConfig` ask for; None for no sharding."""
        if self.parallelism_config:
            axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
            sizes = {name: int(getattr(self.parallelism_config, f"{name}_size", None) or 1) for name in axes}
            mesh = sizes["dp_replicate"], sizes["dp_shard"], 1, sizes["tp"], sizes["cp"] * sizes["sp"]
            return ",".join(map(str, mesh))
        if self.deepspeed and _zero(self.deepspeed).get("stage") != 0:
            return FULLY_SHARDED
        return FULLY_SHARDED if self.fsdp and "no_shard" not in _options(self.fsdp) else None

    def warn_about_mesh(self, model: Model) -> None:
        """Warns about the mesh that replaces DeepSpeed, FSDP and accelerate's parallelism."""
        names = ("deepspeed", "fsdp", "parallelism_config")
        requested = {name: repr(getattr(self, name)) for name in names if getattr(self, name)}
        if not requested:
            return
        if (stage := _zero(self.deepspeed).get("stage")) is not None:
            requested["deepspeed"] = f"ZeRO stage {stage}"
        layout = "weights, gradients and optimizer state are sharded over them, and weights are gathered for decoding"
        if not splits_model(model.mesh):
            layout = "each holds all weights and the whole optimizer state, so the model must fit on one device"
        warn(
            f"{' and '.join(f'{name}={value}' for name, value in requested.items())}: groupax needs no launcher. Mesh "
            f"(dp, fsdp, ep, tp, sp) = ({format_mesh(model.mesh)}) over the {model.mesh.devices.size} devices: {layout}"
        )
        warn_replicated(model, " and ".join(requested))

    def reporting_settings(self) -> dict[str, Any]:
        """Returns the settings for logging, trackers and the best checkpoint."""
        metric = self.metric_for_best_model
        return {
            "metric_for_best_model": metric and f"eval_{metric.removeprefix('eval_')}",
            "greater_is_better": self.greater_is_better is not False,
            "logging_steps": self.logged_every(),
            "resume": "never",
            "progress_bar": "none" if self.disable_tqdm else "rich",
            "report_to": self._trackers(),
            "run_name": self.run_name,
            "project": self.project,
        }

    def logged_every(self) -> int:
        """Returns the number of steps between two lines of the log."""
        strategy = getattr(self.logging_strategy, "value", self.logging_strategy)
        if strategy != "steps":
            warn(f"logging_strategy {strategy!r} changes nothing in groupax: metrics are logged every logging_steps")
        if self.logging_steps < 1:
            raise ValueError(f"logging_steps must be a number of steps, got {self.logging_steps}")
        return int(self.logging_steps)

    def _trackers(self) -> tuple[str, ...]:
        """Returns the trackers in `report_to` that groupax supports; "all" means all that are installed."""
        requested = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        if requested == ["all"]:
            return tuple(name for name in TRACKERS if name in PACKAGES and is_installed(name))
        if unknown := [name for name in requested if name not in TRACKERS and name != "none"]:
            warn(f"report_to {', '.join(unknown)}: groupax reports to {', '.join(TRACKERS)}")
        return tuple(dict.fromkeys(name for name in requested if name in TRACKERS))

    def evaluated_every(self, steps_per_epoch: int) -> int:
        """Returns the number of steps between two evaluations; 0 for none."""
        every = self.eval_steps or self.logged_every()
        return interval_steps(self.eval_strategy, every, steps_per_epoch, "eval_strategy")

    def saving_settings(self, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the settings for checkpoints; see `layout.TRLFolders` for what they do not say."""
        self._check_best()
        strategy = getattr(self.save_strategy, "value", self.save_strategy)
        ends = strategy == "steps" and self.save_steps == 0  # only at the end
        is_never = ends or strategy == "best"
        every = 0 if is_never else interval_steps(strategy, self.save_steps, steps_per_epoch, "save_strategy")
        return {
            "save_steps": every,
            "save_interval_minutes": 0.0,
            "save_total_limit": max(2, self.save_total_limit) if self.save_total_limit else None,
            "do_last_save": every > 0 or ends,
            "save_optimizer_state": not self.save_only_model,
        }

    def _check_best(self) -> None:
        """Checks the settings of the best checkpoint as transformers does.

        Raises:
            ValueError: They contradict each other.
        """
        saves, evaluates = (getattr(each, "value", each) for each in (self.save_strategy, self.eval_strategy))
        if saves == "best" and self.metric_for_best_model is None:
            raise ValueError("save_strategy 'best' needs metric_for_best_model, e.g. 'reward', or 'loss'")
        if not self.load_best_model_at_end or saves == "best":
            return
        if evaluates != saves:
            raise ValueError(
                f"load_best_model_at_end needs evaluations where checkpoints are: set eval_strategy {evaluates!r} and "
                f"save_strategy {saves!r} to the same, or save_strategy to 'best'"
            )
        every = self.eval_steps or self.logged_every()
        if evaluates == "steps" and self.save_steps % every:
            raise ValueError(
                f"load_best_model_at_end needs an evaluation at each checkpoint: save_steps {self.save_steps} is not a "
                f"multiple of eval_steps {every}"
            )

    def optimizer_settings(self) -> dict[str, Any]:
        """Returns the settings for `optim`, `lr_scheduler_type` and the warm-up."""
        name = str(getattr(self.optim, "value", self.optim))
        known = [own for own in OPTIMIZERS if name == own or name.startswith(f"{own}_")]
        if not known:
            raise ValueError(
                f"optim {name!r} is not supported; choose from {', '.join(OPTIMIZERS)}{nearest(name, OPTIMIZERS)}"
            )
        if "8bit" in name or "4bit" in name or "paged" in name:
            warn(f"optim {name!r}: groupax keeps the optimizer state in float32 on the devices")
        scheduler = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if scheduler not in SCHEDULERS:
            raise ValueError(
                f"lr_scheduler_type {scheduler!r} is not supported; choose from {', '.join(SCHEDULERS)}"
                f"{nearest(scheduler, SCHEDULERS)}"
            )
        more = dict(parse_mapping(self.lr_scheduler_kwargs, "lr_scheduler_kwargs"))
        end = more.pop("min_lr", None)
        end = self.learning_rate * more.pop("min_lr_rate") if end is None and "min_lr_rate" in more else end
        if more:
            raise ValueError(f"lr_scheduler_kwargs {more} are not supported; choose from min_lr and min_lr_rate")
        steps = self.warmup_steps or 0
        ratio = steps if 0 < steps < 1 else 0 if steps else self.warmup_ratio
        warmup = {"warmup_ratio": float(ratio)} if ratio else {"warmup_steps": int(steps)}
        if scheduler == "constant" and any(warmup.values()):
            warn("lr_scheduler_type 'constant' has no warm-up; 'constant_with_warmup' has one")
            warmup = {}
        return {
            "optimizer": OPTIMIZERS[known[-1]],
            "lr_scheduler_type": SCHEDULERS[scheduler],
            "learning_rate_end": end or 0.0,
            "max_grad_norm": self.max_grad_norm or 0.0,
            **warmup,
        }


def _zero(deepspeed: Any) -> Mapping[str, Any]:
    """Returns the section about ZeRO of a DeepSpeed configuration or its file.

    Raises:
        ValueError: The file does not exist or is not JSON.
    """
    if isinstance(deepspeed, (str, Path)):
        try:
            deepspeed = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed={str(deepspeed)!r} cannot be read: {error}") from error
    return dict(deepspeed).get("zero_optimization", {}) if isinstance(deepspeed, Mapping) else {}


def _options(fsdp: Any) -> list[str]:
    options = fsdp.split() if isinstance(fsdp, str) else [] if isinstance(fsdp, bool) else list(fsdp or [])
    return [str(getattr(option, "value", option)) for option in options]


def torch_optimizer_settings(optimizers: tuple[Any, Any]) -> dict[str, Any]:
    """Returns the settings for the kind and the hyperparameters of a PyTorch optimizer.

    Args:
        optimizers: The optimizer or None, and a scheduler, which must be None.
    """
    optimizer, scheduler = optimizers
    if scheduler is not None:
        raise ValueError(
            "a scheduler object cannot be carried over; set lr_scheduler_type, warmup_steps and learning_rate"
        )
    if optimizer is None:
        return {}
    kind, values = type(optimizer).__name__.lower(), getattr(optimizer, "defaults", None)
    kinds = ("adamw", "sgd", "adafactor", "lion")
    if kind not in kinds or values is None:
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} cannot be carried over (only {', '.join(kinds)}); set optim"
        )
    names = {"lr": "learning_rate", "weight_decay": "weight_decay", "momentum": "momentum", "eps": "adam_epsilon"}
    settings = {names[name]: float(values[name]) for name in names if isinstance(values.get(name), (int, float))}
    if "betas" in values:
        settings |= {"adam_beta1": float(values["betas"][0]), "adam_beta2": float(values["betas"][1])}
    warn(f"groupax takes only the kind of the optimizer {type(optimizer).__name__} and {', '.join(settings)}")
    return {"optimizer": kind, **settings}
