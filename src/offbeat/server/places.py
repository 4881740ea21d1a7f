"""Owns how many of something there may be at a time, and how many of them one client may have.

Rules kept here:
- An identity is a token; where a request has none, or none was seen yet, an address. It may have a large part of all
  places, but not all of them: one client cannot use up what all share.
- Of IPv6 the network of 64 bits counts: one machine has all of its addresses.
- A proxy on this machine speaks for many clients, so it has no identity of its own.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address, ip_network

from offbeat.server.refusals import Refusal

RETRY_AFTER_S = 5.0
NETWORK_BITS = 64

Identity = str | None
"""Names a client in words; None is a proxy, which is no client."""


class Places:
    """Places of one kind; `each` is the most that one identity has."""

    def __init__(self, what: str, most: int, share: float = 1.0) -> None:
        self.what, self.most, self.each = what, most, max(1, int(most * share))
        self._taken: Counter[Identity] = Counter()
        self._all = 0

    def __len__(self) -> int:
        return self._all

    def of(self, identity: Identity) -> int:
        return self._taken[identity]

    def take(self, identity: Identity) -> None:
        """Take a place; refused where there is none, or none for this identity."""
        if self._all >= self.most:
            raise self._none(f"there are {self.what} from all clients as many as may be: {self.most}")
        if identity is not None and self._taken[identity] >= self.each:
            raise self._none(f"{identity} has {self.each} {self.what}, and more are not for one client alone")
        self._taken[identity] += 1
        self._all += 1

    def leave(self, identity: Identity) -> None:
        self._taken[identity] -= 1
        self._all -= 1
        if self._taken[identity] <= 0:
            del self._taken[identity]

    def move(self, identity: Identity, other: Identity) -> None:
        """It is known better by now whose place it is."""
        self.leave(identity)
        try:
            self.take(other)
        except Refusal:
            self._taken[identity] += 1
            self._all += 1
            raise

    @contextmanager
    def held(self, identity: Identity) -> Iterator[None]:
        self.take(identity)
        try:
            yield
        finally:
            self.leave(identity)

    def _none(self, message: str) -> Refusal:
        return Refusal("not_now", message, retry_after_s=RETRY_AFTER_S)


def identity_of_token(name: str) -> str:
    return f"the token {name!r}"


def identity_of_address(address: str) -> str:
    """Who comes from there.

    >>> identity_of_address("192.0.2.7"), identity_of_address("::ffff:192.0.2.7")
    ('the address 192.0.2.7', 'the address 192.0.2.7')
    >>> identity_of_address("2001:db8::17:1")
    'the network 2001:db8::/64'
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return f"the address {address[:60]}"
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if isinstance(found, IPv6Address) and not found.is_loopback:
        return f"the network {ip_network((found, NETWORK_BITS), strict=False)}"
    return f"the address {found}"
