"""Devices: jax's settings and the mesh."""
