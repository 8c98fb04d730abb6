"""GRPO and its relatives as pure functions."""
