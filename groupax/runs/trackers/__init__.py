"""Services that record a run: Weights & Biases, TensorBoard, Trackio, JSON lines. Imports no jax."""
