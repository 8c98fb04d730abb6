"""Where a run is told of beside its folder: Weights & Biases, TensorBoard, Trackio, a file of JSON lines. Imports no
jax."""
