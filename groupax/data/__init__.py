"""Datasets, prompts, chat templates and tokenizers."""
