"""Constraints on completions, which the library llguidance keeps. Imports no jax.

regex, JSON schema ──► grammar ──► matcher of each completion ──► the tokens that may follow, after each token
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Row
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import numpy as np

from groupax.core.errors import require
from groupax.engine.sequence import Sequence

MAX_CHARACTERS = 1 << 16  # of a constraint
MAX_COMPILED = 64
MAX_MULTIPLE = 10_000  # number of states of multipleOf, without its decimal point
MAX_COMBINED_PATTERNS = 4  # the library's time and memory are exponential in their number
# Of compilation and of a step, which then take milliseconds; the library's own are 5 to 12 times as high.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Every tokenizer must spell this text.
_SAMPLE = '{"a b": [1, -2.5e3, true],  "é": "\\n \u20ac\U0001f600"}'
# All tokens that may follow, not only those that the tokenizer itself would write.
HEADER = '%llguidance {"no_forcing": true}\n'
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ESCAPE, _CLASS = re.compile(r"\\.", re.DOTALL), re.compile(r"\[(\^?\]?[^\]]*)\]")

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_ANNOTATIONS = {
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "definitions",
    "deprecated", "description", "discriminator", "example", "examples", "id", "readOnly", "title", "writeOnly",
}  # fmt: skip


class ConstraintCompiler:
    """Compiles the constraints of one model, and keeps those last used. Safe in any thread.

    Args:
        tokenizer: The model's tokenizer; None refuses constraints.
        vocab_size: Number of the model's tokens.
        eos_ids: Tokens that end a completion.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.tokenizer, self.vocab_size, self.eos_ids = tokenizer, vocab_size, eos_ids
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock, self._tokens_lock = threading.Lock(), threading.Lock()
        self._tokens: Any = None
        self._executor: Any = None

    def matcher(self, kind: str, text: str) -> Any:
        """Returns a new `llguidance.LLMatcher` of a constraint, before its first token.

        Args:
            kind: "regex", "json_schema" or "grammar".
            text: The expression, the schema as JSON, or the grammar.

        Raises:
            ValueError: The constraint cannot be kept, is too large, or has no completion, or there is no tokenizer.
            MissingPackageError: llguidance is not installed.
        """
        key = kind, text
        with self._lock:
            compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(kind, text)
        with self._lock:
            compiled = self._compiled.setdefault(key, compiled)
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def load_tokens(self) -> Any:
        """Returns the vocabulary as llguidance has it, which takes about a second for 150,000 tokens, once."""
        with self._tokens_lock:
            if self._tokens is None:
                if self.tokenizer is None:
                    raise ValueError("a constraint needs a tokenizer; give the Engine one")
                if not self.eos_ids:
                    raise ValueError("a constraint needs an end-of-sequence token; the model has none")
                self._executor = _llguidance().LLExecutor()
                self._tokens = _vocabulary(self.tokenizer, self.vocab_size, self.eos_ids)
            return self._tokens

    def _compile(self, kind: str, text: str) -> Any:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{kind} has {len(text):,} characters, more than {MAX_CHARACTERS:,}; simplify it")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{kind} has half of a surrogate pair, which is not a text")
        tokens, library = self.load_tokens(), _llguidance()
        grammar = text
        if kind != "grammar":
            body = f"%json {_json_rule(text)}" if kind == "json_schema" else f"/(?:{_regex_rule(text)})/"
            grammar = f"{HEADER}start: {body}"
        limits = library.LLParserLimits(**LIMITS)
        compiled = library.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        first = compiled.deep_copy()
        if not (fault := fault_of(first)):
            self.masks([(first, 0)], 1)
            fault = fault_of(first)
        if fault:
            raise ValueError(f"{kind} is not supported: {fault}")
        return compiled

    def masks(self, matchers: list[tuple[Any, int]], num_rows: int) -> np.ndarray:
        """Returns a bit for each token, 1 where it may follow, in words: [B, W] int32. Without a matcher all may.

        Args:
            matchers: Matchers with the row of each; afterwards `fault_of` tells which cannot go on.
            num_rows: Number of rows B.
        """
        words = np.full((num_rows, -(-self.vocab_size // 32)), -1, np.int32)
        if matchers:
            from llguidance.numpy import fill_next_token_bitmask_par

            fill_next_token_bitmask_par(self._executor, matchers, words)
        return words

    def next_masks(self, slots: Row[Sequence | None]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the masks of the sequences in all slots, [B, W] and [B] (see `rules.TokenMasks`).

        Sequences whose constraint cannot go on are aborted.
        """
        constrained = [row for row, each in enumerate(slots) if each is not None and each.matcher is not None]
        own = [(row, each) for row in constrained if (each := slots[row]) and each.finish_reason is None]
        words = self.masks([(each.matcher, row) for row, each in own], len(slots))
        for _, each in own:
            if fault := fault_of(each.matcher):
                each.finish_reason, each.fault = "abort", f"the constraint cannot be kept any longer: {fault}"
        return words, np.isin(np.arange(len(slots)), constrained)


def fault_of(matcher: Any) -> str:
    """Returns why a matcher cannot go on; nothing if it can, or has ended as its constraint allows."""
    nothing = "no text satisfies it that the tokens of the vocabulary spell"
    if matcher.is_error():
        reason, *rest = matcher.get_error().split("\n")
        reason = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", reason)
        if "coerce_one_of" in reason:
            return "oneOf is supported only where no value can satisfy two of its schemas; use anyOf"
        found = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
        return nothing if reason.startswith("NoExtension") else " ".join([reason, *found])
    if matcher.is_stopped() and matcher.stop_reason() not in ("EndOfSentence", "NoExtension", "NoExtensionBias"):
        return f"it became too complex ({matcher.stop_reason()})"
    return "" if not matcher.is_stopped() or matcher.is_accepting() else nothing


def _regex_rule(text: str) -> str:
    """Returns an expression in Rust's syntax that matches what Python's does, as a whole and with ASCII classes."""
    plain = _ESCAPE.sub("_", text)
    if any(re.search(r"\[|&&|--|~~", body) for body in _CLASS.findall(plain)):
        raise ValueError("regex has [, &&, -- or ~~ in a class, which Rust takes for operations on sets; escape them")
    if re.search(r"[*+?}]\+", _CLASS.sub("_", plain)):
        raise ValueError("regex has a possessive quantifier, which is not supported")
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regex is not valid: {error}") from error
    text = text.removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$\Z", text):
        text = text[:-1]
    return _llguidance().regex_to_lark(text, "dws")


def _json_rule(text: str) -> str:
    """Returns a schema for llguidance, which keeps all of its rules.

    Additional properties are allowed only where `additionalProperties` says so, or where no property is named.
    """
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
        root = {} if root is True else root
        parts = list(_subschemas(root))
        for part in parts:
            if part.get("uniqueItems") is False:
                del part["uniqueItems"]
            if isinstance(part.get("$ref"), str):
                part["$ref"] = quote(part["$ref"], safe="%#/?:@!$&'()*+,;=~")
            _check(part)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"json_schema is not JSON, or nested too deeply: {error}") from error
    if root is False:
        raise ValueError("json_schema allows no document")
    if not any(map(_combines, parts)):
        for part in parts:
            if "properties" in part and _may_close(part):
                part["additionalProperties"] = False
    else:
        num_patterns = sum(keyword in part for part in parts for keyword in ("pattern", "format"))
        num_multiples = sum("multipleOf" in part for part in parts)
        if num_patterns > MAX_COMBINED_PATTERNS or num_multiples > 1:
            raise ValueError(
                f"json_schema combines schemas (by allOf, or by rules next to $ref, anyOf or oneOf) and has "
                f"{num_patterns} of pattern and format, and {num_multiples} of multipleOf; then "
                f"{MAX_COMBINED_PATTERNS} and 1 are supported"
            )
    return json.dumps({**root, "x-guidance": _SPACING})


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and those within it, without booleans."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object or a boolean, got {schema!r:.80}")
    yield schema
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            parts = list(value.values())
        elif keyword in _LISTS and isinstance(value, list):
            parts = value
        else:
            parts = [value] if keyword in _SINGLE else []
        for part in parts:
            yield from _subschemas(part)


def _check(schema: dict[str, Any]) -> None:
    """Raises a ValueError for rules that llguidance keeps by approximation only, or compiles slowly."""
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not isinstance(multiple, bool):
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > MAX_MULTIPLE or len(str(abs(multiple))) > 16:
            raise ValueError(f"json_schema has a multipleOf of {multiple!r:.80}; at most {MAX_MULTIPLE:,} is supported")
    if schema.get("minProperties", 0) not in (0, 1):
        raise ValueError("json_schema has a minProperties above 1, which is not supported; name them as required")


def _combines(schema: dict[str, Any]) -> bool:
    """Returns whether a value must satisfy several schemas at once."""
    applied = [keyword for keyword in _APPLICATORS if keyword in schema]
    parts = schema.get("allOf", ())
    rules = schema.keys() - _ANNOTATIONS - {"type", *applied}
    return len(applied) > 1 or bool(applied and rules) or (isinstance(parts, list) and len(parts) > 1)


def _may_close(schema: dict[str, Any]) -> bool:
    required = schema.get("required", [])
    is_open = {"additionalProperties", "patternProperties", "minProperties", *_APPLICATORS} & schema.keys()
    named = schema["properties"]
    return not is_open and bool(named) and isinstance(required, list) and all(each in named for each in required)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"json_schema has {name}, which is not a number of JSON")


def _vocabulary(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """Returns a model's vocabulary as an `llguidance.LLTokenizer`.

    Raises:
        ValueError: Its tokens do not spell the text that they are decoded to, as with WordPiece.
    """
    _llguidance()
    from llguidance.hf import from_tokenizer

    try:
        tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
        ids = [
            index
            for index in tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
            if index != tokenizer.unk_token_id
        ]
        spelled, decoded = tokens.decode_bytes(ids), tokenizer.decode(ids, clean_up_tokenization_spaces=False).encode()
    except ValueError as error:
        raise ValueError(f"this tokenizer cannot be used with regex or json_schema: {error}") from error
    if spelled.lstrip(b" ") != decoded.lstrip(b" "):
        raise ValueError(
            f"this tokenizer cannot be used with regex or json_schema: its tokens spell {spelled!r}, and it decodes "
            f"them to {decoded!r}"
        )
    return tokens


def _llguidance() -> Any:
    require("constraints", "a constraint on completions")
    import llguidance

    return llguidance
