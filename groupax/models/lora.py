"""LoRA (arXiv:2106.09685): the settings of adapters, their tables of weights and their initialization.

The settings have PEFT's names and meaning. An adapter's weights are listed in one table, like a model's
(`models.specs`), from which initialization, loading, saving and counts follow.
"""

import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import regex
from jax import lax
from jaxtyping import Array, Float, Key
from safetensors.numpy import save_file

from groupax.core.settings.fields import as_given, check_range, check_type, nearest, patterned, ranged
from groupax.core.settings.optimizer import LoRABias
from groupax.core.storage.folders import ADAPTER_NAME, at_revision, split_revision
from groupax.core.terminal.printable import short_repr
from groupax.models.adapted import AdaptedWeight, LowRank, Params, apply_adapter, dense, norms_of, side_by_side
from groupax.models.config import ModelConfig
from groupax.models.specs import Spec, model_specs, num_params
from groupax.models.weights.tensor_files import INDEX_NAME, SINGLE_NAME, TensorFile, check_finite
from groupax.parallel.collectives import to_device

PATTERN_TIMEOUT_S = 2.0
ALL_LINEAR = "all-linear"
# The modules that PEFT adapts in these families by default.
PEFT_DEFAULT = ("q_proj", "v_proj")
# The prefix of weight names in PEFT's files.
PREFIX = "base_model.model."
# Fields of a `peft.LoraConfig` that have no effect here.
_INERT = (
    "auto_mapping base_model_name_or_path eva_config fan_in_fan_out inference_mode loftq_config megatron_core "
    "peft_type peft_version qalora_group_size revision runtime_config task_type"
)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Settings of a LoRA adapter, with PEFT's names.

    Attributes:
        r: Rank of the changes.
        lora_alpha: Numerator of the scale; changes are scaled by lora_alpha / r.
        lora_dropout: Fraction of a change's inputs that is dropped in training.
        target_modules: Modules to adapt: endings of their names ("q_proj", "self_attn.q_proj"), one regular expression
            for full names, or "all-linear" for all matrices of the language model's layers. The other two, as in PEFT,
            may also match matrices of the part that sees images.
        bias: Biases to train: "none", "all", or "lora_only" for those of the adapted modules.
        use_rslora: Whether to scale by lora_alpha / sqrt(r) instead (arXiv:2312.03732).
        modules_to_save: Names of modules whose weights are trained fully, with those of all modules inside of them.
        use_dora: Whether to train the norms of the changed matrices' rows too (DoRA, arXiv:2402.09353).
        rank_pattern: Ranks of some of the modules, by regular expressions for endings of their names, of which the
            first that matches counts.
        alpha_pattern: Their values in place of lora_alpha, likewise.
        layers_to_transform: Indices of the layers to adapt; empty for all. Full names in `target_modules` are adapted
            in any case.
        layers_pattern: Names, as regular expressions, of the lists of layers that have these indices; empty for any.
        init_lora_weights: True for changes of zero; "pissa" for the principal singular vectors of each matrix, which
            the base then lacks (PiSSA, arXiv:2404.02948); "pissa_niter_N" computes them approximately, in N iterations.

    Raises:
        ValueError: A value is out of range, or two contradict each other.
    """

    r: int = ranged(8, 2**31 - 1, low=1)
    lora_alpha: float | int = ranged(8, 1e6, low=1e-6)
    lora_dropout: float | int = ranged(0.0, 1, is_open=True)
    target_modules: str | Collection[str] = ALL_LINEAR
    bias: LoRABias = "none"
    use_rslora: bool = False
    modules_to_save: Collection[str] = ()
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = patterned(2**31 - 1, low=1)
    alpha_pattern: Mapping[str, float | int] = patterned(1e6, low=1e-6)
    layers_to_transform: Collection[int] = ranged((), 2**31 - 1)
    layers_pattern: Collection[str] = ()
    init_lora_weights: bool | str = True

    def __post_init__(self) -> None:
        for name, value in _checked(vars(self)).items():
            object.__setattr__(self, name, value)
        if self.layers_pattern and not self.layers_to_transform:
            raise ValueError(f"layers_pattern {self.layers_pattern} without layers_to_transform; list the layers there")
        if self.layers_to_transform and isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise ValueError(
                f"layers_to_transform {self.layers_to_transform} and target_modules {self.target_modules!r}, a regular "
                "expression, both choose layers; name the layers in the expression, or list the modules"
            )

    @property
    def is_pissa(self) -> bool:
        """True if the base lacks the changes that the adapter begins with."""
        return isinstance(self.init_lora_weights, str)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Returns the rank of a module's change, and the factor that scales it."""
        r = _by_pattern(self.rank_pattern, module, self.r, "rank_pattern")
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha, "alpha_pattern")
        return r, alpha / (math.sqrt(r) if self.use_rslora else r)


