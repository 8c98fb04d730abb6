"""Ready-made tools and environments: those of OpenEnv and MCP servers, programs, and a Python interpreter."""
