"""An MCP server: `python mcp_server.py stdio|PORT`, with the library mcp in either major version."""

import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # version 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("calculator")
counts = []


@server.tool()
def multiply(a: int, b: int) -> str:
    """Multiplies two integers."""
    return str(a * b)


@server.tool()
def count() -> str:
    """Counts its calls."""
    counts.append(1)
    return str(len(counts))


@server.tool()
def fail(reason: str) -> str:
    """Fails in several ways."""
    if reason == "die":
        os._exit(1)
    if reason == "hang":
        time.sleep(100)
    raise ValueError(reason)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        import uvicorn

        uvicorn.run(server.streamable_http_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
