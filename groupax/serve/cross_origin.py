"""Recognizes requests that a page of another site makes through the user's browser.

Imports nothing of groupax.

A server on the loopback is reached by every page that the user's browser shows: a form or a script of any site may post
to it, and a name of that site which suddenly resolves to 127.0.0.1 (DNS rebinding) lets the page read the answers too.
Both are seen in what browsers send: `Host` has the name, `Origin` and `Sec-Fetch-Site` have the site.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit


def hostname(host: str) -> str:
    """Returns the name or the address in a `Host` header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def foreign_page(headers: Mapping[str, str], may_be_linked: bool = False) -> str:
    """Returns why a request is taken for that of another site's page; empty if it is not.

    Args:
        headers: by their names in lower case.
        may_be_linked: following a link of another site to this address is allowed.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"requests of another origin ({origin[:200]!a}) are refused"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        follows_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if not (follows_link and may_be_linked):
            return "requests of other sites are refused"
    return ""