def as_lora_config(settings: Any, has_weights: bool = False) -> LoRAConfig:
    """Converts a `LoRAConfig`, a `peft.LoraConfig` or the contents of an `adapter_config.json` to a `LoRAConfig`.

    Args:
        has_weights: Whether the adapter has weights already, so that its initialization does not matter.

    Raises:
        ValueError: It is not a LoRA adapter, or a setting is not supported. Nothing is ignored silently.
    """
    if isinstance(settings, LoRAConfig):
        return settings
    if not isinstance(settings, Mapping):
        if not hasattr(settings, "peft_type"):
            raise ValueError(f"peft_config must be a LoRAConfig or a peft.LoraConfig, got {type(settings).__name__}")
        settings = vars(settings)
    kind = settings.get("peft_type", "LORA")
    if str(getattr(kind, "value", kind)) != "LORA":
        raise ValueError(
            f"the adapter's peft_type is {short_repr(getattr(kind, 'value', kind))}; groupax supports only LORA, "
            "no prompt-learning and no other method"
        )
    own = {field.name for field in fields(LoRAConfig)}
    if settings.get("inference_mode") and not has_weights:
        raise ValueError("inference_mode=True freezes a new adapter, and nothing would be trained; leave it at False")
    others = {key: value for key, value in settings.items() if key not in {*own, *_INERT.split()}}
    unsupported = sorted(key for key, value in others.items() if _is_set(value) and not key.startswith("_"))
    if unsupported:
        raise ValueError(
            "groupax does not support the LoRA settings "
            + ", ".join(f"{key}={short_repr(others[key])}" for key in unsupported[:4])
        )
    given = {key: settings[key] for key in own if settings.get(key) is not None}
    init = given.get("init_lora_weights", True)
    if has_weights and init in (False, "gaussian", "orthogonal", "eva"):
        given["init_lora_weights"] = True  # where its weights began
    elif has_weights and init not in (True, "pissa"):
        raise ValueError(
            f"init_lora_weights is {short_repr(init)}: PEFT changed the base when it made this adapter, at random or "
            "by data that the folder does not have; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    if {"score", "classifier"} <= set(given.get("modules_to_save", ())):  # PEFT adds both names that a head may have
        given["modules_to_save"] = set(given["modules_to_save"]) - {"classifier"}
    return LoRAConfig(**_checked({"target_modules": PEFT_DEFAULT, **given}))


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of an adapter with tuples of names, or raises a ValueError for one that is not of its kind."""
    checked = {}
    for field in (each for each in fields(LoRAConfig) if each.name in settings):
        value = as_given(settings[field.name], field.type)
        if isinstance(value, (list, set, frozenset)):
            value = tuple(value) if isinstance(value, list) else tuple(sorted(value))
        if field.name.startswith("layers_") and isinstance(value, (int, str)):  # as in PEFT
            value = (value,) if value != "" else ()
        check_type(field.name, value, field.type)
        check_range(field, value)
        checked[field.name] = ALL_LINEAR if value == (ALL_LINEAR,) else value
    if not checked["target_modules"]:
        raise ValueError(f"target_modules is empty; name modules like 'q_proj', or set {ALL_LINEAR!r}")
    init = checked.get("init_lora_weights", True)
    if init is not True and not (isinstance(init, str) and regex.fullmatch(r"pissa(_niter_\d{1,3})?", init)):
        raise ValueError(
            f"init_lora_weights is {short_repr(init)}; groupax supports True, 'pissa' and 'pissa_niter_N' with an N of "
            "at most 999: leave it at True for changes of zero"
        )
    return checked


def _is_set(value: Any) -> bool:
    """Returns whether a setting is anything but PEFT's ways of leaving it unset; 0 is an index, e.g. of a layer."""
    is_empty = isinstance(value, (str, Collection)) and not len(value)
    return not (value is None or value is False or is_empty)


def adapter_specs(config: ModelConfig, lora: LoRAConfig) -> Params:
    """Returns the table of an adapter's trained weights, a subtree of the model's table.

    Each adapted matrix has a `LowRank` of `Spec`s. Names are those of PEFT's files.

    Raises:
        ValueError: A name matches no module, or a module that cannot be adapted.
    """
    specs = model_specs(config)
    weights = [spec for spec in jax.tree.leaves(specs) if spec.name.endswith(".weight")]
    modules = {module_name(spec): spec for spec in weights}
    targets = _match_modules(lora.target_modules, modules, "target_modules")
    saved = _match_modules(lora.modules_to_save, modules, "modules_to_save")
    if lora.target_modules == ALL_LINEAR:
        targets = {name for name, spec in modules.items() if spec.is_layer_matrix}
    targets = _in_layers(lora, targets) - saved
    _check_modules(config, lora, weights, targets, saved)
    _check_patterns(lora, targets)
    trained = _trained_specs(specs, lora, targets, saved)
    if not jax.tree.leaves(trained.get("vision")):
        trained.pop("vision", None)
    return trained


def _check_modules(
    config: ModelConfig, lora: LoRAConfig, weights: Sequence[Spec], targets: set[str], saved: set[str]
) -> None:
    modules = {module_name(spec): spec for spec in weights}
    shared = {name for name, count in Counter(map(module_name, weights)).items() if count > 1}
    shared |= {name for name, spec in modules.items() if spec.is_stacked}
    for name in (targets | saved) & shared:
        others = _endings(name for name, spec in modules.items() if spec.is_layer_matrix and name not in shared)
        raise ValueError(
            f"groupax stores {name} fused or stacked with other matrices and can neither adapt it nor train it alone; "
            f"target_modules may name {others}"
        )
    for name in targets:
        if not (modules[name].is_layer_matrix or modules[name].is_vision_matrix):
            raise ValueError(
                f"target_modules names {name}, which is not a matrix of a layer; train it fully with modules_to_save"
            )
    other_head = {config.module("head", "lm_head")} - {"lm_head"}
    if unlike := {name for name in saved if modules[name].is_transposed or name in other_head}:
        raise ValueError(
            f"modules_to_save names {', '.join(sorted(unlike))}, which PEFT has under another name or transposed; "
            "groupax can only adapt it, by target_modules"
        )
    for spec in jax.tree.leaves(model_specs(config)):
        is_other = not spec.name.endswith((".weight", ".bias"))
        if is_other and any(_is_inside(each, module_name(spec)) for each in lora.modules_to_save):
            raise ValueError(
                f"modules_to_save {lora.modules_to_save} includes {spec.name}, which is no weight of a matrix or norm "
                "and cannot be trained alone; name the modules with such weights instead"
            )
    if config.tie_embeddings and saved & {module_name(model_specs(config)["embed"]), "lm_head"}:
        raise ValueError(
            "modules_to_save names the embedding, which this model also uses as its head; PEFT would train a copy of "
            "one of the two, so that they would differ afterwards; remove it from modules_to_save"
        )


def _trained_specs(specs: Any, lora: LoRAConfig, targets: set[str], saved: set[str]) -> Any:
    if isinstance(specs, list):
        return [_trained_specs(each, lora, targets, saved) for each in specs]
    trained: Params = {}
    for name, spec in specs.items():
        if not isinstance(spec, Spec):
            trained[name] = _trained_specs(spec, lora, targets, saved)
            continue
        module = module_name(spec)
        if spec.name.endswith(".bias"):
            if lora.bias == "all" or (lora.bias == "lora_only" and module in targets) or module in saved:
                infix = ".base_layer" if module in targets else ""
                trained[name] = Spec(spec.shape, spec.axes, f"{PREFIX}{module}{infix}.bias")
        elif spec.name.endswith(".dt_bias"):  # a bias to PEFT by its name
            if lora.bias == "all":
                trained[name] = Spec(spec.shape, spec.axes, PREFIX + spec.name, is_float32=True)
        elif module in saved:
            trained[name] = Spec(spec.shape, spec.axes, PREFIX + spec.name)
        elif module in targets:
            (rows, columns), (out_dim, in_dim) = spec.shape, spec.axes
            rank, scale = lora.rank_and_scale(module)
            if lora.is_pissa and rank > min(spec.shape):
                raise ValueError(f"{module} {spec.shape} has no {rank} singular values for PiSSA; set a smaller rank")
            a = Spec((rank, columns), (None, in_dim), f"{PREFIX}{module}.lora_A.weight")
            b = Spec((rows, rank), (out_dim, None), f"{PREFIX}{module}.lora_B.weight", init="zeros")
            magnitude = Spec((rows,), (out_dim,), f"{PREFIX}{module}.lora_magnitude_vector", is_float32=True)
            trained[name] = LowRank(a, b, scale, magnitude if lora.use_dora else None)
    return trained


def module_name(spec: Spec) -> str:
    """Returns the name of the module that a weight belongs to in `transformers`."""
    return spec.name.rpartition(".")[0]


def _match_modules(names: str | Iterable[str], modules: Mapping[str, Spec], setting: str) -> set[str]:
    """Finds modules by PEFT's rules: a regular expression, or endings of names.

    Those of modules_to_save may be endings of words, and of a module that contains the modules.
    """
    if names == ALL_LINEAR:
        return set()
    if isinstance(names, str):
        found = {name for name in modules if _full_match(names, name, setting)}
        if not found:
            raise ValueError(f"{setting} {names!r} matches no module of the model; the modules are {_endings(modules)}")
        return found
    found = set()
    for each in names:
        is_own = _is_inside if setting == "modules_to_save" else _is_ending
        own = {name for name in modules if is_own(each, name)}
        if not own:
            endings = sorted({name.rpartition(".")[2] for name in modules})
            raise ValueError(
                f"{setting} names {each!r}, which is not a module of the model; the modules are "
                f"{_endings(modules)}{nearest(each, endings)}"
            )
        found |= own
    return found


def _is_ending(each: str, name: str) -> bool:
    return name == each or name.endswith(f".{each}")


def _is_inside(each: str, name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]).endswith(each) for end in range(1, len(parts) + 1))


