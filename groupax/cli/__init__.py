"""The commands of groupax, one module for each group of them."""
