"""Makes the embedded model of the recipes of agents, `groupax/recipes/agents/model/`:

    JAX_NUM_CPU_DEVICES=1 python dev/pretrain_agent.py

The model is imperfect on purpose. Its corpus mixes conversations of many authors: most guess, some call a tool, some of
these wrongly. So the model can write calls and read results, but it rarely does. That is what GRPO finds out. The first
part of each stage has more of the calls, from which the model learns to copy numbers. The second stage was added when
the model of the first copied numbers too badly.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import agent_game
import agent_sql
import numpy as np
from pretraining import Corpus, save, train
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from groupax.data.bridge import Bridge
from groupax.data.chat import render
from groupax.models.specs import num_params
from groupax.models.weights.checkpoint import init_model
from groupax.recipes.agents import calculator
from groupax.tools.readers import read_hermes
from groupax.tools.tool import tools_from, tools_of

FOLDER = Path(__file__).parents[1] / "groupax" / "recipes" / "agents" / "model"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PAD, _, EOS = range(3)
VOCAB_SIZE = 512
# Digits, signs and quotes are tokens of their own, and words have the space before them.
PIECES = r"\d|[-+*/()=<>']|\n| ?[^\s\d\-+*/()=<>']+|\s"

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\\n' }}
    {%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
            {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 352,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
GENERATION_CONFIG = {"eos_token_id": EOS, "pad_token_id": PAD}

BATCH_ROWS = 24
ROW_TOKENS = 256
# Kind of a conversation -> how often it occurs.
SHARES = {"calculator": 0.45, "no tools": 0.1, "game": 0.15, "sql": 0.3}
PRACTICE = 0.75  # part of the corpus in which most call
CALLS = {True: 0.97, False: 0.32}  # how many call the calculator, while practising and afterwards
QUERIES = {True: 0.97, False: 0.5}
SENSIBLE = 0.3  # how many of the games' players heed what they are told


@dataclass(frozen=True)
class Stage:
    """A part of the training, with a learning rate schedule of its own.

    Attributes:
        steps: Number of its steps.
        seed: Seed of its corpus.
        learning_rate: Highest learning rate.
        slips: How many of those who call a tool make a mistake, while practising and afterwards.
        mistakes: Mistakes with the calculator.
    """

    steps: int
    seed: int
    learning_rate: float
    slips: Mapping[bool, float]
    mistakes: Sequence[str]


STAGES = (
    Stage(900, 0, 3e-3, {True: 0.05, False: 0.25}, ("part", "broken", "ignored")),
    Stage(400, 1, 2e-3, {True: 0.02, False: 0.2}, ("part", "broken")),
)

Segments = list[tuple[str, bool]]  # texts, and whether they are the assistant's


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=HF_CONFIG["max_position_embeddings"],
    )


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of a new model."""
    rng, renderer = random.Random(0), Renderer(make_tokenizer(iter(SPECIAL)))
    streams = [conversations(renderer, rng, kind, STAGES[0]) for kind in SHARES]
    return make_tokenizer(text for _ in range(1000) for stream in streams for text, _ in next(stream))


# -- the corpus


@cache
def schemas_of(kind: str) -> list[Any]:
    """The tools in the prompt of a kind of conversation."""
    tools = {
        "calculator": lambda: tools_from([calculator.calculator]),
        "sql": lambda: tools_of(agent_sql.FruitDatabase),
    }
    return [tool.schema for tool in tools[kind]().values()] if kind in tools else []


class Renderer:
    """The texts of conversations, as the chat template writes them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.prompt = cache(self.prompt)

    def prompt(self, kind: str) -> str:
        """The text before the first turn, with USER in place of the question."""
        messages = [{"role": "user", "content": "USER"}]
        return render(self._tokenizer, messages, "a conversation", tools=schemas_of(kind))

    def segments(self, kind: str, question: str, turns: list[tuple[str, str]], last: str | None) -> Segments:
        """The segments of a conversation.

        Args:
            kind: Its kind.
            question: What the user asks.
            turns: Turns of the assistant that were answered, with the answers.
            last: The last turn; None if it was answered by nothing.
        """
        segments = [(self.prompt(kind).replace("USER", question), False)]
        for text, answer in turns:
            segments.append((text + SPECIAL[EOS], True))
            answer = f"{TAGS[2]}\n{answer}\n{TAGS[3]}" if "<tool_call>" in text else answer
            segments.append((f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n", False))
        return segments if last is None else [*segments, (last + SPECIAL[EOS], True)]


def call_of(name: str, **arguments: str) -> str:
    """A tool call in the form of the chat template."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answered(call: str, function: Callable[..., Any]) -> tuple[str, str]:
    """A turn that is a call, and its result."""
    [parsed] = read_hermes(call, "").calls
    if parsed.fault:
        return call, str({"error": parsed.fault})
    try:
        return call, str(function(**parsed.arguments))
    except ValueError as error:
        return call, str({"error": str(error)})


