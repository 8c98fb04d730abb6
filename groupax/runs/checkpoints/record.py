"""Converts the state of a run into a checkpoint's files, and back.

state.json            cursor, adaptive coefficients, log, identity, versions
params/ optimizer/    master weights (or adapters) and the optimizer's state
untrained/            weights that the run does not train: those that see images, if they are frozen
reference/            only if the reference model moves
rollout.parquet       only while updates on a rollout are left: its completions and their log-probs
policies/             only with max_staleness: earlier policies, which sample the next rollouts
"""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

from groupax.core.types import PromptImages, Rollout, Row
from groupax.data.examples import values_as_json
from groupax.episodes.as_json import branches_as_json, messages_as_json, turns_as_json
from groupax.models.weights.checkpoint import Model
from groupax.objective.entropy import EntropyState
from groupax.parallel.collectives import to_host_on_primary
from groupax.parallel.processes import num_processes
from groupax.rollouts.collector import Collector
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.choose import FORMAT, Saved
from groupax.runs.checkpoints.fingerprint import Identity, devices_of, versions
from groupax.runs.rollout_log import BY_NAME, rollout_of, simple_column
from groupax.training.learner import Learner
from groupax.training.shapes import Shape
from groupax.training.state import TrainState

PARAMS, OPTIMIZER, REFERENCE, ROLLOUT = "params", "optimizer", "reference", "rollout.parquet"
POLICIES = "policies"
UNTRAINED = "untrained"
SCORED = ("old_logp", "ref_logp")  # of the rows of minibatches; the rest of a row follows from its rollout
ROW_VALUES = "row_values"  # of the dataset's row, which an environment or a program has given it
BRANCH_SCORES = "branch_scores"  # those of the rows of further streams of an episode
AS_STORED = {
    "turns": turns_as_json,
    "messages": messages_as_json,
    "branches": branches_as_json,
    "experts": lambda experts: None if experts is None else experts.reshape(-1),
}


