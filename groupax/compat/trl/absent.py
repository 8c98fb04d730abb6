"""The names of TRL that groupax does not have, each with the reason and what to use instead. Imports no jax."""

_DATA = "it only changes datasets, whichever trainer they are for: import it from trl itself"
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
    "extract_prompt": _DATA,
    "is_conversational": _DATA,
    "is_conversational_from_value": _DATA,
    "maybe_apply_chat_template": _DATA,
    "maybe_convert_to_chatml": _DATA,
    "maybe_extract_prompt": _DATA,
    "maybe_unpair_preference_dataset": _DATA,
    "pack_dataset": _DATA,
    "prepare_multimodal_messages": "pass prompts with images as they are: datasets have a column image or images",
    "unpair_preference_dataset": _DATA,
}


def refusal(name: str) -> ImportError | AttributeError:
    """Returns the error for a name that `groupax.compat.trl` does not have."""
    if name in ABSENT:
        return ImportError(f"groupax.compat.trl has no {name}: {ABSENT[name]}")
    return AttributeError(f"module 'groupax.compat.trl' has no attribute {name!r}")
