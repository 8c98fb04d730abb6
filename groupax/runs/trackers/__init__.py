"""Services that record a run: Weights & Biases, TensorBoard, Trackio. Imports no jax."""
