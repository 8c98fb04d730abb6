"""The part of a model that sees images: from pixels to features in place of tokens."""
