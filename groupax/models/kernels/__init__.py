"""Kernels for accelerators, imported where one of them is used."""
