"""Recipes of agents, with an embedded model that can write tool calls: a calculator, a guessing game and SQL."""
