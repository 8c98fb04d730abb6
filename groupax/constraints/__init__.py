"""Constrained decoding: regular expressions and JSON schemas become automata over a tokenizer's tokens."""
