"""The recipe of an agent, with an embedded model that can write tool calls."""
