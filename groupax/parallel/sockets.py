"""The sockets of groupax's servers. Imports nothing of groupax."""

import ipaddress
import socket

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_PORT = 65535


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: Name, IPv4 address or IPv6 address.
        port: Port number, or 0 for a free port.

    Raises:
        ValueError: The address cannot be used; its port may be taken.
    """
    try:
        if not 0 <= port <= LAST_PORT:
            raise OSError(f"ports are numbers from 0 to {LAST_PORT}")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port} ({error}); choose another --host or --port") from error


def is_loopback(host: str) -> bool:
    """Returns whether a server bound to this host is reachable from this machine only."""
    return host in LOOPBACK


def own_address(host: str) -> str | None:
    """Returns this machine's address for clients that know it as `host`, or None if there is no such address.

    A service bound to this address is reachable through a single network. With None the service has to listen on all
    addresses: `host` may be a router in front of this machine, or resolve to the loopback here, as a machine's own name
    does in Debian's /etc/hosts.

    Args:
        host: Name, IPv4 address or IPv6 address.
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, address in found:
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            continue
        with socket.socket(family, kind) as tried:
            try:
                tried.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return str(address[0])
    return None
