"""`groupax generate`: completions of prompts by a model."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from groupax.cli.train import chosen_agents
from groupax.core.settings.command_line import parsed
from groupax.core.settings.compute import DecodingWeights
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.core.terminal.printable import printable
from groupax.events import PhaseStarted
from groupax.recipes import RECIPES, load_recipe
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import Rich


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample completions of prompts and print them with the throughput."""

    model: str
    """A folder, a Hugging Face hub id, or the name of a recipe, which stands for its model."""
    prompt: tuple[str, ...]
    """Prompts to complete."""
    raw: bool = False
    """Give the model each prompt as it is; otherwise the chat template, if there is one, makes it a user's message."""
    tools: tuple[str, ...] | None = None
    """Functions that the model may call, as module:function; by default those of the recipe that --model names."""
    environments: tuple[str, ...] | None = None
    """Environment, as module:Class; by default that of the recipe that --model names."""
    chat_template: str | None = None
    """Chat template for a tokenizer without one: chatml, plain, or a file."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as JSON, e.g. '{"enable_thinking": false}'."""
    weights: DecodingWeights = "same"
    """Precision of the weights for decoding: as stored, or in fewer bits."""
    tp: int = 1
    """Tensor-parallel size: devices that share the weights, with some heads each; 1 replicates the weights."""
    kv_cache_gb: float | None = None
    """Memory for the KV cache on each device in GB; the default is 80 % of what is free."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters. With tools or environments --max_tokens counts all tokens after the prompt."""
    episodes: EpisodeSettings = field(default_factory=EpisodeSettings)
    """Limits of episodes with tools or environments."""


def generate(arguments: Sequence[str]) -> None:
    """Runs `groupax generate`."""
    command = parsed(Generate, "generate", arguments)

    with Rich() if sys.stdout.isatty() else Progress() as progress:
        progress(PhaseStarted("loading libraries"))

        from groupax.data.tokenizer import encode_prompts
        from groupax.engine.engine import Engine
        from groupax.episodes.as_json import shown_episode
        from groupax.episodes.play import Prompts
        from groupax.episodes.rules import make_rules
        from groupax.parallel.runtime import compilation
        from groupax.rollouts.collector import sample_groups

        progress.is_compiling = lambda: compilation().is_under_way
        progress(PhaseStarted("loading the model"))
        recipe = load_recipe(command.model) if command.model in RECIPES else None
        name = recipe.model if recipe else command.model
        tools, environments = chosen_agents(command.tools, command.environments, recipe).load()
        kv_bytes = None if command.kv_cache_gb is None else int(command.kv_cache_gb * 1e9)
        engine = Engine.load(
            name, chat_template=command.chat_template, weights=command.weights, tp=command.tp, kv_bytes=kv_bytes
        )
        kwargs = command.chat_template_kwargs
        rules = make_rules(engine.tokenizer, command.episodes, tools, environments, kwargs, engine.eos_ids)
        progress(PhaseStarted("generating"))
        compiled_before_s, started_s = compilation().seconds, time.perf_counter()
        is_chat = rules.has_turns or (bool(engine.tokenizer.chat_template) and not command.raw)
        rows = [{"prompt": [{"role": "user", "content": text}] if is_chat else text} for text in command.prompt]
        prompts, tools_of = [row["prompt"] for row in rows], rules.schemas_of(rows)
        ids = encode_prompts(engine.tokenizer, prompts, [kwargs] * len(rows), tools=tools_of)
        played = sample_groups(engine, engine.tokenizer, Prompts(rows, ids), command.sampling, step=0, rules=rules)
        groups = sorted(played, key=lambda group: group[0].prompt_index)
        seconds, compile_s = time.perf_counter() - started_s, compilation().seconds - compiled_before_s
    for text, group in zip(command.prompt, groups, strict=True):
        for rollout in group:
            about = f"{rollout.mask.sum()} tokens, {rollout.finish_reason}"
            print(f"--- {text!r} ({about})\n{printable(shown_episode(rollout))}")
    num_tokens = sum(int(rollout.mask.sum()) for group in groups for rollout in group)
    print(f"\n{throughput(num_tokens, seconds, compile_s)}")


def throughput(num_tokens: int, seconds: float, compile_s: float) -> str:
    """Returns a line about the speed of a generation, which separates decoding from compiling or loading programs."""
    decode_s = max(seconds - compile_s, 1e-9)
    return (
        f"{num_tokens:,} tokens in {decode_s:.2f} s, {num_tokens / decode_s:,.0f} tokens/s; compiling the programs, "
        f"which are kept for the next time, took {compile_s:.2f} s more"
    )
