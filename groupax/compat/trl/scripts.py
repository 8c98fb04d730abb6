"""The parts of TRL that scripts import besides trainers and configs: arguments, datasets, templates. Imports no jax."""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from groupax.compat.fields import accepting_more, warn


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


@accepting_more
@dataclass
class ModelConfig:
    """A model and its adapter, with the fields of TRL's class.

    Raises:
        ValueError: 8 and 4 bits are both requested.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]})
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        """Checks the quantization, and takes a single target module out of its list, as it may be "all-linear"."""
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both set; leave one of them out")
        if isinstance(self.lora_target_modules, (list, tuple)) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # pyright: ignore[reportAttributeAccessIssue]


def get_peft_config(model_args: Any) -> Any:
    """Returns the adapter that a `ModelConfig`, TRL's or this one, describes; None without `use_peft`.

    It is a `LoraConfig` of PEFT where PEFT is installed, else one of `groupax.compat.hf`.
    """
    if not model_args.use_peft:
        return None
    if _is_installed("peft", "torch"):
        from peft import LoraConfig
    else:
        from groupax.compat.hf import LoraConfig
    more: dict[str, Any] = {}
    if model_args.lora_target_parameters is not None:
        more["target_parameters"] = model_args.lora_target_parameters
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        **more,
    )


def get_quantization_config(model_args: Any) -> Any:
    """Returns the quantization that a `ModelConfig` describes; None without `load_in_4bit` and `load_in_8bit`.

    It is a `BitsAndBytesConfig` of transformers where bitsandbytes is installed, else one of `groupax.compat.hf`.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    if _is_installed("bitsandbytes", "torch"):
        from transformers import BitsAndBytesConfig
    else:
        from groupax.compat.hf import BitsAndBytesConfig
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> None:
    """Returns None, as weights are put on all devices; scripts of TRL before 1.0 pass it as `device_map`."""


def _is_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def apply_chat_template(
    example: Mapping[str, Any], processing_class: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, str]:
    """Returns the conversations of an example as text, rendered by the chat template, under the same keys.

    Args:
        example: Conversations under `prompt` and optionally `completion`, or under `messages`.
        processing_class: Tokenizer with a chat template.
        tools: Tools that the template lists.
        template_kwargs: Arguments of the template.

    Raises:
        KeyError: The example has neither `prompt` nor `messages`.
        ValueError: No completion can follow the prompt's last message, or the template renders the prompt differently
            when a completion follows.
    """
    render = functools.partial(
        processing_class.apply_chat_template,
        tools=tools or None,
        tokenize=False,
        **example.get("chat_template_kwargs", {}),
        **template_kwargs,
    )
    if "messages" in example:
        return {"messages": render(example["messages"])}
    if "prompt" not in example:
        raise KeyError(f"the example has neither prompt nor messages, but {', '.join(example)}")
    role = example["prompt"][-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"the prompt's last message has the role {role!r}; it must be user, tool or assistant")
    is_question = role != "assistant"
    prompt = render(example["prompt"], add_generation_prompt=is_question, continue_final_message=not is_question)
    if "completion" not in example:
        return {"prompt": prompt}
    text = render([*example["prompt"], *example["completion"]])
    if not text.startswith(prompt):
        raise ValueError("the chat template renders the prompt differently when a completion follows")
    return {"prompt": prompt, "completion": text[len(prompt) :]}


class RichProgressCallback:
    """A callback without effect: groupax has a progress display of its own, which `disable_tqdm` turns off."""

    def __init__(self, *_: Any, **__: Any) -> None:
        warn("RichProgressCallback changes nothing in groupax, which has a progress display of its own")


_CHANGES_DATA = "it only changes datasets, whichever trainer they are for: import it from trl itself"
_PREFERENCES = (
    "groupax trains on sampled completions (GRPOTrainer) and on given ones (SFTTrainer), not on "
    "preferences; train with trl, and continue here with the model that it saves"
)
_DISTILLATION = "groupax has no teacher model; train with trl, and continue here with the model that it saves"
_TEMPLATE = (
    "groupax reads calls of tools and the model's own tokens without changing the chat template; leave this line out, "
    "or import it from trl"
)

ABSENT = {
    "DPOConfig": _PREFERENCES,
    "DPOTrainer": _PREFERENCES,
    "KTOConfig": _PREFERENCES,
    "KTOTrainer": _PREFERENCES,
    "RewardConfig": _PREFERENCES,
    "RewardTrainer": "train the reward model with trl; GRPOTrainer takes the folder that it saves as a reward",
    "DistillationConfig": _DISTILLATION,
    "DistillationTrainer": _DISTILLATION,
    "BEMACallback": "groupax keeps no average of the weights",
    "LogCompletionsCallback": (
        "GRPOConfig(log_completions=True) logs the completions of training, and evaluations log theirs"
    ),
    "SyncRefModelCallback": "GRPOConfig(sync_ref_model=True) moves the reference model",
    "WeaveCallback": 'GRPOConfig(report_to="wandb", log_completions=True) logs completions',
    "create_reference_model": "the trainer keeps the reference model itself, if beta is above 0",
    "init_zero_verbose": "groupax prints a few lines; disable_tqdm=True of GRPOConfig turns its progress display off",
    "add_response_schema": _TEMPLATE,
    "clone_chat_template": "it changes a model and its tokenizer before training: import it from trl itself",
    "get_training_chat_template": _TEMPLATE,
    "supports_tool_calling": _TEMPLATE,
    "extract_prompt": _CHANGES_DATA,
    "is_conversational": _CHANGES_DATA,
    "is_conversational_from_value": _CHANGES_DATA,
    "maybe_apply_chat_template": _CHANGES_DATA,
    "maybe_convert_to_chatml": _CHANGES_DATA,
    "maybe_extract_prompt": _CHANGES_DATA,
    "maybe_unpair_preference_dataset": _CHANGES_DATA,
    "pack_dataset": _CHANGES_DATA,
    "prepare_multimodal_messages": "pass prompts with images as they are: datasets have a column image or images",
    "unpair_preference_dataset": _CHANGES_DATA,
}


def refusal(name: str) -> ImportError | AttributeError:
    """Returns the error for a name that `groupax.compat.trl` does not have."""
    if name in ABSENT:
        return ImportError(f"groupax.compat.trl has no {name}: {ABSENT[name]}")
    return AttributeError(f"module 'groupax.compat.trl' has no attribute {name!r}")
