"""The native settings that follow from fields which every config of TRL has."""

from typing import Any

from groupax.compat.fields import interval_steps, native_attention, parse_mapping, warn
from groupax.compat.meshes import requested_mesh, requested_offload, warn_replicated, zero_stage
from groupax.compat.trl.training_arguments import TrainingArguments
from groupax.models.weights.checkpoint import Model
from groupax.parallel.mesh import RULES, format_mesh, splits_model
from groupax.runs.trackers.tracker import PACKAGES, is_installed
from groupax.settings.run import TRACKERS


class RunArguments(TrainingArguments):
    """The arguments of a run with their native settings: devices, logs, checkpoints."""

    model_init_kwargs: Any

    def __repr__(self) -> str:
        given = (
            f"{name}={value!r}" for name, value in self.to_dict().items() if value != self.FIELDS.defaults.get(name)
        )
        return f"{type(self).__name__}({', '.join(given)})"

    def warn_about_mesh(self, model: Model) -> None:
        """Warns about the mesh that replaces DeepSpeed, FSDP and accelerate's parallelism."""
        names = ("deepspeed", "fsdp", "parallelism_config")
        requested = {name: repr(getattr(self, name)) for name in names if getattr(self, name)}
        if not requested:
            return
        stage = zero_stage(self.deepspeed) if self.deepspeed else None
        requested |= {"deepspeed": f"ZeRO stage {stage}"} if stage is not None else {}
        layout = "weights, gradients and optimizer state are sharded over them, and weights are gathered for decoding"
        if not splits_model(model.mesh):
            layout = "each holds all weights and the whole optimizer state, so the model must fit on one device"
        warn(
            f"{' and '.join(f'{name}={value}' for name, value in requested.items())}: groupax needs no launcher. Mesh "
            f"(dp, fsdp, ep, tp, sp) = ({format_mesh(model.mesh)}) over the {model.mesh.devices.size} devices: {layout}"
        )
        warn_replicated(model, " and ".join(requested))

    def compute_settings(self) -> dict[str, Any]:
        """Returns the native settings for attention, dtype, sharding and offloading."""
        model_settings = parse_mapping(self.model_init_kwargs, "model_init_kwargs")
        recomputes = self.activation_checkpointing
        if recomputes is None and not self.gradient_checkpointing:
            recomputes = False
        offload_optimizer, offload_weights = requested_offload(self.deepspeed, self.fsdp)
        if offload_weights:
            warn("offload_param: trained weights stay on the devices; groupax offloads the optimizer state only")
        mesh = requested_mesh(self.deepspeed, self.fsdp, self.parallelism_config)
        return {
            "attn_implementation": native_attention(model_settings.get("attn_implementation")),
            "gradient_checkpointing": "auto" if recomputes is None else "full" if recomputes else "none",
            "dtype": self._dtype(),
            "offload_optimizer": offload_optimizer,
            **({"mesh": mesh, "mesh_replicate": tuple(RULES)} if mesh else {}),
        }

    def reporting_settings(self) -> dict[str, Any]:
        """Returns the native settings for logging, trackers and the best checkpoint."""
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
        known = [name for name in requested if name in TRACKERS]
        if unknown := [name for name in requested if name not in TRACKERS and name != "none"]:
            warn(f"report_to {', '.join(unknown)}: groupax reports to {', '.join(TRACKERS)}")
        return tuple(dict.fromkeys(known))

    def _dtype(self) -> str:
        if self.fp16:
            warn("fp16=True: groupax computes in bfloat16 or float32; it chooses the native dtype of the devices")
            return "auto"
        return {None: "auto", True: "bfloat16", False: "float32"}[self.bf16]

    def saving_settings(self, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the native settings for checkpoints; see `layout.Flow` for what they do not say."""
        self._check_best()
        strategy = getattr(self.save_strategy, "value", self.save_strategy)
        ends = strategy == "steps" and self.save_steps == 0  # only at the end
        every = (
            0
            if ends or strategy == "best"
            else interval_steps(strategy, self.save_steps, steps_per_epoch, "save_strategy")
        )
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
