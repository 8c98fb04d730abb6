"""The web page of `groupax view`, which shows run folders. Imports no jax."""
