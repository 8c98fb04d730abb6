"""TRL's settings for generating rollouts, as native settings."""

from typing import Any

from groupax.compat.fields import parse_mapping, warn
from groupax.compat.trl.fields import GRPOFields
from groupax.settings.fields import nearest

# Native settings for `generation_kwargs` under the names of transformers and vLLM.
GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "stop": "stop",
    "stop_strings": "stop",
}


def generation_settings(config: GRPOFields) -> dict[str, Any]:
    """Returns the native settings for `generation_kwargs`."""
    given = dict(parse_mapping(config.generation_kwargs, "generation_kwargs"))
    if given.pop("do_sample", True) is not True:
        raise ValueError(
            "generation_kwargs has do_sample=False: greedy completions of a prompt are all the same, so their rewards "
            "do not differ and nothing is learned; leave it out"
        )
    unknown = [name for name in given if name not in GENERATION]
    if unknown:
        raise ValueError(
            f"generation_kwargs has {unknown[0]!r}; choose from {', '.join(GENERATION)} and do_sample"
            f"{nearest(unknown[0], GENERATION)}"
        )
    if "stop" in given and "stop_strings" in given:
        raise ValueError("generation_kwargs has stop and stop_strings, which mean the same; leave one of them out")
    return {GENERATION[name]: value for name, value in given.items()}


def vllm_settings(config: GRPOFields) -> dict[str, Any]:
    """Returns the native settings for `use_vllm` and the other vLLM settings.

    vLLM's importance-sampling correction is on if a server samples, if completions match an expression, or if its mode
    is not the default.
    """
    regex = config.vllm_structured_outputs_regex
    if not config.use_vllm:
        _warn_tp_unused(config, "it needs use_vllm=True")
        if regex is not None:
            warn("vllm_structured_outputs_regex has no effect without use_vllm=True, as in TRL")
        return {}
    url = _server_url(config)
    if url is None:
        warn(
            "use_vllm=True: groupax's own engine samples in the trainer's process, with the policy's own weights; vLLM "
            "is not needed, and there is no server to start and no weights to sync"
        )
    else:
        _warn_tp_unused(config, "the server decides how it shards weights (groupax serve --tp)")
        warn(f"use_vllm=True: rollouts are sampled by the server at {url}; docs/serving.md says how to start one")
    tp = config.vllm_tensor_parallel_size
    settings: dict[str, Any] = {"decoding_tp": tp} if url is None else {"rollout_servers": (url,)}
    if regex is not None:
        settings["regex"] = regex
    is_corrected = (
        url is not None
        or regex is not None
        or config.vllm_importance_sampling_mode != GRPOFields.vllm_importance_sampling_mode
    )
    if is_corrected and config.vllm_importance_sampling_correction:
        settings["rollout_correction"] = config.vllm_importance_sampling_mode
        settings["rollout_correction_min"] = config.vllm_importance_sampling_clip_min
        settings["rollout_correction_max"] = config.vllm_importance_sampling_clip_max
    return settings


def _server_url(config: GRPOFields) -> str | None:
    """Returns the URL of the server that samples; None if the trainer's own engine does."""
    host, has_server = (
        config.vllm_server_host,
        config.vllm_mode == "server" or config.vllm_server_host != GRPOFields.vllm_server_host,
    )
    if config.vllm_server_base_url is not None or not (has_server and host):
        return config.vllm_server_base_url
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{config.vllm_server_port}"


def _warn_tp_unused(config: GRPOFields, why: str) -> None:
    tp = config.vllm_tensor_parallel_size
    if tp != 1:
        warn(f"vllm_tensor_parallel_size={tp} changes nothing in groupax: {why}")
