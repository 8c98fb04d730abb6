"""The embedded default recipe: a small model learns to reason its way through arithmetic."""
