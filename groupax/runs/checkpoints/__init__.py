"""Checkpoints: everything that the next step of a run depends on, written whole or not at all."""
