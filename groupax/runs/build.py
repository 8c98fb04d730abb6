"""Builds the parts of a run from its settings."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from groupax.core.config import GRPOConfig, RunConfig
from groupax.core.schedule import UpdateSchedule
from groupax.core.settings import environment as env
from groupax.core.settings.compute import mesh_sizes
from groupax.core.settings.objective import EntropySettings, ObjectiveSettings
from groupax.core.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.data.examples import Examples, load_examples
from groupax.data.files import EVAL_SPLITS
from groupax.data.prompts import PromptSet, encode_examples, prompt_limit
from groupax.data.tokenizer import load_tokenizer, prepare_tokenizer
from groupax.engine.constraints import ConstraintCompiler
from groupax.engine.engine import Engine
from groupax.engine.plan import CHUNK_STEPS, TURN_STEPS, Demand
from groupax.engine.sequence import PolicySampler
from groupax.episodes.custom import RolloutFunction
from groupax.episodes.environment import environment_rewards
from groupax.episodes.rules import SINGLE_TURNS, Rules, make_rules
from groupax.evaluation.items import named_sets
from groupax.models.lora import LoRAConfig, as_lora_config
from groupax.models.specs import Params
from groupax.models.vision.processing import prompt_encoder
from groupax.models.weights.checkpoint import Model, add_adapter, load_model, reshard
from groupax.objective.advantages import find_advantage_estimator
from groupax.objective.losses import zero_metrics
from groupax.objective.ratios import find_estimator
from groupax.parallel import processes
from groupax.parallel.memory import free_memory_bytes
from groupax.parallel.mesh import make_mesh
from groupax.rewards.contract import ENVIRONMENTS, Reward
from groupax.rewards.resolve import check_columns, resolve_rewards
from groupax.rollouts.collector import sampling_params
from groupax.runs.checkpoints.record import stored_dtype
from groupax.training.learner import Learner, LearnerSettings

# Fraction of the memory that is free before the first step, for the KV cache during updates, which take half of it.
KV_FRAC_DURING_UPDATES = 0.4


def check_settings(args: GRPOConfig) -> None:
    """Raises a ValueError if several processes do not support the settings, or a function of the objective is missing.

    Loss and KL estimator must return a number per token.
    """
    num = processes.num_processes()
    if num > 1 and args.max_staleness:
        raise ValueError(f"max_staleness is set, which several processes do not support, and there are {num}")
    zero_metrics(learner_settings(args).objective)
    find_estimator(args.kl_estimator)
    find_advantage_estimator(args.advantage_estimator)


def check_datasets(args: RunConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Raises a ValueError if there is no dataset to train on, or none for the evaluations that the settings ask for."""
    if train_dataset is None:
        raise ValueError("train_dataset is missing; give a Dataset, a list of dicts, a file or a hub id")
    if args.eval_steps and eval_dataset is None:
        raise ValueError(f"eval_steps is {args.eval_steps}, but there is no eval_dataset")


def eval_sets(dataset: Any) -> dict[str, Examples]:
    """Returns the rows of evaluation sets by name."""
    return {
        name: load_examples(each, f"eval_dataset {name!r}", EVAL_SPLITS, may_have_images=True)
        for name, each in ({} if dataset is None else named_sets(dataset)).items()
    }


def check_eval_columns(rewards: Sequence[Reward], examples: Examples, sets: Mapping[str, Examples]) -> None:
    """Raises a ValueError if an evaluation set lacks a column of the training set that a reward function takes."""
    columns = [column for column in examples[0] if column != "prompt"]
    for name, each in sets.items():
        check_columns(rewards, columns, each[0], f"eval_dataset {name!r}")


def rewards_for(
    args: GRPOConfig,
    functions: Any,
    tokenizers: Any,
    examples: Examples,
    environments: Any,
    rollout_func: RolloutFunction | None,
) -> list[Reward]:
    """Returns the rewards of the run, those of its environments last.

    Raises:
        ValueError: a function takes a column that there is not, or two rewards have the same name.
    """
    own = environment_rewards(environments)
    columns = [name for name in examples[0] if name != "prompt"]
    is_one_process = not args.reward_workers and processes.num_processes() == 1  # environments stay in theirs
    if environments is not None and is_one_process:
        columns.append(ENVIRONMENTS)
    columns += () if rollout_func is None else rollout_func.columns
    named = [] if functions is None and own else resolve_rewards(functions, columns, tokenizers)
    clashes = {reward.name for reward in named} & {reward.name for reward in own}
    if clashes:
        raise ValueError(f"a reward function and an environment are both named {', '.join(clashes)}; rename one")
    return [*named, *own]


