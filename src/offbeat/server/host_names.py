"""Owns how the name of a host is written: in a setting, in the headers Host and Origin, in a certificate.

Rules kept here:
- Two spellings of one name are one name: small letters, no dot at the end, an address in its shortest form.
- A name that begins with `*.` stands for every name with one label in its place, as in a certificate.
"""

import re
from ipaddress import ip_address

from offbeat.errors import InvalidValue

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 (compared with, not bound to)
NAME_MAX = 253
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.ASCII)
_NETLOC = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]+)(:[0-9]{1,5})?", re.ASCII)


def host_in(netloc: str) -> str:
    """The host of `host:port`, as Host and Origin have it; empty where it is none.

    >>> host_in("LocalHost.:7733"), host_in("[0:0::1]:80"), host_in("fl.example.org"), host_in("a b")
    ('localhost', '::1', 'fl.example.org', '')
    """
    found = _NETLOC.fullmatch(netloc)
    return _plain(found[1]) if found and len(netloc) <= NAME_MAX + 10 else ""


def names_in(setting: str) -> tuple[str, ...]:
    """The names in a setting, separated by commas.

    >>> names_in("fl.example.org, 192.0.2.7")
    ('fl.example.org', '192.0.2.7')
    """
    texts = [text.strip() for text in setting.split(",")] if setting.strip() else []
    return tuple(dict.fromkeys(map(_named, texts)))


def stands_for(name: str, host: str) -> bool:
    """Is this host called so?

    >>> stands_for("*.example.org", "fl.example.org"), stands_for("*.example.org", "a.b.example.org")
    (True, False)
    """
    if name.startswith("*."):
        return host.partition(".")[2] == name[2:] and not host.startswith(".")
    return name == host


def _named(text: str) -> str:
    try:
        name = _plain(text).encode("idna").decode() if ":" not in text else _plain(text)
    except UnicodeError:
        name = ""
    if len(name) > NAME_MAX or not (_NAME.fullmatch(name) or _is_address(name)):
        raise InvalidValue(
            f"public_name holds {text!r:.100}; give names or addresses of this server, separated by commas, "
            "without https:// and without a port: fl.example.org,192.0.2.7"
        )
    return name


def _plain(host: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return str(ip_address(bare)) if _is_address(bare) else bare.lower().removesuffix(".")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
