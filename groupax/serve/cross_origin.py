"""Recognizes requests that a page of another site makes through the user's browser.

Every page in the user's browser can reach a server on the loopback: a form or a script of any site may post to it, and
a name of that site which suddenly resolves to 127.0.0.1 (DNS rebinding) lets the page read the responses too. Both show
in what browsers send: `Host` has the name, `Origin` and `Sec-Fetch-Site` have the site.
"""

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from groupax.parallel.processes import is_loopback


class CallerCheck:
    """Refuses requests of other sites' pages to a server without keys.

    * `Host` must be an address, the loopback, a name of this machine (unless the server is bound to the loopback), or
      one of the allowed names. A page that reaches this server by DNS rebinding uses a name of its own.
    * A browser's request must come from a page of the same origin.

    Args:
        host: Address or name that the server listens on.
        allowed_hosts: Further names.
    """

    def __init__(self, host: str, allowed_hosts: Iterable[str] = ()) -> None:
        self._is_local = is_loopback(host)
        own = [] if self._is_local else [host, socket.gethostname(), socket.getfqdn()]
        self._names = {name.lower().strip("[]") for name in (*own, *allowed_hosts)}

    def refusal(self, headers: Mapping[str, str]) -> str:
        """Returns why a request with these headers (names in lower case) is refused; empty if it is not."""
        host = headers.get("host", "")
        name = hostname(host)
        if not (is_loopback(name) or name in self._names or (not self._is_local and _is_address(name))):
            return (
                f"the host {host[:200]!a} is not a name of this server, which has no keys; use its address, or start "
                "it with --allowed_hosts or --api_key"
            )
        return foreign_page(headers)


def hostname(host: str) -> str:
    """Returns the name or the address in a `Host` header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def foreign_page(headers: Mapping[str, str], may_be_linked: bool = False) -> str:
    """Returns why a request is attributed to another site's page; empty if it is not.

    Args:
        headers: Headers of the request, with names in lower case.
        may_be_linked: Whether other sites may link to this address.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"requests of another origin ({origin[:200]!a}) are refused"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        follows_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if not (follows_link and may_be_linked):
            return "requests of other sites are refused"
    return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
