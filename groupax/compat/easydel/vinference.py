"""EasyDeL's `vInference`, which samples completions."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from groupax.compat import hf
from groupax.compat.easydel.config import GRPOConfig
from groupax.compat.easydel.models import decoding_tp_of
from groupax.compat.fields import warn
from groupax.engine.engine import Engine
from groupax.models.checkpoint import Model, load_model
from groupax.settings.fields import nearest
from groupax.settings.sampling import SamplingParams, SamplingSettings

# Sampling settings of a `vInference`, with their names in a `GRPOConfig`.
SAMPLING = {
    "max_new_tokens": "max_completion_length",
    "num_return_sequences": "num_return_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
KNOWN = (*SAMPLING, "do_sample", "seed")
# Settings of a `vInferenceConfig` without effect in groupax, each with the reason.
UNUSED = {
    "streaming_chunks": "completions are not streamed",
    "bos_token_id": "the tokenizer decides how prompts start",
    "eos_token_id": "the model and its tokenizer decide where completions end",
    "pad_token_id": "completions are not padded",
}


class vInference:  # noqa: N801 - EasyDeL's name
    """A model with sampling settings, for a trainer and for `generate`.

    Args:
        model: Model to sample from.
        tokenizer: Tokenizer of prompts that are text.
        processor_class: Alternative name of `tokenizer`.
        generation_config: Object or dict with the settings below, or with `sampling_params` that contain them.
        settings: Sampling settings: the keys of `SAMPLING`, `do_sample` and `seed`.

    Raises:
        TypeError: A setting is unknown.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        processor_class: Any = None,
        generation_config: Any = None,
        **settings: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer or processor_class
        _check_known("vInference", settings, KNOWN)
        settings = _settings_of(generation_config) | settings
        self.given = {name: value for name, value in settings.items() if name in SAMPLING}
        self.do_sample, self.seed = settings.get("do_sample", True), settings.get("seed", 0)

    def generate(self, prompts: Any) -> list[list[str]]:
        """Returns the completions of each prompt as text."""
        given = {each.name: self.given[each.name] for each in fields(SamplingSettings) if each.name in self.given}
        given |= {} if self.do_sample else {"temperature": 0.0}
        params = SamplingParams(
            n=self.given.get("num_return_sequences", 1),
            max_tokens=self.given.get("max_new_tokens", GRPOConfig.FIELDS.defaults["max_completion_length"]),
            seed=self.seed,
            **given,
        )
        return [[completion.text or "" for completion in group] for group in self._engine.generate(prompts, params)]

    @functools.cached_property
    def _engine(self) -> Engine:
        model = hf.as_model(self.model)
        model = model if isinstance(model, Model) else load_model(model)
        return Engine.of(model, self.tokenizer, tp=decoding_tp_of(model))


def _settings_of(config: Any) -> dict[str, Any]:
    """Returns the settings in a `vInferenceConfig`, a dict or another object; other attributes of the latter are
    ignored."""
    if config is None:
        return {}
    given = dict(config if isinstance(config, Mapping) else vars(config))
    if isinstance(config, (Mapping, vInferenceConfig)):
        _check_known("vInferenceConfig", given, (*KNOWN, *UNUSED, "sampling_params"))
        for name in UNUSED:
            if given.get(name) is not None:
                warn(f"vInferenceConfig's {name}={given[name]!r} changes nothing in groupax: {UNUSED[name]}")
    sampling = given.get("sampling_params")
    nested = dict(sampling if isinstance(sampling, Mapping) else vars(sampling)) if sampling is not None else {}
    nested |= {"max_new_tokens": nested["max_tokens"]} if nested.get("max_tokens") is not None else {}
    return {name: each[name] for each in (nested, given) for name in KNOWN if each.get(name) is not None}


def _check_known(owner: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise TypeError(f"{owner} has no setting {name!r}{nearest(name, known)}")


class vInferenceConfig(SimpleNamespace):  # noqa: N801 - EasyDeL's name
    """The settings of `vInference(generation_config=...)`."""
