"""Text that is safe to show on a terminal, and the panel that follows a run there."""
