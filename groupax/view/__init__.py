"""The web page of runs: `groupax view`. Reads run folders and nothing else. Imports no jax."""
