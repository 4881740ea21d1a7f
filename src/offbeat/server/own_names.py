"""Owns who a request may be for, and from which page: the names of this server, in the headers Host and Origin.

Rules kept here:
- A page of another site that makes its own name lead here (DNS rebinding) still says that name as Host. On loopback,
  and where names are given, no other Host is answered. The port does not matter: a tunnel may have its own.
- Beyond this machine, and where no names are given, every Host is answered: with --access, tokens and the certificate
  keep strangers out; with --insecure the page is not shown.
- An Origin must be the place that the request was sent to, port included, or have a name that an operator gave. What is
  no browser says none.
- Behind a proxy the name that it was called by counts, too (X-Forwarded-Host). Each of the names must be right: a
  client that invents one gains nothing.
"""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address

from aiohttp import web
from aiohttp.http import HttpVersion10

from offbeat.server.host_names import ANYWHERE, LOOPBACK, host_in, stands_for
from offbeat.server.refusals import Refusal
from offbeat.server.settings import ServerSettings

FORWARDED_HOST = "X-Forwarded-Host"
READING = ("GET", "HEAD", "OPTIONS")
SAME = ("same-origin", "none")
"""What a browser says in Sec-Fetch-Site of a request by our own page, or by its user."""
_host_in = lru_cache(1000)(host_in)


class OwnNames:
    def __init__(
        self, names: Iterable[str] | None = LOOPBACK, *, public: Iterable[str] = (), behind_proxy: bool = False
    ) -> None:
        """`names` of None accepts every Host; an Origin with one of the `public` names is accepted on every port."""
        self.public = tuple(public)
        self.names = None if names is None else (*dict.fromkeys((*LOOPBACK, *names, *self.public)),)
        self.behind_proxy = behind_proxy
        self._plain = frozenset(self.names or ())

    @classmethod
    def of(cls, limits: ServerSettings, certified: Iterable[str] = ()) -> "OwnNames":
        """The names of a server: those that its settings say, and those that its certificate is good for."""
        public, own = limits.public_names, [] if limits.host in ANYWHERE else [limits.host]
        known = [*own, *certified] if limits.private or public else None
        return cls(known, public=public, behind_proxy=limits.behind_proxy)

    def check(self, request: web.BaseRequest) -> None:
        """Refuse a request that was sent to another name, or by a page of another site."""
        called = self._called(request)
        if self.names is not None:
            for netloc in called:
                if not self._is_own(_host_in(netloc), request):
                    raise Refusal("wrong_host", f"this server is not called {netloc!r:.100}")
            if not called and request.version > HttpVersion10:
                raise Refusal("bad_request", "the request does not say for which Host it is")
        if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
            self._check_origin(request, called)

    def _called(self, request: web.BaseRequest) -> list[str]:
        """What the client calls this server: more than one name where a proxy or an absolute address says so."""
        called = request.headers.getall("Host", [])
        if self.behind_proxy:
            said = ",".join(request.headers.getall(FORWARDED_HOST, []))
            called = [*called, *(name.strip() for name in said.split(",") if name.strip())]
        return [*called, request.host] if called and request.host != called[0] else called

    def _is_own(self, host: str, request: web.BaseRequest) -> bool:
        if host in self._plain or any(stands_for(name, host) for name in self.names or ()):
            return True
        here = request.get_extra_info("sockname")
        return bool(host) and isinstance(here, tuple) and host == _address(str(here[0]))

    def _check_origin(self, request: web.BaseRequest, called: list[str]) -> None:
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        if site is not None and site not in SAME and request.method not in READING:
            raise Refusal("wrong_origin", "this came from a page of another site")
        if origin is None or (self.names is None and site in SAME):  # then the browser knows better than we do
            return
        if not self._is_own_origin(origin, called):
            raise Refusal("wrong_origin", f"this came from a page of another site: {origin!r:.100}")

    def _is_own_origin(self, origin: str, called: list[str]) -> bool:
        scheme, _, netloc = origin.lower().partition("://")
        if scheme not in ("http", "https") or not netloc:
            return False
        return netloc in map(str.lower, called) or any(stands_for(name, _host_in(netloc)) for name in self.public)


def _address(text: str) -> str:
    """An address of a socket; one of IPv4 on a socket for both is written as IPv4."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


OWN_NAMES = web.AppKey("own_names", OwnNames)
