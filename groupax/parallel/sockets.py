"""Where servers of this program listen, and who reaches them there. Imports nothing of groupax."""

import ipaddress
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


def own_address(host: str) -> str | None:
    """Returns the address of this machine at which others that know it as `host` reach it.

    A service that is bound to this address is reached through one network only. The result is None when there is no
    such address, and the service has to listen at all of them: the name belongs to a router in front of this machine,
    or stands for the loopback here, as the machine's own name does in Debian's /etc/hosts.

    Args:
        host: a name or an address, of IPv4 or IPv6.
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
