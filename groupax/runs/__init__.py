"""A run's folder, logs, checkpoints, trackers and reports."""
