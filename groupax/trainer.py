"""The trainer: GRPO as the paper's Algorithm 1 has it (arXiv:2402.03300)."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.batch import Row, pack
from groupax.config import GRPOConfig
from groupax.data import Examples, PromptSet, encode_examples, load_examples, num_steps, visit_order
from groupax.engine.engine import Engine
from groupax.engine.params import SamplingParams
from groupax.evaluate import Evaluation, evaluate
from groupax.health import setup_findings, step_findings
from groupax.metrics import Metrics, completion_metrics, reward_metrics, window_mean
from groupax.models.checkpoint import Model, load_model, save_model
from groupax.models.specs import Params
from groupax.objective.advantages import group_advantages
from groupax.objective.aggregation import Denominators
from groupax.objective.settings import ObjectiveSettings
from groupax.optimizer import make_optimizer, make_schedule
from groupax.parallel.mesh import num_data_shards
from groupax.progress import PROGRESS_BARS
from groupax.rewards.contract import resolve_rewards, rewards_by_name, score
from groupax.rollout import Rollout, rollout
from groupax.step import (
    LOGP_DIFF,
    TrainState,
    apply_update,
    compute_view,
    init_state,
    micro_step,
    to_rows,
    zero_totals,
)
from groupax.step import score as score_batch
from groupax.tokenizer import eos_token_ids, load_tokenizer, prepare_tokenizer
from groupax.tracking import RunFolder


@dataclass(frozen=True)
class TrainResult:
    """What `GRPOTrainer.train` did.

    Attributes:
        num_steps: optimizer steps.
        train_seconds: wall time of the loop, evaluation included, loading and saving not.
        rollout_tokens_per_s: sampled tokens over the time spent sampling.
        metrics: of the last logged step.
    """

    num_steps: int
    train_seconds: float
    rollout_tokens_per_s: float
    metrics: Metrics


class GRPOTrainer:
    """Trains a language model with Group Relative Policy Optimization.

    Args:
        model: a folder, a hub id, or a `Model`. A `Model`'s own weights stay as they are.
        reward_funcs: one or several reward functions, by reference or name (see `rewards.contract`).
        args: settings; the defaults if None.
        train_dataset: prompts: a `datasets.Dataset`, a list of dicts, a .jsonl, .json or .parquet file, or a hub id,
            with a column `prompt`. Every other column reaches the reward functions.
        eval_dataset: likewise, for `evaluate` and `eval_steps`.
        processing_class: the tokenizer; by default the one in the model's folder.

    Raises:
        ValueError: anything about these that could only fail later.

    Example:
        >>> trainer = GRPOTrainer("Qwen/Qwen3-0.6B", my_reward, train_dataset="prompts.jsonl")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path | Model,
        reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
    ) -> None:
        self.args = args = args or GRPOConfig()
        if train_dataset is None:
            raise ValueError("train_dataset is missing; give a Dataset, a list of dicts, a file or a hub id")
        train_examples = load_examples(train_dataset)
        eval_examples = None if eval_dataset is None else load_examples(eval_dataset, "eval_dataset")
        if args.eval_steps and eval_examples is None:
            raise ValueError(f"eval_steps is {args.eval_steps}, but there is no eval_dataset")
        self.rewards = resolve_rewards(reward_funcs, [name for name in train_examples[0] if name != "prompt"])
        self.reward_weights = _weights(args, len(self.rewards))
        self.run_folder = RunFolder(args.output_dir)

        self.model = model if isinstance(model, Model) else load_model(model)
        self.tokenizer = self._tokenizer(processing_class)
        self.eos_ids = eos_token_ids(self.tokenizer, self.model.generation_config, self.model.hf_config)
        self.prompts = self._encode(train_examples)
        self.eval_prompts = None if eval_examples is None else self._encode(eval_examples)

        self.num_steps = num_steps(
            len(self.prompts), args.prompts_per_step, args.num_iterations, args.num_train_epochs, args.max_steps
        )
        self.settings = _objective_settings(args)
        self.schedule = make_schedule(
            args.lr_scheduler_type, args.learning_rate, args.learning_rate_end, args.warmup_steps, self.num_steps
        )
        self.optimizer = make_optimizer(
            self.schedule, args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay, args.max_grad_norm
        )
        self.state: TrainState = init_state(self.model.params, optimizer=self.optimizer)
        self.policy = self._policy()
        self.reference = compute_view(self.state.params, dtype=self.dtype) if args.beta > 0 else None
        self.engine = Engine(
            self.model.config, self.policy, self.model.mesh, self.eos_ids, max_slots=args.max_concurrent_rows
        )
        self.step = 0
        self.num_tokens = 0

    # -- Algorithm 1 ---------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Run all steps, write the run folder, and save the trained model in its `model/`."""
        args = self.args
        self.run_folder.start(args.to_dict())
        report = _Report(self)
        started_s = time.perf_counter()
        try:
            for index in range(self._num_rollouts):
                groups = self._sample(index)
                groups, metrics = self._score(groups)
                rows = self._rows(groups)
                report.rollouts(groups, metrics)
                for minibatch in self._minibatches(rows):
                    report.step(self._update(minibatch))
                    if args.eval_steps and self.step % args.eval_steps == 0:
                        report.evaluation(self.evaluate())
            train_seconds = time.perf_counter() - started_s
        finally:
            report.close()
        self.save_model()
        return TrainResult(self.step, train_seconds, report.rollout_tokens_per_s, report.last)

    def _sample(self, index: int) -> list[list[Rollout]]:
        """G completions of each prompt of the rollout, from the current policy."""
        args = self.args
        num_prompts = args.prompts_per_step * args.updates_per_rollout
        visited = visit_order(len(self.prompts), index * num_prompts, num_prompts, args.seed)
        self.engine.params = self.policy
        groups = rollout(
            self.engine,
            self.tokenizer,
            [self.prompts.examples[i] for i in visited],
            [self.prompts.token_ids[i] for i in visited],
            self._sampling_params(args.num_generations, args.temperature, args.seed),
            step=index,
            policy_version=self.step,
        )
        started_s = time.perf_counter()
        groups = sorted(groups, key=lambda group: group[0].prompt_index)
        self.rollout_s = time.perf_counter() - started_s
        return groups

    def _score(self, groups: list[list[Rollout]]) -> tuple[list[list[Rollout]], Metrics]:
        """Rewards of all completions, and their advantages within the group."""
        started_s = time.perf_counter()
        rows = [row for group in groups for row in group]
        rewards = np.stack([score(reward, rows) for reward in self.rewards], axis=1)  # (B, K)
        G = self.args.num_generations
        advantages = group_advantages(rewards, self.reward_weights, G, self.args.scale_rewards)
        reward_s = time.perf_counter() - started_s
        names = [reward.name for reward in self.rewards]
        scored = [
            replace(row, rewards=rewards_by_name(names, row_rewards), advantage=float(advantage))
            for row, row_rewards, advantage in zip(rows, rewards, advantages.values, strict=True)
        ]
        num_sampled = sum(len(row.completion_ids) for row in rows)
        self.num_tokens += num_sampled + sum(len(row.prompt_ids) for row in rows)
        metrics = completion_metrics(scored) | reward_metrics(names, rewards, advantages)
        metrics |= {
            "num_tokens": float(self.num_tokens),
            "time/rollout_s": self.rollout_s,
            "time/reward_s": reward_s,
            "rollout/tokens_per_s": num_sampled / self.rollout_s,
        }
        return [scored[start : start + G] for start in range(0, len(scored), G)], metrics

    def _rows(self, groups: list[list[Rollout]]) -> list[list[Row]]:
        """Training rows by group, with the log-probs of the old policy and of the reference where they are needed."""
        rows = [
            Row(
                group=index,
                prompt=rollout.prompt_ids,
                completion=rollout.completion_ids,
                mask=np.full(len(rollout.completion_ids), self._counts(rollout)),
                advantage=rollout.advantage,
                rollout_logp=rollout.policy_logps,
            )
            for index, group in enumerate(groups)
            for rollout in group
        ]
        if self.args.updates_per_rollout * self.args.num_iterations > 1:
            old = self._logprobs(self.policy, rows)
            rows = [replace(row, old_logp=logp) for row, logp in zip(rows, old, strict=True)]
        if self.reference is not None:
            ref = self._logprobs(self.reference, rows)
            rows = [replace(row, ref_logp=logp) for row, logp in zip(rows, ref, strict=True)]
        G = self.args.num_generations
        return [rows[start : start + G] for start in range(0, len(rows), G)]

    def _minibatches(self, groups: list[list[Row]]) -> Iterator[list[Row]]:
        """The rows of each optimizer step on this rollout."""
        P = self.args.prompts_per_step
        for _ in range(self.args.num_iterations):
            for start in range(0, len(groups), P):
                if self.step < self.num_steps:
                    yield [row for group in groups[start : start + P] for row in group]

    def _update(self, rows: list[Row]) -> Metrics:
        """One optimizer step: the gradient of the objective over the rows, in micro-batches."""
        started_s = time.perf_counter()
        mesh = self.model.mesh
        num_tokens = sum(int(row.mask.sum()) for row in rows)
        num_rows = sum(bool(row.mask.any()) for row in rows)
        counts = Denominators(jnp.float32(max(num_rows, 1)), jnp.float32(max(num_tokens, 1)))
        packed = pack(rows, num_data_shards(mesh), self._micro_batch_tokens)
        totals = zero_totals(self.policy)
        for part in packed:
            totals = micro_step(
                self.policy,
                totals,
                to_rows(part.batch, mesh),
                counts,
                config=self.model.config,
                settings=self.settings,
                mesh=mesh,
                checkpointing=self.args.gradient_checkpointing,
            )
            if self._on_cpu:  # the virtual devices' collectives can starve each other when several steps are queued
                jax.block_until_ready(totals)
        self.state, grad_norm, updated = apply_update(self.state, totals.grads, totals.loss, optimizer=self.optimizer)
        self.policy = self._policy()
        loss, sums, logp_diff_max, grad_norm, updated = jax.device_get(
            (totals.loss, totals.sums, totals.logp_diff_max, grad_norm, updated)
        )
        learning_rate = np.asarray(self.schedule(self.step)).item()
        self.step += 1
        train_s = time.perf_counter() - started_s
        real = sum(part.num_tokens for part in packed)
        means = {name: float(total) / max(num_tokens, 1) for name, total in sums.items()}
        if self.reference is None:
            del means["kl"]
        return {
            "loss": float(loss),
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate,
            "epoch": self.step * self.args.prompts_per_step / self.args.num_iterations / len(self.prompts),
            **means,
            f"{LOGP_DIFF.removesuffix('mean')}max": float(logp_diff_max),
            "update_skipped": float(not updated),
            "padding_frac": 1.0 - real / sum(part.num_cells for part in packed),
            "micro_batches": float(len(packed)),
            "time/train_s": train_s,
            "train/tokens_per_s": real / train_s,
        }

    # -- beside the loop -----------------------------------------------------------------------------------------

    def evaluate(self, params: SamplingParams | None = None) -> Evaluation:
        """Score the current policy on `eval_dataset`.

        Args:
            params: how to sample; by default one completion at `eval_temperature`.
        """
        if self.eval_prompts is None:
            raise ValueError("there is no eval_dataset to evaluate on; give one to GRPOTrainer")
        self.engine.params = self.policy
        params = params or self._sampling_params(1, self.args.eval_temperature, self.args.seed)
        return evaluate(self.engine, self.tokenizer, self.rewards, self.reward_weights, self.eval_prompts, params)

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Write the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype."""
        stored = self.model.hf_config.get("dtype") or self.model.hf_config.get("torch_dtype") or "float32"
        trained = replace(self.model, params=self.state.params)
        return save_model(trained, folder or self.run_folder.path / "model", self.tokenizer, jnp.dtype(stored))

    @cached_property
    def dtype(self) -> Any:
        """Of the forward pass."""
        chosen = self.args.dtype
        return jnp.dtype(("float32" if self._on_cpu else "bfloat16") if chosen == "auto" else chosen)

    @property
    def _on_cpu(self) -> bool:
        return self.model.mesh.devices.flat[0].platform == "cpu"

    @property
    def _num_rollouts(self) -> int:
        return -(-self.num_steps // (self.args.updates_per_rollout * self.args.num_iterations))

    @property
    def _micro_batch_tokens(self) -> int:
        if self.args.micro_batch_tokens is not None:
            return self.args.micro_batch_tokens
        # activations beyond this fall out of a CPU's cache; accelerators want larger matrices
        return 4096 if self._on_cpu else 16384

    def _policy(self) -> Params:
        """What engine and gradients read: the master weights themselves where they have the compute dtype."""
        if self.dtype == jnp.float32:
            return self.state.params
        return compute_view(self.state.params, dtype=self.dtype)

    def _tokenizer(self, processing_class: Any) -> Any:
        if processing_class is not None:
            return prepare_tokenizer(processing_class, self.args.chat_template)
        if self.model.source is None:
            raise ValueError("a model that was made in memory has no tokenizer; give one as processing_class")
        return load_tokenizer(self.model.source, self.args.chat_template)

    def _encode(self, examples: Examples) -> PromptSet:
        context = self.model.config.max_positions - self.args.max_completion_length
        limit = min(context, self.args.max_prompt_length or context)
        if limit < 1:
            raise ValueError(
                f"max_completion_length {self.args.max_completion_length} leaves no room for a prompt in the model's "
                f"{self.model.config.max_positions} positions; lower it"
            )
        return encode_examples(examples, self.tokenizer, limit, self.args.prompt_overflow)

    def _sampling_params(self, n: int, temperature: float, seed: int) -> SamplingParams:
        args = self.args
        return SamplingParams(
            n=n,
            max_tokens=args.max_completion_length,
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=seed,
        )

    def _counts(self, row: Rollout) -> bool:
        return not (self.args.mask_truncated_completions and row.finish_reason == "length")

    def _logprobs(self, params: Params, rows: list[Row]) -> list[np.ndarray]:
        """Log-probs of each row's completion tokens under some weights."""
        logps: list[np.ndarray] = [np.zeros(0)] * len(rows)
        mesh = self.model.mesh
        for part in pack(rows, num_data_shards(mesh), self._micro_batch_tokens):
            batch = to_rows(part.batch, mesh)
            scored = score_batch(params, batch, config=self.model.config, settings=self.settings, mesh=mesh)
            for index, logp in zip(part.rows, np.asarray(scored), strict=True):
                if index >= 0:
                    logps[index] = logp[: len(rows[index].completion)]
        return logps