def calculation(
    rng: random.Random, expression: str, stage: Stage, practising: bool
) -> tuple[list[tuple[str, str]], str]:
    """How one of the authors answers a problem with a calculator."""
    answer = str(calculator.evaluate(expression))
    if rng.random() >= CALLS[practising]:
        return [], answer  # from the head, at which the model will be bad
    right = call_of("calculator", expression=expression)
    if rng.random() >= stage.slips[practising]:
        return [answered(right, calculator.calculator)], answer
    match rng.choice(stage.mistakes):
        case "part":  # calculates only a part of the problem
            part = expression[: max(3, len(expression) - 3)].strip("+-*()")
            turn = answered(call_of("calculator", expression=part), calculator.calculator)
            return [turn], turn[1] if "error" not in turn[1] else str(rng.randint(1000, 99999))
        case "broken":
            return [answered(right.replace('"}}', '"}'), calculator.calculator)], str(rng.randint(1000, 99999))
        case _:  # ignores the result
            return [answered(right, calculator.calculator)], str(rng.randint(1000, 99999))


def lookup(
    rng: random.Random, row: dict[str, Any], stage: Stage, practising: bool
) -> tuple[list[tuple[str, str]], str]:
    """How one of the authors answers a question about a table."""
    database = agent_sql.FruitDatabase()
    database.reset(row, seed=0)
    guess = str(rng.choice([rng.randint(0, 4), rng.randint(10, 99)]))
    try:
        if rng.random() >= QUERIES[practising]:
            return [], guess
        query, ignores = row["query"], False
        if rng.random() < stage.slips[practising]:
            match rng.choice(["other", "unknown", "ignored"]):
                case "other":
                    found = ("price", "COUNT(*)", "MAX(price)", "MIN(price)")
                    used = next(each for each in found if f" {each} " in query)
                    query = query.replace(f" {used} ", f" {rng.choice(found)} ")
                case "unknown":
                    query = query.replace("price", "cost").replace("colour", "color")
                case _:
                    ignores = True
        turn = answered(call_of("query", sql=query), database.query)
        return [turn], guess if ignores or "error" in turn[1] or not turn[1] else turn[1].split("\n")[0]
    finally:
        database.close()


def game(rng: random.Random) -> tuple[list[tuple[str, str]], str | None]:
    """How one of the authors plays."""
    environment = agent_game.GuessNumber()
    environment.reset({"number": rng.randint(1, agent_game.LARGEST)}, seed=0)
    low, high, heeds, turns = 1, agent_game.LARGEST, rng.random() < SENSIBLE, []
    for _ in range(3):
        guess = rng.randint(low, high) if heeds else rng.randint(1, agent_game.LARGEST)
        step = environment.act({"content": str(guess)})
        if step.done:
            return turns, str(guess)
        turns.append((str(guess), step.observation))
        low, high = (max(low, guess + 1), high) if step.observation == "higher" else (low, min(high, guess - 1))
    return turns, None


def conversations(
    renderer: Renderer, rng: random.Random, kind: str, stage: Stage, practising: bool = True
) -> Iterator[Segments]:
    """Conversations of a kind, without end."""
    problems = calculator.expressions(rng.randrange(2**31))
    while True:
        if kind == "game":
            yield renderer.segments(kind, agent_game.PROMPT, *game(rng))
        elif kind == "sql":
            [row] = agent_sql.problems(1, rng.randrange(2**31))
            yield renderer.segments(kind, row["prompt"][0]["content"], *lookup(rng, row, stage, practising))
        else:
            expression = next(problems)
            answer = str(calculator.evaluate(expression))
            turns = calculation(rng, expression, stage, practising) if kind == "calculator" else ([], answer)
            yield renderer.segments(kind, calculator.PROMPT.format(expression), *turns)


def encode(tokenizer: Any, segments: Segments) -> list[tuple[list[int], bool]]:
    """Token ids of segments, which control tokens and line ends separate."""
    encode = tokenizer.backend_tokenizer.encode
    return [(encode(text).ids, learned) for text, learned in segments]


def make_corpus(tokenizer: Any, renderer: Renderer, stage: Stage) -> Corpus:
    """The corpus of a stage."""
    num_practice = int(stage.steps * PRACTICE)
    parts = [
        make_rows(tokenizer, renderer, steps * BATCH_ROWS, stage, practising)
        for steps, practising in ((num_practice, True), (stage.steps - num_practice, False))
    ]
    return Corpus(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))


