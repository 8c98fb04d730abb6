"""Reward functions: their contract, and those built in."""