def model_for(
    args: RunConfig, model: str | Path | Model, lora: LoRAConfig | None = None, is_abstract: bool = False
) -> Model:
    """Returns the model to train on the requested mesh, loaded if it is a name, with a new adapter if one is given.

    An abstract one has shapes in the place of weights.
    """
    mesh, was_loaded = mesh_of(args), not isinstance(model, Model)
    if not isinstance(model, Model):
        weights, replicated = args.base_weights, args.mesh_replicate
        model = load_model(model, mesh=mesh, weights=weights, replicated=replicated, is_abstract=is_abstract)
    elif mesh is not None:
        model = reshard(model, mesh, args.mesh_replicate)
    if lora is not None:
        model = add_adapter(model, lora, args.seed)
    _check_adapter(args, model, was_loaded)
    if model.config.num_labels:
        raise ValueError(f"{model.source or 'the model'} classifies sequences; a policy needs a causal model")
    return model


def mesh_of(args: RunConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Returns the requested mesh, or None."""
    if args.mesh is None and args.mesh_dcn is None:
        return None
    sizes = mesh_sizes(args.mesh) if args.mesh else (-1, 1, 1, 1, 1)
    return make_mesh(sizes, devices, None if args.mesh_dcn is None else mesh_sizes(args.mesh_dcn))


def lora_for(args: RunConfig, peft_config: Any) -> LoRAConfig | None:
    """Returns the adapter that either the settings or a `LoRAConfig` or `peft.LoraConfig` ask for, or None."""
    if peft_config is not None:
        if args.lora_r:
            raise ValueError(f"peft_config and lora_r ({args.lora_r}) both ask for an adapter; leave lora_r at 0")
        return as_lora_config(peft_config)
    if not args.lora_r:
        return None
    return LoRAConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules,
        bias=args.lora_bias,
        use_rslora=args.use_rslora,
        modules_to_save=args.lora_modules_to_save,
        use_dora=args.use_dora,
        rank_pattern=args.lora_rank_pattern,
        alpha_pattern=args.lora_alpha_pattern,
        layers_to_transform=args.lora_layers_to_transform,
        layers_pattern=args.lora_layers_pattern,
        init_lora_weights=True if args.init_lora_weights == "zero" else args.init_lora_weights,
    )


def _check_adapter(args: RunConfig, model: Model, was_loaded: bool) -> None:
    """Raises a ValueError if settings of an adapter's base do not fit the model."""
    if args.base_weights != "same" and (model.adapter is None or not was_loaded):
        raise ValueError(
            f"base_weights {args.base_weights!r} quantizes the base of an adapter while it is loaded: give the "
            "model as a folder or hub id, and set lora_r, e.g. to 16, or pass peft_config; quantized weights "
            "themselves are not trained"
        )
    if not isinstance(args, GRPOConfig) or model.adapter is None:
        return
    if args.sync_ref_model:
        raise ValueError("sync_ref_model moves the reference, which is the base of an adapter; set it to False")
    if args.offload_reference:
        raise ValueError(
            "offload_reference keeps the reference off the devices, but that of an adapter is its base, which is "
            "always needed; set it to False"
        )


def tokenizer_for(args: RunConfig, model: Model, given: Any) -> Any:
    """Returns the given tokenizer, or the one in the model's folder."""
    if hasattr(given, "image_processor"):
        raise ValueError(
            "processing_class is a processor of texts and images; give its tokenizer, or None: images are processed as "
            "the model's folder says, where save_pretrained of a processor writes its settings"
        )
    if given is not None:
        return prepare_tokenizer(given, args.chat_template)
    if model.source is None:
        raise ValueError("a model that was made in memory has no tokenizer; give one as processing_class")
    return load_tokenizer(model.source, args.chat_template)


UNCORRECTED_CONSTRAINT = (
    "response_format constrains what is drawn, so that the turn is not drawn from the policy that is trained; set "
    "rollout_correction='token_truncate' (--rollout_correction token_truncate), which corrects for it, or do without it"
)


def rules_for(
    args: GRPOConfig,
    model: Model,
    tokenizer: Any,
    eos_ids: Sequence[int],
    tools: Sequence[Any],
    environments: Any,
    rollout_func: RolloutFunction | None,
) -> Rules:
    """Returns the rules of the run's episodes."""
    settings = args.part(EpisodeSettings)
    if rollout_func is not None:
        if tools or environments is not None:
            raise ValueError("rollout_func samples whole rollouts, so tools and environments have no effect; drop one")
        if rollout_func.is_recorded and args.rollout_correction == "none":
            raise ValueError(
                "recorded rollouts were sampled by other weights; set rollout_correction, e.g. to 'token_truncate'"
            )
        if args.max_staleness or processes.num_processes() > 1:
            raise ValueError(
                f"rollout_func needs a run of one process with max_staleness 0, and there are "
                f"{processes.num_processes()} processes with max_staleness {args.max_staleness}"
            )
        limits = {"max_tokens": model.config.max_positions, "vocab_size": model.config.vocab_size}
        function = replace(rollout_func, eos_ids=tuple(eos_ids), **limits)
        return Rules(settings, template_kwargs=args.chat_template_kwargs, rollout_func=function)
    rules = make_rules(tokenizer, settings, tools, environments, args.chat_template_kwargs, eos_ids)
    if rules.templates is None:
        return rules
    fault = UNCORRECTED_CONSTRAINT if args.rollout_correction == "none" else None
    return replace(rules, constraint_fault=fault)


def prompts_for(
    args: GRPOConfig,
    model: Model,
    tokenizer: Any,
    examples: Examples,
    rules: Rules,
    max_completion_length: int | None = None,
    dataset: str = "",
) -> PromptSet:
    """Encodes the prompts of examples, which must leave room for completions."""
    name = "max_completion_length" if max_completion_length is None else "eval_max_completion_length"
    length = max_completion_length or args.max_completion_length
    limit = prompt_limit(model.config.max_positions, length, args.max_prompt_length, name)
    encoder = prompt_encoder(model.config.vision, model.source, tokenizer, int(args.image_cache_gb * 1e9))
    prompts = encode_examples(
        examples,
        tokenizer,
        limit,
        args.prompt_overflow,
        args.chat_template_kwargs,
        dataset,
        rules.schemas_of(examples),
        may_be_empty=rules.has_environments,
        encoder=encoder,
    )
    if prompts.images is not None:
        _check_images(args, rules, dataset or "the dataset")
    largest = max((int(ids.max()) for ids in prompts.token_ids if len(ids)), default=0)
    if largest >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model's vocabulary has {model.config.vocab_size} tokens: is "
            "this its tokenizer?"
        )
    return prompts


