"""`GRPOConfig`: every setting of a run, validated when it is made. Imports no jax."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

from groupax.settings.fields import as_given, as_read, check_range, check_text, check_type, nearest, ranged, shown
from groupax.settings.objective import (
    CLIPPED,
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    MetricDefinitions,
    MultiObjectiveAggregation,
    RolloutCorrection,
    ScaleRewards,
)
from groupax.settings.references import reference_to
from groupax.settings.sampling import EvalSamplingSettings, RolloutSamplingSettings
from groupax.settings.template_kwargs import check_template_kwargs

PromptOverflow = Literal["error", "drop", "truncate_left"]
OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
LRScheduler = Literal["constant", "linear", "cosine"]
WeightDecayScope = Literal["matrices", "all"]
PromptOrder = Literal["shuffled", "shuffled_by_torch", "dataset"]
Checkpointing = Literal["none", "full", "dots", "all_dots"]
AttnImplementation = Literal["auto", "plain", "fused"]
SharePrefix = Literal["auto", "always", "never"]
DecodingWeights = Literal["same", "bfloat16", "int8", "float8"]
BaseWeights = Literal["same", "int8", "float8", "nf4"]
LoRABias = Literal["none", "all", "lora_only"]

MOST_STOPS = 16  # stop texts; servers have such a limit too
MOST_ROWS = 10**7  # completions of a rollout
TRACKERS = ("wandb", "tensorboard", "trackio", "jsonl")

# What TRL and transformers call a setting, and what to set here.
NAMES_ELSEWHERE = {
    "per_device_train_batch_size": "prompts_per_step, which counts the prompts of an optimizer step on all devices",
    "gradient_accumulation_steps": "prompts_per_step; micro-batches are cut by themselves (micro_batch_tokens)",
    "generation_batch_size": "prompts_per_step and updates_per_rollout",
    "steps_per_generation": "updates_per_rollout",
    "per_device_eval_batch_size": "max_concurrent_rows",
    "num_generations_eval": "eval_num_generations",
    "max_new_tokens": "max_completion_length",
    "optim": "optimizer",
    "bf16": "dtype='bfloat16'",
    "fp16": "dtype='bfloat16'",
    "torch_dtype": "dtype",
    "eval_strategy": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "save_strategy": "save_steps or save_interval_minutes",
    "logging_strategy": "logging_steps",
    "shuffle_dataset": "prompt_order",
    "use_vllm": "rollout, for a server; by itself groupax samples with its own engine",
    "vllm_importance_sampling_correction": "rollout_correction",
    "lr_scheduler_kwargs": "learning_rate_end",
    "resume_from_checkpoint": "resume",
    "overwrite_output_dir": "resume='never'",
    "disable_tqdm": "progress_bar='none'",
    "hub_model_id": "groupax push, or GRPOTrainer.push_to_hub",
    "push_to_hub": "groupax push, or GRPOTrainer.push_to_hub",
    "kl_coef": "beta",
    "cliprange": "epsilon",
}

T = TypeVar("T")


def hint_for(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a setting that does not exist: what another library's name is here, or the nearest name."""
    if name in NAMES_ELSEWHERE:
        here = NAMES_ELSEWHERE[name]
        return f"; that is TRL's or transformers' name: here it is {here} (groupax.compat.trl takes TRL's)"
    return nearest(name, known)


def _refusing_unknown_fields(cls: type[T]) -> type[T]:
    init = cls.__init__
    known = {field.name: field.type for field in fields(cls)}  # pyright: ignore[reportArgumentType]

    @functools.wraps(init)
    def checked_init(self: T, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint_for(name, known)}")
        init(self, **{name: as_given(value, known[name]) for name, value in settings.items()})

    cls.__init__ = checked_init
    return cls


# Settings that say something only if there is an adapter.
_OF_ADAPTER = ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_bias", "lora_modules_to_save", "use_rslora")


