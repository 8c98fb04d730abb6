"""Time of rollouts whose tools take time, beside TRL.

    python benchmarks/episodes.py [--json] [--tool_s 0.25] [--turns 4]

64 rollouts, 8 of each of 8 prompts, with 4 turns each; every turn ends with a call of a tool that sleeps for 0.25 s.
The model has random weights and 2 layers; the text of a call is one token of its tokenizer, with a bias for which turns
have 32 tokens in the mean. The critical path is the longest chain of tools, 4 x 0.25 s, and the time in which the same
tokens are sampled with a tool that returns at once. TRL: its own loop over tool calls
(`GRPOTrainer._tool_call_loop`), whose tokens cost no time at all, since they are given to it.
"""

import asyncio
import importlib.util
import math
import statistics
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import Engine, SamplingParams, init_model
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.types import Rollout
from groupax.engine.plan import TURN_STEPS
from groupax.episodes.play import Prompts
from groupax.episodes.rules import make_rules
from groupax.rollouts.collector import sample_groups

PROMPTS, GROUP, TURN_TOKENS = 8, 8, 32
CALL = '<tool_call>\n{"name": "wait", "arguments": {"number": 1}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call them as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of_bytes() -> Any:
    """Tokens are bytes, the marks of messages, and a call."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    wrapped.add_tokens([CALL])
    return wrapped


def make_tool(seconds: float) -> Any:
    """A tool that takes this long."""

    async def wait(number: int) -> str:
        """Waits.

        Args:
            number: Any number.
        """
        await asyncio.sleep(seconds)
        return str(number)

    return wait


def played(engine: Engine, seconds: float, turns: int) -> tuple[float, list[Rollout]]:
    """The time of a rollout, and its episodes."""
    tokenizer = engine.tokenizer
    rules = make_rules(tokenizer, EpisodeSettings(max_turns=turns, max_turn_tokens=512), [make_tool(seconds)], None)
    prompt = [{"role": "user", "content": "Wait four times."}]
    schemas = rules.setup_of({"prompt": prompt}).schemas
    text = tokenizer.apply_chat_template(prompt, tools=schemas, add_generation_prompt=True, tokenize=False)
    ids = np.asarray(tokenizer.encode(text), np.int32)
    call, end = tokenizer.convert_tokens_to_ids([CALL, "<|im_end|>"])
    bias = {call: math.log((len(tokenizer) - 1) / (TURN_TOKENS - 1)), end: -100.0}
    params = SamplingParams(n=GROUP, max_tokens=1200, logit_bias=bias, stop_token_ids=(call,), seed=3)
    started_s = time.perf_counter()
    groups = sample_groups(
        engine, tokenizer, Prompts([{"prompt": prompt}] * PROMPTS, [ids] * PROMPTS), params, 0, rules=rules
    )
    rows = [row for group in sorted(groups, key=lambda group: group[0].prompt_index) for row in group]
    took_s = time.perf_counter() - started_s
    assert sum(len(turn.calls) for row in rows for turn in row.turns) == PROMPTS * GROUP * turns
    return took_s, rows


def of_groupax(repeats: int, tool_s: float, turns: int) -> list[dict[str, Any]]:
    """The row of each way to store keys and values, and the critical path."""
    tokenizer = tokenizer_of_bytes()
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    model = init_model({**QWEN_7M, **small, "vocab_size": len(tokenizer)}, seed=0)
    results = []
    for name, num_bytes in (("keys and values stored", 1 << 30), ("computed again", 0)):
        given = model.config, model.params, model.mesh, ()
        engine = Engine(*given, chunk_steps=TURN_STEPS, tokenizer=tokenizer, prefix_bytes=num_bytes)
        for seconds in (tool_s, 0.0, tool_s, 0.0):  # compiles for what the two meet
            played(engine, seconds, turns)
        runs = [(played(engine, tool_s, turns), played(engine, 0.0, turns)) for _ in range(repeats)]
        for (_, slow), (_, quick) in runs:  # a token on the border of two differs by rounding now and then
            pairs = zip(slow, quick, strict=True)
            assert sum(not np.array_equal(a.completion_ids, b.completion_ids) for a, b in pairs) < 3
        rows = runs[0][0][1]
        took_s = statistics.median(slow for (slow, _), _ in runs)
        decoding_s = statistics.median(quick for _, (quick, _) in runs)
        results.append(
            {
                "": f"groupax, {name}",
                "tokens": sum(int(row.mask.sum()) for row in rows),
                "with instant tools, s": decoding_s,
                "critical path, s": turns * tool_s + decoding_s,
                "s": took_s,
                "of the critical path": took_s / (turns * tool_s + decoding_s),
            }
        )
    return results


def of_trl(tool_s: float, turns: int) -> dict[str, Any]:
    """TRL's row: its loop over the calls of the same number of rollouts, which generates in no time."""
    warnings.filterwarnings("ignore")
    trl: Any = importlib.import_module("trl")
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    templates = importlib.import_module("trl.chat_template_utils")
    start_loop = importlib.import_module("trl.trainer.utils").start_event_loop_in_daemon
    tokenizer = tokenizer_of_bytes()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer = templates.add_response_schema(tokenizer)
    num = PROMPTS * GROUP
    turn = tokenizer.encode(CALL + "<|im_end|>", add_special_tokens=False)
    stub = types.SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        tools=[1],
        use_vllm=False,
        max_tool_calling_iterations=turns,
        max_completion_length=100_000,
        chat_template=templates.get_training_chat_template(tokenizer),
        chat_template_kwargs={},
        environment_factories=None,
        model=types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=1 << 20)),
        _generate_single_turn=lambda ids, *_, **__: ([turn] * len(ids), None),
        _sync_tool_dicts=[{}] * num,
        _async_tool_dicts=[{"wait": make_tool(tool_s)}] * num,
    )
    stub._get_tool_suffix_ids = types.MethodType(trainer._get_tool_suffix_ids, stub)
    stub.async_loop_thread, stub.async_loop, ready = start_loop(name="tools")
    ready.wait()
    prompts = [[{"role": "user", "content": "Wait four times."}] for _ in range(num)]
    ids = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in prompts]
    turns_ids = [list(turn) for _ in range(num)]
    parsed = [[templates.parse_response(tokenizer, turn, prefix=each)] for each in ids]
    started_s = time.perf_counter()
    trainer._tool_call_loop(stub, prompts, ids, turns_ids, parsed, None, None, {})
    took_s = time.perf_counter() - started_s
    calls = sum(message["role"] == "tool" for messages in parsed for message in messages)
    assert calls == num * turns, calls
    path_s = turns * tool_s
    return {
        "": f"TRL {trl.__version__}, tokens in no time",
        "tokens": 0,
        "with instant tools, s": 0.0,
        "critical path, s": path_s,
        "s": took_s,
        "of the critical path": took_s / path_s,
    }


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--tool_s", type=float, default=0.25, help="seconds of each call")
    flags.add_argument("--turns", type=int, default=4, help="calls of each rollout")
    args = flags.parse_args()
    results = of_groupax(args.repeats, args.tool_s, args.turns)
    if importlib.util.find_spec("trl"):
        results.append(of_trl(args.tool_s, args.turns))
    show(results, args.json)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
