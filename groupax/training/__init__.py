"""The optimizer step: batches of rows, packing, gradients, updates."""