@_refusing_unknown_fields
@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RolloutSamplingSettings, EvalSamplingSettings):
    """Settings of a GRPO run. Names are TRL's where the concept is the same.

    One optimizer step trains on `prompts_per_step` prompts with `num_generations` completions each.
    """

    output_dir: str = "runs/grpo"
    """The run's folder, or its place in a bucket (s3://, gs://): config.json, metrics.jsonl, rollouts/, checkpoints/
    and the trained model/. An earlier run is continued if it is the same one (see resume), or else moved aside."""
    seed: int = ranged(0, high=2**63 - 1)
    """Of data order and sampling. The same seed gives the same run on the same machine."""

    # How long
    num_train_epochs: float = ranged(3.0, 1e6)
    """Passes over the dataset; ignored if max_steps is set."""
    max_steps: int = ranged(-1, 10**9, low=1, also=-1, because="-1 follows num_train_epochs")
    """Optimizer steps; -1 follows num_train_epochs."""
    prompt_order: PromptOrder = "shuffled"
    """How an epoch visits the prompts: in a permutation of its own, in the one that PyTorch's generator makes of the
    seed, or as they stand in the dataset."""
    whole_epochs: bool = False
    """End an epoch with a whole rollout, leaving out the prompts that make none, and with a step, which may be small;
    otherwise rollouts and steps go on into the next epoch."""

    # The batch
    prompts_per_step: int | float = ranged(8, 10**6, low=1e-4)
    """Prompts per optimizer step; a fraction trains on a group in several steps."""
    num_generations: int = ranged(8, 2**16, low=2, because="a group needs at least 2 completions to compare")
    """Completions per prompt: the group whose rewards are compared."""
    updates_per_rollout: int | float = ranged(1, 10**6, low=1e-4)
    """Optimizer steps per pass over a rollout, which samples prompts_per_step times as many prompts; with a fraction
    steps take completions of several rollouts."""
    num_iterations: int = ranged(1, 10**4, low=1)
    """Passes over each rollout; more than 1 trains off policy, within the clip range."""
    max_staleness: int = ranged(0, 10**4)
    """Make rollouts in threads while earlier steps train, by the policy of so many optimizer steps before the first
    update on them; 0 samples and trains in turn. Needs rollout_correction. See docs/async.md."""
    rollout: str | tuple[str, ...] = ()
    """Addresses of servers that sample the rollouts in place of this process, as http://host:8000; they get the
    policy's weights each time. `groupax serve`, or vLLM or SGLang, which need rollout_correction. Their key is that in
    the environment, GROUPAX_API_KEY. See docs/serving.md."""
    rollout_timeout_s: float = ranged(600.0, 1e6, low=1)
    """The longest that a server of `rollout` may take for the completions of one prompt; `groupax serve` has a limit
    of its own, --request_timeout_s."""
    rollout_folder: str | None = None
    """Where vLLM and SGLang find the policy's weights: a folder with one name here and on their machines; by default
    rollout_weights/ in output_dir."""
    micro_batch_tokens: int | None = ranged(None, 10**9, low=1)
    """Tokens per device that go through the model at once in training; None chooses for the device."""
    filter_zero_variance: bool = False
    """Replace groups whose completions all got the same reward by groups of further prompts (dynamic sampling)."""
    filter_budget: float = ranged(4.0, 1e4, low=1)
    """At most this many times a step's prompts are sampled for it; then groups without signal fill it up."""

    # Prompts and completions
    max_prompt_length: int | None = ranged(None, 10**9, low=1)
    """Longest prompt in tokens; None leaves what the model's context has beside max_completion_length."""
    prompt_overflow: PromptOverflow = "error"
    """What happens to a longer prompt: stop, leave it out, or keep its end."""
    max_completion_length: int = ranged(256, 10**9, low=1)
    """Longest completion in tokens."""
    chat_template: str | None = None
    """A chat template for a tokenizer without one: a built-in name (chatml, plain) or a file."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments for the chat template, e.g. {"enable_thinking": false} for Qwen3. A dataset's column of this name has
    arguments of a row, which go before these."""

    # Objective
    loss_type: LossType | str | Callable[..., Any] = "dapo"
    """Policy loss and how token losses are aggregated: the name of a built-in one, or one of your own as
    "module:function", "module:function(option=1)", a function or a `Loss`; see docs/algorithm.md."""
    beta: float = ranged(0.0, 1e6)
    """Weight of the KL to the starting model; 0 loads no reference."""
    epsilon: float = ranged(0.2, 1e6)
    """The ratio is clipped to at least 1 - epsilon."""
    epsilon_high: float | None = ranged(None, 1e6)
    """The ratio is clipped to at most 1 + epsilon_high; None takes epsilon. For cispo the cap of the ratio itself."""
    delta: float | None = ranged(None, 1e6)
    """Upper bound of the ratio for negative advantages too (two-sided clipping); None for none."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """One ratio per token, or one per completion (GSPO)."""
    sapo_temperature_pos: float = ranged(1.0, 1e6, low=1e-6)
    """sapo: steepness of the gate for positive advantages."""
    sapo_temperature_neg: float = ranged(1.05, 1e6, low=1e-6)
    """sapo: steepness of the gate for the others."""
    vespo_k_pos: float = ranged(2.0, 1e3)
    """vespo: exponent of the weight for advantages that are not negative."""
    vespo_lambda_pos: float = ranged(3.0, 1e3)
    """vespo: decay of the weight for advantages that are not negative."""
    vespo_k_neg: float = ranged(3.0, 1e3)
    """vespo: exponent of the weight for negative advantages."""
    vespo_lambda_neg: float = ranged(2.0, 1e3)
    """vespo: decay of the weight for negative advantages."""
    kl_estimator: KLEstimator | str | Callable[..., Any] = "k3"
    """Estimator of the KL to the reference: k2, k3, or a function of the log-probs of policy and reference."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the ratio, which makes k3's gradient exact."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every ref_model_sync_steps updates."""
    ref_model_mixup_alpha: float = ranged(0.6, 1)
    """The policy's share in the new reference."""
    ref_model_sync_steps: int = ranged(512, 10**9, low=1)
    """Updates between two moves of the reference."""
    advantage_estimator: AdvantageEstimator | str | Callable[..., Any] = "grpo"
    """Computes advantages from rewards: "grpo", by scale_rewards and multi_objective_aggregation, or a function of the
    rewards [B, K], their weights [K] and num_generations that returns [B]."""
    scale_rewards: ScaleRewards = "group"
    """Divide advantages by the rewards' standard deviation in the group, in the batch, or not."""
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize"
    """Normalize the sum of several rewards, or each of them before they are summed (GDPO)."""
    reward_weights: tuple[float, ...] | None = ranged(None, 1e6, low=-1e6)
    """One weight per reward function; None weighs all 1."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss."""
    masked_rows_in_denominator: bool = False
    """Divide the losses of grpo, sapo, dr_grpo and luspo by all rows, those that mask_truncated_completions leaves out
    included, as TRL does; by default by the rows that are left, so that masking does not weaken the step."""
    top_entropy_quantile: float = ranged(1.0, 1)
    """Train on this share of tokens only, those of the highest entropy; below 1 it costs a forward pass a step."""
    off_policy_mask_threshold: float | None = ranged(None, 1e6)
    """Leave completions with negative advantage out whose mean log-prob fell by more; None never does."""
    rollout_correction: RolloutCorrection = "none"
    """Weigh the loss by policy over sampler, per token or sequence, truncated or masked beyond the bounds."""
    rollout_correction_min: float | None = ranged(None, 1e6)
    """Lower bound of that weight; None for none."""
    rollout_correction_max: float | None = ranged(3.0, 1e6, low=1e-6)
    """Upper bound of that weight; None for none."""
    entropy_coef: float = ranged(0.0, 1e3, low=-1e3)
    """Weight of the entropy bonus; the first one if adaptive."""
    use_adaptive_entropy: bool = False
    """Raise the weight while the entropy is below entropy_target, lower it above."""
    entropy_coef_min: float = ranged(0.0, 1e3, low=-1e3)
    """Lower bound of the adaptive weight."""
    entropy_coef_max: float = ranged(1.0, 1e3, low=-1e3)
    """Upper bound of the adaptive weight."""
    entropy_coef_delta: float = ranged(0.005, 1e3)
    """Change of the adaptive weight per update."""
    router_aux_loss_coef: float | None = ranged(None, 1e3)
    """Mixtures of experts: weight of the load-balancing loss; None takes the one of the model's config.json."""
    entropy_target: float = ranged(0.2, 100)
    """Mean token entropy to hold, in nats; set it near what early steps report as `entropy`."""

    # Rewards
    reward_batch: Literal["group", "rollout"] = "group"
    """Call a reward function for each group, while others decode, or once for all completions of a rollout."""
    reward_concurrency: int = ranged(1, 10**4, low=1)
    """Calls of one sync reward function at a time; above 1 it has to bear several threads."""
    reward_workers: int = ranged(0, 10**4)
    """Processes to run sync reward functions in; 0 runs them in threads."""
    reward_workers_on: Literal["processes", "ray"] = "processes"
    """Where: processes of this machine, or tasks on a Ray cluster, the one that is there or a new one here."""
    reward_timeout_s: float | None = ranged(300.0, 1e6, low=1e-3)
    """Longest call of a reward function in seconds; None for no limit."""
    reward_retries: int = ranged(0, 10**3)
    """Further tries of a call that raised or took too long."""
    reward_errors: Literal["none", "raise"] = "none"
    """Completions of a failed call get no reward and are counted, or the run stops."""

    # Adapter
    lora_r: int = ranged(0, 2**16)
    """Rank of a LoRA adapter, which is then all that is trained; 0 trains every weight. See docs/lora.md."""
    lora_alpha: float = ranged(32.0, 1e6, low=1e-6)
    """An adapter's changes are scaled by lora_alpha / lora_r."""
    lora_dropout: float = ranged(0.0, 1, is_open=True)
    """Share of the inputs of an adapter's changes that is left out in training."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules to adapt, by the ends of their names, e.g. q_proj v_proj; "all-linear" is all matrices of the layers."""
    lora_bias: LoRABias = "none"
    """Biases that are trained too: none, all, or those of the adapted modules."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules whose weights are trained whole, e.g. lm_head."""
    use_rslora: bool = False
    """Scale an adapter's changes by lora_alpha / sqrt(lora_r)."""
    base_weights: BaseWeights = "same"
    """The base's weights in memory: as they are stored, or quantized while loading ("nf4" is 4 bits)."""

    # Optimizer
    optimizer: OptimizerName = "adamw"
    """What turns gradients into updates."""
    learning_rate: float = ranged(1e-6, 1e3)
    """Peak learning rate. Small models trained from scratch need far more, e.g. 2e-4."""
    learning_rate_end: float = ranged(0.0, 1e3)
    """Where "linear" and "cosine" end."""
    lr_scheduler_type: LRScheduler = "linear"
    """The schedule after warm-up."""
    warmup_steps: int = ranged(0, 10**9)
    """Steps of linear warm-up."""
    warmup_ratio: float = ranged(0.0, 1)
    """Warm-up as a share of the run, in place of warmup_steps."""
    adam_beta1: float = ranged(0.9, 1, is_open=True)
    """First-moment decay of adamw, lion and muon's adamw."""
    adam_beta2: float = ranged(0.999, 1, is_open=True)
    """Second-moment decay, likewise."""
    adam_epsilon: float = ranged(1e-8, 1)
    """AdamW's denominator floor."""
    momentum: float = ranged(0.0, 1)
    """Of sgd."""
    weight_decay: float = ranged(0.0, 1e3)
    """Decoupled weight decay."""
    weight_decay_scope: WeightDecayScope = "matrices"
    """Whether norms and biases decay too."""
    max_grad_norm: float = ranged(1.0, 1e9)
    """Gradients are clipped to this global norm; 0 does not clip."""
    max_bad_steps: int = ranged(3, 10**9, low=1)
    """Stop after so many updates in a row that were skipped because the loss or a gradient was not finite."""

    # Compute
    mesh: str | None = None
    """Devices along dp, fsdp, ep, tp and sp, e.g. 1,-1,1,1,1; -1 is what is left. Rows are spread over dp, fsdp and ep;
    weights over fsdp, ep (experts) and tp; the tokens of a row over sp. None spreads rows over all devices."""
    mesh_dcn: str | None = None
    """How many slices of accelerators, with a slower network between them, lie along each axis, e.g. 2,1,1,1,1; None
    has all of them along dp."""
    mesh_replicate: tuple[str, ...] = ()
    """Dims that stay whole on every device if they do not divide by the mesh, e.g. kv_heads; others are an error."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere. Master weights are float32 always."""
    gradient_checkpointing: Checkpointing = "none"
    """To save memory the backward pass computes layers again: "full" everything, "dots" all but the products with
    weights, "all_dots" all but products."""
    scan_layers: bool | None = None
    """Whether updates compile layers that are alike once, as a loop over them, which copies their weights; None does so
    on accelerators."""
    attn_implementation: AttnImplementation = "auto"
    """How updates compute attention: "plain" anywhere, or "fused" by a kernel of the accelerator, which keeps
    scores out of its memory; "auto" takes the kernel where there is one for the model. See docs/architecture.md."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the memory of the devices' hosts; it comes to the devices layer by layer while they
    update, and goes again. Results stay the same."""
    offload_reference: bool = False
    """Keep the reference there; it comes to the devices to score a rollout."""
    share_prefix: SharePrefix = "auto"
    """Whether updates compute a prompt once for the rows of its group; "auto" does what takes less."""
    max_concurrent_rows: int = ranged(256, 10**6, low=1)
    """Most completions decoded at once."""
    kv_cache_gb: float | None = ranged(None, 1e6, low=1e-6)
    """Most memory of a device for keys and values, in GB; None allows 80 % of what is free. What does not fit waits."""
    kv_cache_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Of the keys and values; "same" as the weights that are decoded with, on CPU float32."""
    decoding_weights: DecodingWeights = "same"
    """What rollouts decode with: the policy's weights, or a copy of them in fewer bits, which is faster but not quite
    the policy (see rollout_correction)."""
    decoding_tp: int = ranged(1, 10**5, low=1)
    """So many devices share the weights that rollouts are decoded with, each with some of the heads; with 1 each has
    all of them and rows of its own."""

    # Evaluation
    eval_steps: int = ranged(0, 10**9)
    """Evaluate on eval_dataset every so many steps; 0 never does."""
    eval_num_generations: int = ranged(1, 2**16, low=1)
    """Completions per prompt in evaluation; above 1, pass@k and maj@k up to that k are reported."""
    eval_max_completion_length: int | None = ranged(None, 10**9, low=1)
    """Longest completion in evaluation; None takes max_completion_length."""

    # Checkpoints
    save_steps: int = ranged(0, 10**9)
    """Save everything that the next step depends on every so many steps; 0 goes by time alone."""
    save_interval_minutes: float = ranged(10.0, 1e7)
    """Save it when so many minutes have passed since the last time; 0 goes by steps alone."""
    save_total_limit: int | None = ranged(2, 10**6)
    """Checkpoints to keep, the newest ones; 0 or None keeps all."""
    save_optimizer_state: bool = True
    """Whether checkpoints have the optimizer's state; without it they are smaller, but a resumed run is another one."""
    do_last_save: bool = True
    """Save a checkpoint at the end of the run too, so that a longer run can go on from there."""
    metric_for_best_model: str | None = None
    """Keep the checkpoint at which this metric was best too, e.g. "eval_reward"."""
    greater_is_better: bool = True
    """Whether the best metric is the highest."""
    resume: str = "auto"
    """What to go on from: "auto" takes the newest whole checkpoint in output_dir if it is of the same run; "never"
    begins anew; the path of a run or a checkpoint continues that one, with this run's settings where they differ."""

    # Reporting
    solved_by: str | None = None
    """The reward function whose 1 means that a completion is right, for pass@k and solved groups; None takes the first
    built-in one of that kind, e.g. gsm8k_accuracy, if there is one."""
    metric_definitions: MetricDefinitions = "groupax"
    """How metrics that TRL has too are defined where the two differ: "trl" as TRL 1.16 has them (docs/algorithm.md)."""
    logging_steps: int = ranged(1, 10**9, low=1)
    """Write metrics (means over these steps) and rollouts every so many steps."""
    profile: int = ranged(0, 10**6)
    """Trace so many steps, from the third on, into profile/ of the run folder, for Perfetto or XProf."""
    progress_bar: Literal["rich", "tqdm", "json", "none"] = "rich"
    """What is shown while training."""
    log_completions: bool = True
    """Show a sample group now and then, and keep logged steps' rollouts in the run folder."""
    log_completions_steps: int = ranged(1, 10**9, low=1)
    """Keep the rollouts of logged steps that are multiples of this, and of the first and the last one."""
    rollout_log_gb: float | None = ranged(20.0, 1e9)
    """Most GB of rollouts/; beyond it steps are removed such that the others are evenly spread, but never the first,
    the newest and the best one. None for no limit."""
    report_to: tuple[str, ...] = ()
    """Where to report beside the run folder: wandb, tensorboard, trackio, jsonl; see docs/monitoring.md."""
    run_name: str | None = None
    """What the run is called there; None takes the folder's name."""
    project: str = "groupax"
    """What wandb and trackio show the run under."""
    track_memory: bool = False
    """Measure after every step what memory is in use, beside its peak."""
    weight_distribution_log_steps: int = ranged(0, 10**9)
    """Every so many updates measure each weight's norm and how far the update moves it, for which what is trained is
    copied; 0 never does."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_type(field.name, getattr(self, field.name), field.type)
            check_range(field, getattr(self, field.name))
            check_text(field.name, getattr(self, field.name))
        if self.max_steps == -1 and not self.num_train_epochs:
            raise ValueError(
                "num_train_epochs is 0 and max_steps -1, so that there is nothing to train; set one of them"
            )
        rows = self.prompts_per_step * self.updates_per_rollout * self.num_generations
        if rows > MOST_ROWS:
            raise ValueError(
                f"a rollout has {rows:,.0f} completions, and {MOST_ROWS:,} are the most; lower prompts_per_step "
                f"({self.prompts_per_step}), updates_per_rollout ({self.updates_per_rollout}) or num_generations "
                f"({self.num_generations})"
            )
        if self.eval_num_generations > 1 and self.eval_temperature == 0:
            raise ValueError(
                f"eval_num_generations is {self.eval_num_generations}, but at eval_temperature 0 all completions of a "
                "prompt are the same; set eval_temperature, e.g. to 0.8"
            )
        check_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
        for name in ("stop", "eval_stop"):
            _check_stops(name, getattr(self, name) or ())
        if self.mesh is not None:
            mesh_sizes(self.mesh)
        if self.mesh_dcn is not None and min(mesh_sizes(self.mesh_dcn, "mesh_dcn")) < 1:
            raise ValueError(f"mesh_dcn must be numbers of slices, all at least 1, got {self.mesh_dcn!r}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.reward_workers_on == "ray" and not self.reward_workers:
            raise ValueError(
                "reward_workers_on is 'ray', but reward_workers is 0, which calls reward functions in threads of this "
                "process; set how many workers there are, e.g. reward_workers=16"
            )
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                f"for loss_type 'cispo' epsilon_high caps the ratio itself; it is not set, and epsilon = {self.epsilon}"
                " in its place would weaken every on-policy token; set it, e.g. epsilon_high=5.0"
            )
        upper = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.loss_type in CLIPPED and not self.delta > upper:
            raise ValueError(
                f"delta bounds the ratio of tokens with negative advantage far above the clipping at {upper:g}, and of "
                f"on-policy ones it is 1; it is {self.delta}; set it, e.g. to 4.0"
            )
        for name in ("scale_rewards", "multi_objective_aggregation"):
            default = type(self).__dataclass_fields__[name].default
            if self.advantage_estimator != "grpo" and getattr(self, name) != default:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is for advantage_estimator 'grpo', and it is "
                    f"{shown(self.advantage_estimator)}; leave {name} at {default!r}"
                )
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            raise ValueError(
                f"multi_objective_aggregation 'normalize_then_sum' normalizes by group and batch itself; leave "
                f"scale_rewards at 'group', got {self.scale_rewards!r}"
            )
        for name in self.report_to:
            if name not in TRACKERS and ":" not in name:
                raise ValueError(
                    f"report_to must be of {', '.join(TRACKERS)}, or trackers of your own as 'module:class', got "
                    f"{name!r}{nearest(name, TRACKERS)}"
                )
        if len(set(self.report_to)) < len(self.report_to):
            raise ValueError(f"report_to names a tracker twice: {', '.join(self.report_to)}")
        self._check_adapter()
        self._check_staleness()
        for address in self.rollout_servers:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"rollout must name servers as http://host:port, got {address!r}")
        if self.rollout_folder is not None and not self.rollout_servers:
            raise ValueError("rollout_folder is for the servers of rollout, and there are none; set rollout")
        if self.whole_epochs and self.filter_zero_variance:
            raise ValueError("whole_epochs and filter_zero_variance exclude each other: rollouts differ in size then")
        for name in ("sync_ref_model", "offload_reference"):
            if getattr(self, name) and self.beta == 0:
                raise ValueError(f"{name} needs a reference, and beta is 0; set beta above 0")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) are both set; "
                "leave one at 0"
            )
        for name in ("decoding_weights", "base_weights"):
            if self.decoding_tp > 1 and getattr(self, name) not in ("same", "bfloat16"):
                raise ValueError(
                    f"{name} {getattr(self, name)!r} lie whole on every device, and decoding_tp {self.decoding_tp} "
                    f"would split them; set decoding_tp to 1, or {name} to 'same'"
                )
        low, high = self.rollout_correction_min, self.rollout_correction_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"rollout_correction_min {low} is above rollout_correction_max {high}")
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min {self.entropy_coef_min} is above entropy_coef_max {self.entropy_coef_max}"
            )

    def _check_staleness(self) -> None:
        if not self.max_staleness:
            return
        if self.rollout_correction == "none":
            raise ValueError(
                f"max_staleness {self.max_staleness} trains on completions of an earlier policy, and nothing makes up "
                "for it; set rollout_correction, e.g. to 'token_truncate'"
            )
        if self.decoding_tp > 1:
            raise ValueError(
                f"decoding_tp {self.decoding_tp} and max_staleness {self.max_staleness} exclude each other: what "
                "devices exchange in decoding and in updates would wait for each other; set decoding_tp to 1"
            )
        if self.updates_per_rollout != int(self.updates_per_rollout):
            raise ValueError(
                f"updates_per_rollout {self.updates_per_rollout} has steps on several rollouts, which max_staleness "
                "cannot tell apart; make it a whole number"
            )

    @property
    def rollout_servers(self) -> tuple[str, ...]:
        """The addresses of `rollout`."""
        return (self.rollout,) if isinstance(self.rollout, str) else tuple(self.rollout)

    def _check_adapter(self) -> None:
        own = [field for field in fields(self) if field.name in _OF_ADAPTER]
        changed = [field.name for field in own if getattr(self, field.name) != field.default]
        if not self.lora_r and changed:
            raise ValueError(f"{' and '.join(changed)} without an adapter: set lora_r, e.g. to 16")

    def part(self, record: type[T], **more: Any) -> T:
        """The record of that class with the settings of its fields' names, and `more`."""
        assert is_dataclass(record), f"{record} is no dataclass"
        own = {field.name for field in fields(self)}
        return record(**{field.name: getattr(self, field.name) for field in fields(record) if field.name in own} | more)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "GRPOConfig":
        """A config from parsed YAML or JSON.

        Raises:
            TypeError: a key is not a field; names the nearest one.
            ValueError: a value is not of the field's kind.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        read = {name: as_read(value, kinds[name]) for name, value in settings.items() if name in kinds}
        return cls(**{**settings, **read})

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain data, functions as "module:function" references."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: reference_to(x) if callable(x) else copy.deepcopy(x) for name, x in settings.items()}


def _check_stops(name: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        if not text or text.encode(errors="ignore").decode() != text:
            raise ValueError(f"{name} must be texts of at least one character, got {text!r}")
    if len(texts) > MOST_STOPS:
        raise ValueError(f"{name} has {len(texts)} texts, at most {MOST_STOPS} are looked for")


def mesh_sizes(mesh: str, name: str = "mesh") -> tuple[int, int, int, int, int]:
    """The sizes of dp, fsdp, ep, tp and sp in a text like "1,-1,1,1,1".

    Raises:
        ValueError: it is something else.
    """
    try:
        dp, fsdp, ep, tp, sp = sizes = [int(size) for size in mesh.split(",")]
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} must be five numbers with commas, of devices along dp, fsdp, ep, tp and sp, got {mesh!r}; e.g. "
            "1,-1,1,1,1"
        ) from error
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{name} sizes must be at least 1, and one of them may be -1 for what is left, got {mesh!r}")
    return dp, fsdp, ep, tp, sp
