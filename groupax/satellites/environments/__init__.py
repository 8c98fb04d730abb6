"""Ready-made tools and environments: those of OpenEnv, verifiers and MCP servers, and a Python interpreter."""
