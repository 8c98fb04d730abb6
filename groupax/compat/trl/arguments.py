"""The arguments of transformers' `TrainingArguments` that every trainer of TRL 1.16 has, as settings of groupax."""

import logging
import sys
from typing import Any, ClassVar

from groupax.compat.fields import (
    Arguments,
    arguments,
    interval_steps,
    native_attention,
    parse_mapping,
    warn,
    warn_replicated,
)
from groupax.core.settings.fields import check_known
from groupax.core.settings.run import TRACKERS
from groupax.models.weights.checkpoint import Model
from groupax.parallel import processes
from groupax.parallel.mesh import RULES, format_mesh
from groupax.runs.trackers.tracker import is_installed

# Shards weights, gradients and optimizer state over all devices, like ZeRO stage 3 and FSDP.
FULLY_SHARDED = "1,-1,1,1,1"
OPTIMIZERS = {"adamw": "adamw", "paged_adamw": "adamw", "adafactor": "adafactor", "lion": "lion", "sgd": "sgd"}
# Fields that take dicts, from a command line as JSON.
JSON_FIELDS = {"lr_scheduler_kwargs", "deepspeed", "model_init_kwargs", "generation_kwargs", "chat_template_kwargs"}
SCHEDULERS = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

_INERT = {
    "one process drives all local devices, without PyTorch's launcher": """
        average_tokens_across_devices=True log_on_each_node=True save_on_each_node=False use_cpu=False no_cuda=False
        accelerator_config=None local_rank=-1 ddp_find_unused_parameters=None ddp_bucket_cap_mb=None
        ddp_broadcast_buffers=None ddp_static_graph=None ddp_backend=None ddp_timeout=1800""",
    "there is no data loader: prompts are tokenized once and selected by index": """
        data_seed=None dataloader_drop_last=False dataloader_num_workers=0 dataloader_pin_memory=True
        dataloader_persistent_workers=False dataloader_prefetch_factor=None dataloader_multiprocessing_context=None
        dataloader_in_order=True label_names=None train_sampling_strategy='random' length_column_name='length'
        group_by_length=False""",
    "reward functions receive every column, and the model only the prompt": """
        prediction_loss_only=False include_for_metrics=[] remove_unused_columns=False""",
    "programs are compiled by XLA": """
        tf32=None torch_compile=False torch_compile_backend=None torch_compile_mode=None use_liger_kernel=False
        liger_kernel_config=None use_cache=False torch_empty_cache_steps=None full_determinism=False debug=''
        skip_memory_metrics=True""",
    "gradient_checkpointing has no options: True recomputes every layer": """
        activation_checkpointing_kwargs=None gradient_checkpointing_kwargs=None""",
    "the log has a line every logging_steps, with the numbers as they are": """
        logging_strategy='steps' logging_first_step=False logging_nan_inf_filter=True
        include_num_input_tokens_seen='no'""",
    "groupax logs what changes the result, as warnings": "log_level='passive' log_level_replica='warning'",
    "evaluation uses every prompt once, with num_generations_eval completions and the settings of training": """
        per_device_eval_batch_size=8 bf16_full_eval=False fp16_full_eval=False eval_do_concat_batches=True
        eval_use_gather_object=False eval_accumulation_steps=None batch_eval_metrics=False""",
    "train() trains and evaluate() evaluates": "do_train=False do_eval=False do_predict=False",
    "checkpoints have safetensors and groupax's own state, and those of an earlier run are moved aside": """
        enable_jit_checkpoint=False overwrite_output_dir=False save_safetensors=True""",
    "the model is uploaded once, at the end, with the token in HF_TOKEN": """
        hub_token=None hub_strategy='every_save' hub_always_push=False hub_revision=None""",
    "only adapters have dropout, and logits and losses are float32": "label_smoothing_factor=0.0",
    "weights are sharded over a mesh, without units to wrap": "fsdp_config=None",
    "trackers write to output_dir/groupax": "logging_dir=None",
}
_REFUSED = {
    "set learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon": "optim_args=None",
    "groupax has no GaLore, APOLLO or LOMO; choose another optim, or train an adapter": "optim_target_modules=None",
    "groupax adds no noise to embeddings; leave it out": "neftune_noise_alpha=None",
    "evaluations start at the first interval; leave it out": "eval_delay=0",
    "micro-batches are sized for the memory at hand; leave it out": "auto_find_batch_size=False",
    "trackio reads it from the environment; set TRACKIO_SPACE_ID or TRACKIO_BUCKET_ID": """
        trackio_space_id=None trackio_bucket_id=None trackio_static_space_id=None""",
    "a resumed run continues with the prompts after those of its checkpoint; leave it out": "ignore_data_skip=False",
    "checkpoints do not have the state of callbacks; save it in on_save": """
        restore_callback_states_from_checkpoint=False""",
}


