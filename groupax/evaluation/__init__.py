"""Evaluation on held-out prompts: estimates with intervals, records per item, and paired comparisons of two models."""
