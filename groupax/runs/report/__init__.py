"""A report of a run, made of the files in its folder: `groupax report`. Imports no jax."""