@arguments("TRL", inert=_INERT, refused=_REFUSED)
class TrainingArguments(Arguments):
    """The arguments of every trainer of TRL, with the defaults of TRL's own class."""

    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0  # of earlier versions of transformers
    optim: str = "adamw_torch_fused"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-08
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    bf16: bool | None = None
    fp16: bool = False
    activation_checkpointing: bool | None = None
    gradient_checkpointing: bool = True
    logging_steps: float = 10
    disable_tqdm: bool | None = None
    report_to: list[str] | str | None = "none"
    run_name: str | None = None
    project: str = "huggingface"
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    save_only_model: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    push_to_hub: bool = False
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    seed: int = 42
    parallelism_config: Any = None
    fsdp: str | None = None
    deepspeed: dict[str, Any] | str | None = None
    resume_from_checkpoint: str | None = None

    def __post_init__(self) -> None:
        """Reads JSON texts, and derives what transformers derives from other fields."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        for name in ("deepspeed", "run_name", "metric_for_best_model"):  # whose empty texts mean None there
            if getattr(self, name) == "":
                setattr(self, name, None)
        for name in ("eval_strategy", "save_strategy", "optim", "lr_scheduler_type"):  # which may be enums
            value = getattr(self, name)
            setattr(self, name, getattr(value, "value", value))
        for name in JSON_FIELDS & self.FIELDS.defaults.keys():
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):  # other texts are paths
                setattr(self, name, parse_mapping(value, name))
        if self._seeks_best and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    # -- what scripts read of transformers' class

    n_gpu: ClassVar[int] = 0  # accelerators on which PyTorch computes
    local_process_index: ClassVar[int] = 0  # each machine has one process
    world_size = property(lambda _: processes.num_processes())
    process_index = property(lambda _: processes.process_index())
    should_log = should_save = property(lambda _: processes.is_primary())
    device = property(lambda _: torch_cpu())

    def get_process_log_level(self) -> int:
        """Returns the level of messages to print, as a number of `logging`."""
        return logging.INFO if self.should_log else logging.WARNING

    # -- settings of groupax

    @property
    def _seeks_best(self) -> bool:
        """True if an evaluation decides which checkpoint matters."""
        return self.load_best_model_at_end or self.save_strategy == "best"

    def compute_settings(self) -> dict[str, Any]:
        """Returns the settings for attention, dtype and sharding."""
        model_settings = parse_mapping(getattr(self, "model_init_kwargs", None), "model_init_kwargs")
        recomputes = self.activation_checkpointing
        if recomputes is None and not self.gradient_checkpointing:
            recomputes = False
        if self.fp16:
            warn("fp16=True: groupax computes in bfloat16 or float32; it chooses the native dtype of the devices")
        mesh = self._mesh()
        return {
            "attn_implementation": native_attention(model_settings.get("attn_implementation")),
            "gradient_checkpointing": "auto" if recomputes is None else "full" if recomputes else "none",
            "freeze_vision_tower": False,
            "dtype": "auto" if self.fp16 else {None: "auto", True: "bfloat16", False: "float32"}[self.bf16],
            **({"mesh": mesh, "mesh_replicate": tuple(RULES)} if mesh else {}),
        }

    def _mesh(self) -> str | None:
        """Returns the mesh that DeepSpeed, FSDP or accelerate's `ParallelismConfig` ask for; None for no sharding."""
        if self.parallelism_config:
            axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
            sizes = {name: int(getattr(self.parallelism_config, f"{name}_size", None) or 1) for name in axes}
            mesh = sizes["dp_replicate"], sizes["dp_shard"], 1, sizes["tp"], sizes["cp"] * sizes["sp"]
            return ",".join(map(str, mesh))
        return FULLY_SHARDED if self.deepspeed or self.fsdp else None

    def warn_about_mesh(self, model: Model) -> None:
        """Warns about the mesh that replaces DeepSpeed, FSDP and accelerate's parallelism."""
        requested = [name for name in ("deepspeed", "fsdp", "parallelism_config") if getattr(self, name)]
        if requested:
            warn(
                f"{' and '.join(requested)}: groupax needs no launcher, and takes no further options of it, such as "
                "offloading. Weights, gradients and optimizer state are divided over the "
                f"{model.mesh.devices.size} devices by the mesh (dp, fsdp, ep, tp, sp) = ({format_mesh(model.mesh)})"
            )
            warn_replicated(model, " and ".join(requested))

    def reporting_settings(self) -> dict[str, Any]:
        """Returns the settings for logging, trackers and the best checkpoint."""
        metric = self.metric_for_best_model if self._seeks_best or self.save_strategy != "no" else None
        return {
            "metric_for_best_model": metric and f"eval_{metric.removeprefix('eval_')}",
            "greater_is_better": self.greater_is_better is not False,
            "logging_steps": self.logged_every(),
            "resume": "never",
            "progress_bar": "none" if self.disable_tqdm else "rich",
            "report_to": self._trackers(),
        }

    def logged_every(self) -> int:
        """Returns the number of steps between two lines of the log."""
        if self.logging_steps < 1:
            raise ValueError(f"logging_steps must be a number of steps, got {self.logging_steps}")
        return int(self.logging_steps)

    def _trackers(self) -> tuple[str, ...]:
        """Returns the trackers in `report_to` that groupax supports; "all" means all that are installed."""
        requested = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        if requested == ["all"]:
            return tuple(name for name in TRACKERS if is_installed(name))
        if unknown := [name for name in requested if name not in TRACKERS and name != "none"]:
            warn(f"report_to {', '.join(unknown)}: groupax reports to {', '.join(TRACKERS)}")
        return tuple(dict.fromkeys(name for name in requested if name in TRACKERS))

    def evaluated_every(self, steps_per_epoch: int) -> int:
        """Returns the number of steps between two evaluations; 0 for none."""
        every = self.eval_steps or self.logged_every()
        return interval_steps(self.eval_strategy, every, steps_per_epoch, "eval_strategy")

    def saving_settings(self, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the settings for checkpoints; see `layout.TRLFolders` for callbacks' requests."""
        if self._seeks_best and self.eval_strategy == "no":
            raise ValueError("the best checkpoint needs evaluations; set eval_strategy to 'steps' or 'epoch'")
        ends = self.save_strategy == "steps" and self.save_steps == 0  # only at the end
        strategy = "no" if ends or self.save_strategy == "best" else self.save_strategy
        every = interval_steps(strategy, self.save_steps, steps_per_epoch, "save_strategy")
        return {
            "save_steps": every,
            "save_interval_minutes": 0.0,
            "save_total_limit": max(2, self.save_total_limit) if self.save_total_limit else None,
            "do_last_save": every > 0 or ends,
            "save_optimizer_state": not self.save_only_model,
        }

    def optimizer_settings(self) -> dict[str, Any]:
        """Returns the settings for `optim`, `lr_scheduler_type` and the warm-up."""
        name, scheduler = str(self.optim), str(self.lr_scheduler_type)
        known = [own for own in OPTIMIZERS if name == own or name.startswith(f"{own}_")]
        check_known(known[0] if known else name, OPTIMIZERS, f"optim {name!r} is not supported")
        if "8bit" in name or "4bit" in name or "paged" in name:
            warn(f"optim {name!r}: groupax keeps the optimizer state in float32 on the devices")
        check_known(scheduler, SCHEDULERS, f"lr_scheduler_type {scheduler!r} is not supported")
        more = dict(parse_mapping(self.lr_scheduler_kwargs, "lr_scheduler_kwargs"))
        end = more.pop("min_lr", None)
        end = self.learning_rate * more.pop("min_lr_rate") if end is None and "min_lr_rate" in more else end
        if more:
            raise ValueError(f"lr_scheduler_kwargs {more} are not supported; choose from min_lr and min_lr_rate")
        if end and SCHEDULERS[scheduler] == "constant":
            raise ValueError(f"lr_scheduler_type {scheduler!r} never reaches min_lr; leave lr_scheduler_kwargs out")
        steps = self.warmup_steps or 0
        ratio = steps if 0 < steps < 1 else 0 if steps else self.warmup_ratio
        if scheduler == "constant" and (ratio or steps):
            warn("lr_scheduler_type 'constant' has no warm-up; 'constant_with_warmup' has one")
            ratio = steps = 0
        return {
            "optimizer": OPTIMIZERS[known[-1]],
            "lr_scheduler_type": SCHEDULERS[scheduler],
            "learning_rate_end": end or 0.0,
            "max_grad_norm": self.max_grad_norm or 0.0,
            "warmup_ratio": float(ratio),
            "warmup_steps": 0 if ratio else int(steps),
        }


def torch_cpu() -> Any:
    """Returns the device of PyTorch's tensors in scripts, the CPU; its name if PyTorch is not imported."""
    torch = sys.modules.get("torch")
    return "cpu" if torch is None else torch.device("cpu")
