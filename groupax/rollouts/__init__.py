"""The collection of rollouts: prompts in, scored completions out."""
