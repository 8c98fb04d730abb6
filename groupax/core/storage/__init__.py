"""Folders of models and runs: on disk, in buckets and on the Hugging Face Hub."""
