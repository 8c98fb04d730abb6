"""Where servers of this program listen, and who reaches them there. Imports nothing of groupax."""

import socket

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_PORT = 65535


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: a name or an address, of IPv4 or IPv6.
        port: 0 takes a free one.

    Raises:
        ValueError: that is not possible, as when the port is taken.
    """
    try:
        if not 0 <= port <= LAST_PORT:
            raise OSError(f"ports are numbers from 0 to {LAST_PORT}")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"{host}, port {port}, cannot be listened at ({error}); choose another --host or --port"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to it."""
    return host in LOOPBACK
