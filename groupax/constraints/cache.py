"""The automata of the constraints that a model was last used with. Imports no jax."""

import threading
from collections import OrderedDict
from typing import Any

from groupax.constraints.byte_automaton import compile_regex
from groupax.constraints.json_schema import regex_of_schema
from groupax.constraints.token_automaton import TokenAutomaton, TokenTrie, token_automaton
from groupax.constraints.token_bytes import token_bytes

MAX_AUTOMATA = 64


class AutomatonCache:
    """Compiles constraints for one model and keeps the automata. Safe in any thread.

    Args:
        tokenizer: The model's tokenizer; None refuses constraints.
        vocab_size: Number of the model's tokens.
        eos_ids: Tokens that end a completion.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.tokenizer, self.vocab_size, self.eos_ids = tokenizer, vocab_size, eos_ids
        self._automata: OrderedDict[tuple[str, str], TokenAutomaton] = OrderedDict()
        self._lock = threading.Lock()
        self._trie: TokenTrie | None = None
        self._trie_lock = threading.Lock()

    def get(self, kind: str, text: str, max_tokens: int) -> TokenAutomaton:
        """Returns the automaton of a constraint.

        Args:
            kind: "regex" or "json_schema".
            text: The expression or the schema.
            max_tokens: Longest completion.

        Raises:
            ValueError: The constraint cannot be compiled, no completion of this length satisfies it, or there is no
                tokenizer.
        """
        key = kind, text
        with self._lock:
            automaton = self._automata.get(key)
        if automaton is None:
            regex = text if kind == "regex" else regex_of_schema(text)
            try:
                automaton = token_automaton(compile_regex(regex), self._tokens(), self.eos_ids)
            except ValueError as error:
                raise ValueError(f"{kind}: {error}") from error
        with self._lock:
            automaton = self._automata.setdefault(key, automaton)
            self._automata.move_to_end(key)
            while len(self._automata) > MAX_AUTOMATA:
                self._automata.popitem(last=False)
        if max_tokens < automaton.min_tokens:
            raise ValueError(
                f"max_tokens is {max_tokens}, and the shortest completion that {kind} allows has "
                f"{automaton.min_tokens} tokens, its end-of-sequence token included; raise max_tokens"
            )
        return automaton

    def _tokens(self) -> TokenTrie:
        with self._trie_lock:
            if self._trie is None:
                if self.tokenizer is None:
                    raise ValueError("a constraint needs a tokenizer; give the Engine one")
                self._trie = TokenTrie(token_bytes(self.tokenizer, self.vocab_size))
            return self._trie
