"""The default recipe, with an embedded model: a small model learns arithmetic by reasoning."""