class _Report:
    """Everything that a run tells: progress, metrics and rollouts on disk, findings."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.folder = trainer.run_folder
        self.progress = PROGRESS_BARS[trainer.args.progress_bar](trainer.num_steps)
        self.history: list[Metrics] = []
        self.window: list[Metrics] = []
        self.told: set[str] = set()
        self.last: Metrics = {}
        self.num_sampled = self.rollout_s = 0.0
        if self.folder.moved_aside:
            self.progress.message(f"the earlier run in {self.folder.path} is now in {self.folder.moved_aside}")
        for prompts, name in ((trainer.prompts, "train_dataset"), (trainer.eval_prompts, "eval_dataset")):
            if prompts is not None and prompts.num_dropped + prompts.num_truncated:
                did = f"{prompts.num_dropped} dropped, {prompts.num_truncated} truncated"
                self.progress.message(f"{name} has prompts longer than max_prompt_length: {did}", warning=True)
        self._tell(setup_findings(trainer.args.learning_rate, trainer.eos_ids))
        self.step_started_s = time.perf_counter()

    @property
    def rollout_tokens_per_s(self) -> float:
        return self.num_sampled / self.rollout_s if self.rollout_s else 0.0

    def rollouts(self, groups: list[list[Rollout]], metrics: Metrics) -> None:
        self.groups, self.rollout_metrics = groups, metrics
        self.num_sampled += sum(len(row.completion_ids) for group in groups for row in group)
        self.rollout_s += metrics["time/rollout_s"]
        if self.trainer.args.log_completions:
            self.progress.sample(max(groups, key=lambda group: max(row.advantage for row in group)))

    def step(self, metrics: Metrics) -> None:
        step, now_s = self.trainer.step, time.perf_counter()
        metrics = {"step": float(step), **metrics, **self.rollout_metrics, "step_time": now_s - self.step_started_s}
        self.step_started_s = now_s
        self.history = [*self.history[-20:], metrics]
        self.window.append(metrics)
        self.progress.step(step, metrics)
        self._tell(step_findings(self.history))
        if step % self.trainer.args.logging_steps == 0 or step == self.trainer.num_steps:
            self.last = window_mean(self.window)
            self.window = []
            self.folder.write_metrics(self.last)
            if self.trainer.args.log_completions:
                self.folder.write_rollouts(step, [row for group in self.groups for row in group])

    def evaluation(self, evaluation: Evaluation) -> None:
        metrics = {f"eval_{name}": value for name, value in evaluation.metrics.items()}
        self.folder.write_metrics({"step": float(self.trainer.step), **metrics})
        self.progress.message(f"step {self.trainer.step}: eval reward {evaluation.metrics['reward']:.3f}")

    def close(self) -> None:
        self.progress.close()

    def _tell(self, findings: dict[str, str]) -> None:
        for name, text in findings.items():
            if name not in self.told:
                self.told.add(name)
                self.progress.message(text, warning=True)


def _weights(args: GRPOConfig, num_rewards: int) -> np.ndarray:
    weights = np.ones(num_rewards) if args.reward_weights is None else np.asarray(args.reward_weights, float)
    if weights.shape != (num_rewards,):
        raise ValueError(f"reward_weights has {weights.size} entries for {num_rewards} reward functions")
    return weights


def _objective_settings(args: GRPOConfig) -> ObjectiveSettings:
    return ObjectiveSettings(
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        delta=args.delta,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        use_bias_correction_kl=args.use_bias_correction_kl,
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
    )
