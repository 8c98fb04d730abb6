"""Weights on disk and in memory: loading, saving and quantization."""
