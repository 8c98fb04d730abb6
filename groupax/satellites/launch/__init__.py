"""Launchers, which start a program as several processes: on this machine or under SLURM.

Each process runs the same command, and finds its index in the environment. Imports no jax.
"""