def _in_layers(lora: LoRAConfig, targets: set[str]) -> set[str]:
    """Returns the modules that are in one of the chosen layers, or named in full."""
    if not lora.layers_to_transform:
        return targets
    found: dict[int, set[str]] = {index: set() for index in lora.layers_to_transform}
    for name in targets:
        patterns = (rf"(?:.*?\.)?(?:{each})\.(?P<index>\d+)\..*" for each in lora.layers_pattern or ("[^.]*",))
        matches = (_full_match(each, name, "layers_pattern") for each in patterns)
        match = next((each for each in matches if each), None)
        if match and int(match["index"]) in found:
            found[int(match["index"])].add(name)
    if empty := [index for index, names in found.items() if not names]:
        raise ValueError(
            f"layers_to_transform names {empty[:4]}, and there are no modules to adapt in layers of these indices "
            f"(layers_pattern {lora.layers_pattern}); indices start at 0"
        )
    return set().union(*found.values()) | targets & set(lora.target_modules)


def _check_patterns(lora: LoRAConfig, targets: set[str]) -> None:
    for setting in ("rank_pattern", "alpha_pattern"):
        for key in getattr(lora, setting):
            if not any(_matches_end(key, name, setting) for name in targets):
                raise ValueError(
                    f"{setting} has {short_repr(key)}, which matches no adapted module; those are {_endings(targets)}"
                )


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any, setting: str) -> Any:
    return next((value for key, value in pattern.items() if _matches_end(key, module, setting)), default)