def make_rows(tokenizer: Any, renderer: Renderer, num_rows: int, stage: Stage, practising: bool) -> Corpus:
    """Rows of whole conversations of one kind each, which share what their prompts begin with."""
    rng = random.Random(f"{stage.seed} {practising}")
    streams = {kind: conversations(renderer, rng, kind, stage, practising) for kind in SHARES}
    heads = {kind: renderer.prompt(kind).partition("USER")[0].removesuffix("\n") for kind in SHARES}
    shape = (num_rows, ROW_TOKENS)
    rows, learned, documents = np.full(shape, PAD, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    for row in range(num_rows):
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        head = tokenizer.encode(heads[kind])
        rows[row, : len(head)], documents[row, : len(head)] = head, -1
        positions[row, : len(head)] = np.arange(len(head))
        end, number = len(head), 0
        for (prompt, _), *rest in streams[kind]:
            start, number = end, number + 1
            encoded = encode(tokenizer, [(prompt.removeprefix(heads[kind]), False), *rest])
            if start + sum(len(ids) for ids, _ in encoded) > ROW_TOKENS:
                break
            for ids, is_learned in encoded:
                part = slice(end, end + len(ids))
                rows[row, part], learned[row, part], documents[row, part] = ids, is_learned, number
                positions[row, part] = np.arange(len(head) + end - start, len(head) + end - start + len(ids))
                end += len(ids)
    return Corpus(rows, learned, documents, positions)


def check_bridges(tokenizer: Any, renderer: Renderer) -> None:
    """Checks on some conversations that the corpus has the tokens that rollouts have between turns."""
    rng = random.Random(0)
    streams = {kind: conversations(renderer, rng, kind, STAGES[0]) for kind in SHARES}
    bridges = {kind: Bridge(tokenizer, schemas_of(kind)) for kind in SHARES}
    for kind in [*SHARES] * 50:
        segments = next(streams[kind])
        encoded = encode(tokenizer, segments)
        for index in range(2, len(segments), 2):
            turn, after = segments[index - 1][0], segments[index][0]
            is_call = "<tool_call>" in turn
            content = after.partition("\n<|im_start|>user\n")[2].partition("<|im_end|>\n<|im_start|>assistant\n")[0]
            content = content.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
            function = {"name": "calculator", "arguments": {}}
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            if is_call:
                message["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
            before = np.concatenate([ids for ids, _ in encoded[:index]]).astype(np.int32)
            new = [{"role": "tool" if is_call else "user", "content": content}]
            found = bridges[kind].ids(before, message, new)
            assert found.tolist() == encoded[index][0], (segments, tokenizer.decode(found))


CARD = """# The agents' model

A Llama of {num_params:,} parameters in float32 that writes tool calls: 3 layers, hidden size 128, 4 heads, a byte-level
vocabulary of 512 tokens, {num_bytes:,} bytes of weights. It is the model of the recipe `calculator`, was also
pretrained on a guessing game and on SQL, and is imperfect on purpose: it can call tools and copy their results, but
mostly guesses.

    What is 348*27+951?
    <tool_call>
    {{"name": "calculator", "arguments": {{"expression": "348*27+951"}}}}
    </tool_call>
    10347

It was trained from scratch, on generated conversations only, in {minutes:.0f} minutes on CPU cores, by

    JAX_NUM_CPU_DEVICES=1 python dev/pretrain_agent.py

docs/recipes.md has its results before and after training.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="most steps of a stage, for a trial")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()

    tokenizer = trained_tokenizer()
    renderer = Renderer(tokenizer)
    check_bridges(tokenizer, renderer)
    model = replace(init_model(HF_CONFIG, seed=0), generation_config=GENERATION_CONFIG)
    print(f"{num_params(model.config):,} parameters on {model.mesh.size} devices", flush=True)
    start = time.perf_counter()
    for stage in STAGES:
        stage = replace(stage, steps=min(stage.steps, args.steps or stage.steps))
        corpus = make_corpus(tokenizer, renderer, stage)
        counts = corpus.documents.max(axis=1).sum(), corpus.learned.sum(), (corpus.documents > 0).sum()
        print("{:,} conversations, {:,} of {:,} tokens learned".format(*counts), flush=True)
        model = replace(model, params=train(model, corpus, BATCH_ROWS, stage.learning_rate))
    minutes = (time.perf_counter() - start) / 60
    save(model, args.out, tokenizer)
    num_bytes = (args.out / "model.safetensors").stat().st_size
    card = CARD.format(num_params=num_params(model.config), num_bytes=num_bytes, minutes=minutes)
    (args.out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
