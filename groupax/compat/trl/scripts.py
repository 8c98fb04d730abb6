"""TRL's arguments of scripts, and the datasets that they name. Imports no jax."""

from dataclasses import dataclass, field
from typing import Any

from groupax.compat.arguments import accepting_more


@dataclass
class ScriptArguments:
    """The dataset of a script.

    Attributes:
        dataset_name: Path or name of the dataset, as `datasets.load_dataset` accepts it.
        dataset_config: Name of its configuration.
        dataset_train_split: Split to train on.
        dataset_test_split: Split to evaluate on.
        dataset_streaming: Whether to stream it.
        ignore_bias_buffers: Has no effect: groupax does not use PyTorch's DDP.
    """

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetConfig:
    """A dataset of a mixture: the arguments of `datasets.load_dataset`, the columns to keep, and its share.

    Attributes:
        fraction: Share of the mixture, relative to those of the others; None for all rows.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@accepting_more
@dataclass
class DatasetMixtureConfig:
    """A mixture of datasets.

    Attributes:
        datasets: The datasets; mappings become `DatasetConfig`.
        streaming: Whether to stream them.
        test_split_size: Share of the rows to hold out as the split `test`; None for no such split.
    """

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        """Converts mappings."""
        self.datasets = [DatasetConfig(**each) if isinstance(each, dict) else each for each in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Returns the datasets of a mixture, one after another, as a `DatasetDict`.

    Raises:
        ValueError: There are no datasets, or only some have a fraction, or fractions are given of streams.
    """
    import datasets

    configs = mixture_config.datasets
    if not configs:
        raise ValueError("the mixture has no datasets; name at least one in datasets")
    loaded = [_load(config, mixture_config.streaming) for config in configs]
    if any(config.fraction is not None for config in configs):
        loaded = _shares(loaded, configs, mixture_config.streaming)
    mixture = datasets.concatenate_datasets(loaded)
    if mixture_config.test_split_size is not None:
        return mixture.train_test_split(test_size=mixture_config.test_split_size)
    return (datasets.IterableDatasetDict if mixture_config.streaming else datasets.DatasetDict)({"train": mixture})


def _load(config: DatasetConfig, streaming: bool) -> Any:
    import datasets

    rows = datasets.load_dataset(
        config.path,
        config.name,
        data_dir=config.data_dir,
        data_files=config.data_files,
        split=config.split,
        streaming=streaming,
    )
    return rows if config.columns is None else rows.select_columns(config.columns)


def _shares(loaded: list[Any], configs: list[DatasetConfig], streaming: bool) -> list[Any]:
    """Returns the first rows of each dataset, as many as keep the fractions without repeating a row."""
    fractions = [config.fraction for config in configs if config.fraction is not None]
    if len(fractions) < len(configs):
        raise ValueError("fraction must be set for all datasets of the mixture or for none")
    if streaming:
        raise ValueError("a stream has no length, so fraction cannot be used with streaming")
    shares = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(rows) / share for rows, share in zip(loaded, shares, strict=True) if share > 0)
    return [rows.select(range(round(share * total))) for rows, share in zip(loaded, shares, strict=True)]