def eval_prompts_for(
    args: GRPOConfig, model: Model, tokenizer: Any, sets: Mapping[str, Examples], rules: Rules
) -> dict[str, PromptSet]:
    """Encodes the prompts of evaluation sets, by name."""
    length = args.eval_max_completion_length
    return {
        name: prompts_for(args, model, tokenizer, examples, rules, length, f"eval_dataset {name!r}")
        for name, examples in sets.items()
    }


def _check_images(args: GRPOConfig, rules: Rules, dataset: str) -> None:
    """Raises a ValueError if a run whose prompts have images has something that takes text alone."""
    others = {
        "rollout_servers receive prompts as text": bool(args.rollout_servers),
        "rollout_func samples prompts of text": rules.rollout_func is not None,
        "agents write prompts of text": rules.templates is not None,
        "environments write prompts of text": rules.has_environments,
    }
    for reason, is_there in others.items():
        if is_there:
            raise ValueError(f"{dataset} has images, and {reason}; train on it without, or leave the images out")


def learner_settings(args: GRPOConfig) -> LearnerSettings:
    """Returns the settings of updates."""
    entropy = args.part(EntropySettings)
    return args.part(
        LearnerSettings,
        objective=args.part(ObjectiveSettings, entropy_bonus=entropy.has_entropy_bonus),
        entropy=entropy,
        optimizer=args.part(OptimizerSettings),
        schedule=args.part(LearningRateSettings),
    )


