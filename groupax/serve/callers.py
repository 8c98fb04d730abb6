"""Whose requests a server without keys answers: programs' and its own pages', not those of other web sites."""

import ipaddress
import socket
from collections.abc import Iterable, Mapping

from groupax.parallel.sockets import is_loopback
from groupax.serve.cross_origin import foreign_page, hostname


class Callers:
    """Tells requests of foreign web pages, which reach whatever the user's browser reaches, from others.

    * `Host` has to be an address, the loopback, a name of this machine (unless the server is bound to the loopback), or
      one of the allowed names. A page that reaches this server by DNS rebinding calls it by a name of its own.
    * A browser's request has to come from a page of the same origin.

    Args:
        host: where the server listens.
        allowed_hosts: further names.
    """

    def __init__(self, host: str, allowed_hosts: Iterable[str] = ()) -> None:
        self._is_local = is_loopback(host)
        own = [] if self._is_local else [host, socket.gethostname(), socket.getfqdn()]
        self._names = {name.lower().strip("[]") for name in (*own, *allowed_hosts)}

    def refusal_of(self, headers: Mapping[str, str]) -> str:
        """Returns why a request with these headers is refused; empty if it is not.

        Args:
            headers: by their names in lower case.
        """
        host = headers.get("host", "")
        name = hostname(host)
        if not (is_loopback(name) or name in self._names or (not self._is_local and _is_address(name))):
            return (
                f"the host {host[:200]!a} is no name of this server, which has no keys; call it by its address, or "
                "start it with --allowed_hosts or --api_key"
            )
        return foreign_page(headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
