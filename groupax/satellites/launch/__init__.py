"""Launchers, which start a program as several processes: on this machine, under SLURM, on a Ray cluster.

Each process runs the same command, and finds its index in the environment. Imports no jax.
"""
