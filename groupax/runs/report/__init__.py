"""A report of a run from the files in its folder: `groupax report`. Imports no jax."""
