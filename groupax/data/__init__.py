"""Prompts: rows of datasets, chat templates and tokenizers."""