def demand_of(args: GRPOConfig, schedule: UpdateSchedule, longest: tuple[int, int], rules: Rules) -> Demand:
    """Returns what a rollout asks of the engine; `longest` are the tokens of the longest prompt and completion."""
    groups = (args.num_generations,) * schedule.prompts_per_rollout
    if rules.has_turns:  # later turns have prompts of their own, with the turns before them
        return Demand((1,) * sum(groups), sum(longest) - 1, longest[1])
    return Demand(groups, longest[0] - 1, longest[1])


def engine_for(
    args: GRPOConfig,
    model: Model,
    learner: Learner,
    eos_ids: tuple[int, ...],
    tokenizer: Any = None,
    expected: Demand | None = None,
    rules: Rules = SINGLE_TURNS,
) -> Engine:
    """Returns the engine of this process with the learner's policy.

    It receives the tokenizer if there may be stop strings, which it searches in the decoded text. Where episodes have
    several turns, chunks are short, since tools are called only after a chunk.
    """
    constraint, has_turns = sampling_params(args).constraint, rules.has_turns
    decodes = args.stop or args.eval_stop or constraint or rules.templates is not None  # programs have their own stops
    engine = Engine(
        model.config,
        learner.policy,
        model.mesh,
        eos_ids,
        tokenizer=tokenizer if decodes else None,
        max_slots=args.max_concurrent_rows,
        kv_bytes=_kv_bytes(args, model),
        kv_dtype=None if args.kv_cache_dtype == "same" else args.kv_cache_dtype,
        weights=args.decoding_weights,
        tp=args.decoding_tp,
        expected=expected,
        chunk_steps=TURN_STEPS if has_turns else CHUNK_STEPS,
        prefix_bytes=int(args.prefix_cache_gb * 1e9) if has_turns else 0,
        features=learner.features,
        record_experts=args.routing_replay,
    )
    check_constraint(args, rules, engine.constraints)
    return engine


def check_constraint(args: GRPOConfig, rules: Rules, constraints: ConstraintCompiler) -> None:
    """Raises a ValueError if the constraint of the settings cannot be kept."""
    constraint = sampling_params(args).constraint
    if constraint is None:
        return
    if rules.has_turns:
        raise ValueError(
            f"{constraint[0]} constrains completions of one turn, and these episodes have several; leave it out, or "
            "train without tools and environments"
        )
    constraints.matcher(*constraint)


def _kv_bytes(args: GRPOConfig, model: Model) -> int | None:
    """Returns the limit of the KV cache; None leaves it to what is free whenever a rollout starts."""
    if args.kv_cache_gb is not None:
        return int(args.kv_cache_gb * 1e9)
    if args.max_staleness:  # an update runs at the same time
        return int(KV_FRAC_DURING_UPDATES * free_memory_bytes(model.mesh))
    return None


def sampler_for(args: GRPOConfig, model: Model, engine: Engine, params: Params, run_folder: Path) -> PolicySampler:
    """Returns what samples rollouts: the engine, or servers that start with the weights `params`."""
    if not args.rollout_servers:
        return engine
    from groupax.serve.client import RemoteSampler
    from groupax.serve.dialects import WeightsFolder

    shared, key = None, os.environ.get(env.API_KEY)
    if args.rollout_correction != "none":
        folder = Path(args.rollout_folder or run_folder / "rollout_weights").expanduser()
        shared = WeightsFolder(folder, model, jnp.dtype(stored_dtype(model)), is_own=args.rollout_folder is None)
    servers, eos_ids, timeout_s = args.rollout_servers, engine.eos_ids, args.rollout_timeout_s
    return RemoteSampler(
        servers, model.config, params, eos_ids, model.adapter, shared, api_key=key, timeout_s=timeout_s
    )


def eval_params(args: GRPOConfig) -> SamplingParams:
    """Returns the sampling parameters of evaluations."""
    max_tokens = args.eval_max_completion_length or args.max_completion_length
    return replace(sampling_params(args), n=args.eval_num_generations, max_tokens=max_tokens, **args.eval_sampling)
