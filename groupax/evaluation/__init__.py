"""How well a model does on held-out prompts: estimates with intervals, per item, and two models on the same items."""
