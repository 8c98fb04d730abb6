"""Models: specs, one decoder, families, checkpoints."""
