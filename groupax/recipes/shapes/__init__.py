"""The recipe for models that see images, with an embedded model: a small model learns to count shapes."""
