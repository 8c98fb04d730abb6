"""Metrics of completions and their confidence intervals."""
