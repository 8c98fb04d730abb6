"""TRL's optimizer and learning-rate settings, and PyTorch optimizers, as native settings."""

from typing import Any

from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.training_arguments import TrainingArguments
from groupax.settings.fields import nearest

OPTIMIZERS = {"adamw": "adamw", "paged_adamw": "adamw", "adafactor": "adafactor", "lion": "lion", "sgd": "sgd"}
SCHEDULERS = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def optimizer_settings(config: TrainingArguments) -> dict[str, Any]:
    """Returns the native settings for `optim`, `lr_scheduler_type` and the warm-up of transformers' arguments."""
    name = str(getattr(config.optim, "value", config.optim))
    known = [own for own in OPTIMIZERS if name == own or name.startswith(f"{own}_")]
    if not known:
        raise ValueError(
            f"optim {name!r} is not supported; choose from {', '.join(OPTIMIZERS)}{nearest(name, OPTIMIZERS)}"
        )
    if "8bit" in name or "4bit" in name or "paged" in name:
        warn(f"optim {name!r}: groupax keeps the optimizer state in float32 on the devices")
    scheduler = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    if scheduler not in SCHEDULERS:
        raise ValueError(
            f"lr_scheduler_type {scheduler!r} is not supported; choose from {', '.join(SCHEDULERS)}"
            f"{nearest(scheduler, SCHEDULERS)}"
        )
    settings: dict[str, Any] = {
        "optimizer": OPTIMIZERS[known[-1]],
        "lr_scheduler_type": SCHEDULERS[scheduler],
        "learning_rate_end": _learning_rate_end(config),
    }
    warmup = _warmup(config)
    if scheduler == "constant" and any(warmup.values()):
        warn("lr_scheduler_type 'constant' has no warm-up; 'constant_with_warmup' has one")
        return settings
    return settings | warmup


def _learning_rate_end(config: TrainingArguments) -> float:
    more = dict(parse_mapping(config.lr_scheduler_kwargs, "lr_scheduler_kwargs"))
    end = more.pop("min_lr", None)
    end = config.learning_rate * more.pop("min_lr_rate") if end is None and "min_lr_rate" in more else end
    if more:
        raise ValueError(f"lr_scheduler_kwargs {more} are not supported; choose from min_lr and min_lr_rate")
    return end or 0.0


def _warmup(config: TrainingArguments) -> dict[str, Any]:
    if 0 < (config.warmup_steps or 0) < 1:
        return {"warmup_ratio": float(config.warmup_steps)}
    if not config.warmup_steps and config.warmup_ratio:
        return {"warmup_ratio": float(config.warmup_ratio)}
    return {"warmup_steps": int(config.warmup_steps or 0)}


def torch_optimizer_settings(optimizers: tuple[Any, Any]) -> dict[str, Any]:
    """Returns the native settings for the kind and the hyperparameters of a PyTorch optimizer.

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
