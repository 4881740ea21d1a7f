"""Owns which of a proxy's headers about the client are believed.

Rules kept here:
- Only a proxy on this machine is believed, and only where the settings say that there is one: else every client could
  claim any address.
- Of several addresses the last counts, which that proxy added itself; those before it were told to it.
"""

from ipaddress import ip_address

from aiohttp import web

FORWARDED_FOR = "X-Forwarded-For"
FORWARDED_PROTO = "X-Forwarded-Proto"


def address_of(request: web.Request, *, behind_proxy: bool) -> str:
    """The address of the client."""
    remote = request.remote or ""
    if not (behind_proxy and _is_loopback(remote)):
        return remote
    said = ",".join(request.headers.getall(FORWARDED_FOR, [])).rpartition(",")[2].strip()
    return said if _is_address(said) else remote


def over_tls(request: web.Request) -> bool:
    """Does the client speak TLS, if only to a proxy? A client that lies harms only itself, so all are believed."""
    return request.secure or request.headers.get(FORWARDED_PROTO, "").lower() == "https"


def _is_loopback(text: str) -> bool:
    return _is_address(text) and ip_address(text).is_loopback


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
