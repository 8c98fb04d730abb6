"""Tools that a model calls: Python functions with a JSON schema, parsing of calls, and running them."""
