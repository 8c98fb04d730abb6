"""A program started as several processes: on this machine, under SLURM, on a Ray cluster. Imports no jax.

Each process gets its place in the environment, and the same words to run.
"""
