"""Text that is safe to print on a terminal, and a live panel below it."""