def state_of(
    cursor: Cursor,
    learner: Learner,
    experience: Experience | None,
    policies: Mapping[int, Policy],
    identity: Identity,
    model: Model,
) -> dict[str, Any]:
    """Returns the content of `state.json` without the log."""
    return {
        "format": FORMAT,
        "step": cursor.step,
        "cursor": asdict(cursor),
        "learner": _progress_of(learner),
        "rollout": None
        if experience is None
        else {
            "metrics": experience.metrics,
            "errors": dict(experience.errors),
            "first_prompt": experience.first_prompt,
            "num_tokens": experience.num_tokens,
            "num_used": experience.num_used,
        },
        "policies": [{"rollout": number, "version": policy.version} for number, policy in policies.items()],
        "identity": identity,
        "model": {
            "config": dict(model.hf_config),
            "generation_config": dict(model.generation_config),
            "dtype": stored_dtype(model),
        },
        "versions": versions(),
        "devices": devices_of(learner.mesh),
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _progress_of(learner: Learner) -> dict[str, Any]:
    """Returns what a learner has adapted, apart from its arrays."""
    return {
        "num_updates": learner.num_updates,
        "entropy": asdict(learner.entropy),
        "shapes": [{**asdict(shape), "since": since} for shape, since in learner.shapes.items()],
        "shapes_of": _shape_limits(learner),
        "checkpointing": learner.execution.checkpointing,
        "scan_layers": learner.execution.scan_layers,
    }


def stored_dtype(model: Model) -> str:
    """Returns the dtype of the weights in a model's files."""
    return model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "float32"


def start_writing(
    learner: Learner, policies: Mapping[int, Policy], with_optimizer: bool
) -> Callable[[Path], Callable[[], None]]:
    """Returns a function that writes the run's arrays into a folder in the background (see `arrays.start_writing`).

    Those that are not trained are among them, for the export of a whole model.
    All processes must call this; the primary one can write.
    """
    trees = trees_of(learner, with_optimizer, policies)
    if learner.untrained:
        trees[UNTRAINED] = learner.untrained
    if num_processes() > 1:
        trees = to_host_on_primary(trees)
    return partial(arrays.start_writing, trees=trees)


def restore_learner(learner: Learner, folder: Path, state: Mapping[str, Any]) -> None:
    """Restores the saved state of a new learner on its own mesh, after freeing its arrays.

    Raises a ValueError if the folder has other arrays.
    """
    _restore_progress(learner, state)
    like = {name: arrays.abstract(tree) for name, tree in trees_of(learner, with_optimizer=True).items()}
    for leaf in jax.tree.leaves(trees_of(learner, with_optimizer=True)):
        leaf.delete()
    params = arrays.read(folder / PARAMS, like[PARAMS])
    if has_optimizer(folder):
        optimizer = arrays.read(folder / OPTIMIZER, like[OPTIMIZER])
    else:
        optimizer = _scheduled(jax.jit(learner.optimizer.init)(params), learner.num_updates)
    reference = arrays.read(folder / REFERENCE, like[REFERENCE]) if REFERENCE in like else None
    learner.restore(TrainState(params, optimizer), reference)


def _restore_progress(learner: Learner, state: Mapping[str, Any]) -> None:
    learner.num_updates = state["num_updates"]
    learner.entropy = EntropyState(**state["entropy"])
    if state["shapes_of"] == _shape_limits(learner):
        learner.shapes = {_shape(record): record.get("since", 0) for record in state["shapes"]}
        # other choices, of a device with more or less free memory, would round differently
        settings, chosen = learner.settings, {}
        if settings.gradient_checkpointing == "auto":
            chosen["checkpointing"] = state.get("checkpointing", learner.execution.checkpointing)
        if settings.scan_layers is None:
            chosen["scan_layers"] = state.get("scan_layers", learner.execution.scan_layers)
        learner.execution = replace(learner.execution, **chosen)


def restore_params(learner: Learner, folder: Path) -> None:
    """Replaces a learner's weights by those of a checkpoint; the rest of its state stays as it is."""
    params = arrays.read(folder / PARAMS, arrays.abstract(learner.state.params))
    learner.restore(TrainState(params, learner.state.opt_state), None)


def read_policies(folder: Path, state: Sequence[Mapping[str, int]], learner: Learner) -> dict[int, Policy]:
    """Returns the policies that sample the next rollouts by the rollout's number, given their entry of `state.json`."""
    if not state:
        return {}
    like = arrays.abstract(learner.snapshot())
    trained = arrays.read(folder / POLICIES, {str(each["version"]): like for each in state})
    return {each["rollout"]: Policy(each["version"], trained[str(each["version"])]) for each in state}


def has_optimizer(folder: Path) -> bool:
    """Returns whether a checkpoint has the optimizer's state."""
    return (folder / OPTIMIZER).is_dir()


def write_rollout(experience: Experience, folder: Path) -> None:
    """Writes the completions of a rollout with rewards and advantages, and the log-probs of its rows."""
    import pyarrow
    import pyarrow.parquet

    rollouts = [row for group in experience.groups for row in group]
    trained = _by_episode(row for minibatch in experience.minibatches for row in minibatch)
    missing = [None] * (len(rollouts) - len(trained))
    columns: dict[str, list[Any]] = {"group": [i for i, group in enumerate(experience.groups) for _ in group]}
    for field in fields(Rollout):
        if field.name not in ("example", "images", *BY_NAME):
            values = (getattr(row, field.name) for row in rollouts)
            columns[field.name] = [*map(AS_STORED[field.name], values)] if field.name in AS_STORED else [*values]
    for name in BY_NAME:
        keys = dict.fromkeys(key for row in rollouts for key in getattr(row, name))
        columns |= {f"{name}/{key}": [getattr(row, name).get(key) for row in rollouts] for key in keys}
    columns[ROW_VALUES] = [values_as_json(row.example) for row in rollouts]
    for name in SCORED:
        columns[name] = [*(getattr(rows[0], name) for rows in trained), *missing]
    columns[BRANCH_SCORES] = [*map(_branch_scores, trained), *missing]
    # Parquet may have no type for texts and for what reward functions log
    kinds = {name: simple_column if name == "text" or name.startswith("extra/") else pyarrow.array for name in columns}
    table = pyarrow.table({name: kinds[name](values) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, folder / ROLLOUT)


def restored_rollout(saved: Saved, collector: Collector, cursor: Cursor) -> Experience | None:
    """Returns the rollout on which updates were left when a checkpoint was saved, if any, ready for them."""
    state, prompts = saved.state["rollout"], collector.prompts
    if state is None:
        return None
    visited = collector.visited(state["first_prompt"], cursor.num_prompts - state["first_prompt"])

    def prompt_of(index: int) -> tuple[Any, PromptImages | None]:
        return prompts.examples[visited[index]], prompts.images_of([visited[index]])[0]

    experience, scores = read_rollout(saved.folder, state, prompt_of)
    each = iter(scores)  # further groups may have some too
    minibatches = collector.cut(experience.groups[: collector.schedule.prompts_per_rollout])
    minibatches = [[replace(row, **next(each)) for row in minibatch] for minibatch in minibatches]
    return replace(experience, minibatches=minibatches)


def read_rollout(
    folder: Path, state: Mapping[str, Any], prompt_of: Callable[[int], tuple[Any, PromptImages | None]]
) -> tuple[Experience, list[dict[str, np.ndarray | None]]]:
    """Returns a rollout that `write_rollout` has written, without its minibatches, and the log-probs of each row.

    Args:
        folder: Folder of the checkpoint.
        state: The rollout's entry of `state.json`.
        prompt_of: Returns the dataset row of a prompt, and its images, by its index in the rollout.
    """
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder / ROLLOUT).to_pylist()
    groups: list[list[Rollout]] = [[] for _ in range(1 + max(row["group"] for row in rows))]
    scored = []
    for row in rows:
        groups[row["group"]].append(rollout_of(row, *prompt_of(row["prompt_index"])))
        scored += map(_scores, [row, *json.loads(row.get(BRANCH_SCORES) or "[]")])
    return Experience(groups=groups, **state), scored


def _by_episode(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns rows as lists, each of a completion and the further streams of its episode."""
    episodes: list[list[Row]] = []
    for row in rows:
        if row.is_branch:
            episodes[-1].append(row)
        else:
            episodes.append([row])
    return episodes


def _branch_scores(rows: Sequence[Row]) -> str | None:
    """Returns the log-probs of all rows of an episode but the first, as JSON; None if there are none."""
    scores = [
        {name: None if (value := getattr(row, name)) is None else value.tolist() for name in SCORED} for row in rows[1:]
    ]
    return json.dumps(scores) if scores else None


def _scores(row: Mapping[str, Any]) -> dict[str, np.ndarray | None]:
    """Returns the log-probs of a row."""
    return {name: None if row[name] is None else np.asarray(row[name], np.float32) for name in SCORED}


def trees_of(
    learner: Learner, with_optimizer: bool, policies: Mapping[int, Policy] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the arrays that a learner changes, and those of earlier policies, by the names of their folders."""
    trees: dict[str, Any] = {PARAMS: learner.state.params}
    if with_optimizer:
        trees[OPTIMIZER] = learner.state.opt_state
    if learner.settings.sync_ref_model:
        trees[REFERENCE] = learner.reference
    if policies:
        trees[POLICIES] = {str(policy.version): policy.trained for policy in policies.values()}
    return trees


def _scheduled(opt_state: Any, num_updates: int) -> Any:
    """Returns a fresh optimizer state with the learning rate of the next update."""

    def counted(state: Any) -> Any:
        if not isinstance(state, optax.ScaleByScheduleState):
            return state
        return state._replace(count=jax.numpy.full_like(state.count, num_updates))

    return jax.tree.map(counted, opt_state, is_leaf=lambda state: isinstance(state, optax.ScaleByScheduleState))


def _shape_limits(learner: Learner) -> list[Any]:
    """Returns what limits the shapes: saved shapes of other limits may not fit into memory."""
    return [learner.settings.micro_batch_tokens, learner.mesh.devices.flat[0].device_kind]


def _shape(record: Mapping[str, Any]) -> Shape:
    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return Shape(**{name: tuples(value) for name, value in record.items() if name != "since"})