def _matches_end(pattern: str, name: str, setting: str) -> bool:
    return _full_match(rf"(.*\.)?({pattern})", name, setting) is not None


def _full_match(pattern: str, name: str, setting: str) -> Any:
    """Matches a name against a regular expression. It may be untrusted, and some take forever."""
    try:
        return regex.fullmatch(pattern, name, timeout=PATTERN_TIMEOUT_S)
    except (regex.error, TimeoutError, RecursionError) as error:
        reason = str(error) or f"matching takes longer than {PATTERN_TIMEOUT_S} s"
        raise ValueError(f"{setting} {short_repr(pattern)} cannot be used as a regular expression: {reason}") from error


def _endings(modules: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory.

    Attributes:
        config: Settings of the adapter.
        frozen: Base weights.
        trained: Trained weights, float32, in the structure of `adapter_specs`.
        base_name: Folder or hub id of the base; None if the base was created in memory.
        removed: Changes that the base lacks, negated (PiSSA), in the structure of `trained`; None if there are none.
    """

    config: LoRAConfig
    frozen: Params
    trained: Params
    base_name: str | None = None
    removed: Params | None = None


def residual(adapter: Adapter) -> Params:
    """Returns the weights that an adapter changes: the base, less what PiSSA removes from it."""
    return adapter.frozen if adapter.removed is None else apply_adapter(adapter.frozen, adapter.removed)


def removed_changes(lora: LoRAConfig, initial: Params) -> Params | None:
    """Returns the changes that the base lacks, negated, given the weights that an adapter begins with."""
    negated = lambda x: LowRank(x.a, -x.b, x.scale) if _is_low_rank(x) else None  # noqa: E731
    return jax.tree.map(negated, initial, is_leaf=_is_low_rank) if lora.is_pissa else None


def as_plain(adapter: Adapter) -> Adapter:
    """Returns an adapter of PiSSA as one of the whole base, of twice the rank: its changes less those it began with.

    It has the settings that PEFT gives such an adapter. Other adapters stay as they are.
    """
    if adapter.removed is None:
        return adapter
    lora, factor = adapter.config, math.sqrt(2) if adapter.config.use_rslora else 2
    plain = replace(
        lora,
        r=2 * lora.r,
        lora_alpha=factor * lora.lora_alpha,
        rank_pattern={key: 2 * rank for key, rank in lora.rank_pattern.items()},
        alpha_pattern={key: factor * alpha for key, alpha in lora.alpha_pattern.items()},
        init_lora_weights=True,
    )
    join = lambda own, removed: side_by_side([own, removed], own.scale) if _is_low_rank(own) else own  # noqa: E731
    trained = jax.tree.map(join, adapter.trained, adapter.removed, is_leaf=_is_low_rank)
    return replace(adapter, config=plain, trained=trained, removed=None)


def trained_params(specs: Any, params: Any) -> Any:
    """Selects an adapter's weights from those that the forward pass reads, with what PiSSA removes from the base.

    Args:
        specs: Specs of the adapter as it is saved (see `as_plain`).
        params: Joined weights of base and adapter (see `models.adapted.apply_adapter`).
    """
    if isinstance(specs, LowRank):
        assert isinstance(params, AdaptedWeight), "joined with this adapter"
        is_pissa = isinstance(params.base, AdaptedWeight)
        return side_by_side([params.change, params.base.change], specs.scale) if is_pissa else params.change
    if isinstance(specs, dict):
        return {name: trained_params(each, params[name]) for name, each in specs.items()}
    if isinstance(specs, list):
        return [trained_params(spec, each) for spec, each in zip(specs, params, strict=True)]
    return params


def init_adapter(config: ModelConfig, lora: LoRAConfig, params: Params, key: Key[Array, ""], sharding: Any) -> Params:
    """Initializes an adapter's weights in float32: its changes, and copies of the base's fully trained weights.

    Changes are zero, with `LowRank.a` uniform in [-1, 1] / sqrt(I), as in PEFT, or the principal part of their matrix.
    Magnitudes are the norms of the matrix. Values depend only on the key, the weight's name and the base.

    Raises:
        ValueError: See `adapter_specs`.
    """

    def init(spec: Any, base: Any) -> Any:
        if isinstance(spec, LowRank):
            weight_key = jax.random.fold_in(key, zlib.crc32(spec.a.name.encode()))
            bound = 1.0 / math.sqrt(spec.a.shape[1])
            a = jax.random.uniform(weight_key, spec.a.shape, jnp.float32, -bound, bound)
            change = LowRank(a, jnp.zeros(spec.b.shape, jnp.float32), spec.scale)
            magnitude = None if spec.magnitude is None else norms_of(base, change)
            if lora.is_pissa:
                change = _principal_part(dense(base, jnp.float32), spec, str(lora.init_lora_weights), weight_key)
            return replace(change, magnitude=magnitude)
        if isinstance(spec, dict):
            return {name: init(each, base[name]) for name, each in spec.items()}
        if isinstance(spec, list):
            return [init(each, own) for each, own in zip(spec, base, strict=True)]
        return jnp.array(dense(base, jnp.float32), copy=True)

    specs = adapter_specs(config, lora)
    return jax.jit(lambda params: init(specs, params), out_shardings=sharding)(params)


def _principal_part(matrix: Float[Array, "O I"], spec: LowRank, method: str, key: Key[Array, ""]) -> LowRank:
    """Returns the principal singular values and vectors of a matrix as a change, each factor with their square root.

    The approximation is a subspace iteration from random vectors (arXiv:0909.4061, algorithm 4.4).
    """
    rank, (_, _, niter) = spec.a.shape[0], method.partition("_niter_")
    if niter:
        q, qr = matrix @ jax.random.normal(key, (matrix.shape[1], rank)), jnp.linalg.qr
        q = lax.fori_loop(0, int(niter), lambda _, q: qr(matrix @ qr(matrix.T @ q)[0])[0], qr(q)[0])
        left, values, right = jnp.linalg.svd(q.T @ matrix, full_matrices=False)
        left = q @ left
    else:
        left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / spec.scale)
    return LowRank(roots[:, None] * right[:rank], left[:, :rank] * roots[None, :], spec.scale)


def count_params(config: ModelConfig, lora: LoRAConfig | None) -> tuple[int, int]:
    """Counts the trained and all parameters as PEFT does: fully trained copies of base weights are extra parameters."""
    total = num_params(config)
    if lora is None:
        return total, total
    specs = jax.tree.leaves(adapter_specs(config, lora))
    trained = sum(math.prod(spec.shape) for spec in specs)
    in_place = sum(
        math.prod(spec.shape)
        for spec in specs
        if spec.name.endswith(".bias") and not any(_is_inside(each, module_name(spec)) for each in lora.modules_to_save)
    )
    return trained, total + trained - in_place


def trainable_params_line(trained: int, total: int) -> str:
    """Formats the counts as PEFT does.

    >>> trainable_params_line(20_971_520, 8_051_232_768)
    'trainable params: 20,971,520 || all params: 8,051,232,768 || trainable%: 0.2605'
    """
    return f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}"


ADAPTER_TENSORS = "adapter_model.safetensors"


def adapter_config_dict(adapter: Adapter, config: ModelConfig) -> dict[str, Any]:
    """Returns the contents of `adapter_config.json`."""
    lora = adapter.config
    is_pattern = isinstance(lora.target_modules, str) and lora.target_modules != "all-linear"
    targets = _target_names(config, lora) if isinstance(lora.target_modules, str) else list(lora.target_modules)
    base, revision = (None, None) if adapter.base_name is None else split_revision(adapter.base_name)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": lora.target_modules if is_pattern else targets,
        "bias": lora.bias,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
        "layers_to_transform": list(lora.layers_to_transform) or None,
        "layers_pattern": list(lora.layers_pattern) or None,
        "init_lora_weights": True,
        "fan_in_fan_out": config.transposed,
    }


def _target_names(config: ModelConfig, lora: LoRAConfig) -> list[str]:
    """Returns names that match the adapted modules only: their last components, or full names if others share these."""
    specs = jax.tree.leaves(adapter_specs(config, lora), is_leaf=_is_low_rank)
    names = [module_name(spec.a).removesuffix(".lora_A").removeprefix(PREFIX) for spec in specs if _is_low_rank(spec)]
    weights = [spec for spec in jax.tree.leaves(model_specs(config)) if spec.name.endswith(".weight")]
    others = {_last_component(name) for name in set(map(module_name, weights)) - set(names)}
    return list(dict.fromkeys(name if _last_component(name) in others else _last_component(name) for name in names))


def _last_component(module: str) -> str:
    return module.rpartition(".")[2]


def _is_low_rank(spec: Any) -> bool:
    return isinstance(spec, LowRank)


def write_adapter(config: ModelConfig, lora: LoRAConfig, trained: Params, folder: Path) -> None:
    """Writes `adapter_model.safetensors`, in the dtype of the trained weights."""
    specs = jax.tree.leaves(adapter_specs(config, lora))
    pairs = zip(specs, jax.tree.leaves(trained), strict=True)
    tensors = {spec.name: np.ascontiguousarray(np.asarray(array)) for spec, array in pairs}
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    (folder / ADAPTER_TENSORS).chmod(0o644)


def read_adapter(config: ModelConfig, lora: LoRAConfig, folder: Path, sharding: Any) -> Params:
    """Reads `adapter_model.safetensors` as float32 weights on the devices, in the structure of `adapter_specs`.

    Raises:
        ValueError: The file is missing or damaged, or its tensors do not match `adapter_config.json`.
    """
    path = folder / ADAPTER_TENSORS
    if whole := [name for name in (SINGLE_NAME, INDEX_NAME) if (folder / name).is_file()]:
        raise ValueError(
            f"{folder} has an adapter ({ADAPTER_NAME}) and a whole model ({whole[0]}), as a folder has that both were "
            "saved to; move one of them to another folder"
        )
    if not path.is_file():
        raise ValueError(f"{folder} has no {ADAPTER_TENSORS}; pickled adapters are never loaded")
    try:
        specs = adapter_specs(config, lora)
    except ValueError as error:
        raise ValueError(f"{folder / ADAPTER_NAME}: {error}") from error
    expected, found = {spec.name: spec for spec in jax.tree.leaves(specs)}, TensorFile(path).tensors()
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{path} does not match {ADAPTER_NAME} for this base: it lacks {missing[:3]}, and {short_repr(unknown)} "
            "does not belong there"
        )
    for name, spec in expected.items():
        found[name].check(spec.shape, f"{path}: {name}", f"{ADAPTER_NAME} with this base")

    def read(spec: Any) -> Any:
        array = found[spec.name].whole()
        check_finite(array, f"{path}: {spec.name}")
        return to_device(array.astype(np.float32), sharding)

    return jax.tree.map(read, specs)


def adapter_base(content: Mapping[str, Any], folder: Path) -> str:
    """Returns the base that a parsed `adapter_config.json` names, with its revision if it is on the hub.

    Raises:
        ValueError: It names none.
    """
    name = content.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{folder / ADAPTER_NAME} does not name the adapter's base; pass it explicitly")
    revision = content.get("revision")
    return at_revision(name, revision) if isinstance(revision, str) else name


def read_lora_config(content: Mapping[str, Any], folder: Path) -> LoRAConfig:
    """Reads the settings of a trained adapter from a parsed `adapter_config.json`.

    Raises:
        ValueError: A value is not of its key's kind, or requests something unsupported.
    """
    try:
        return as_lora_config(content, has_weights=True)
    except ValueError as error:
        raise ValueError(f"{folder / ADAPTER_NAME}: {error}") from error
