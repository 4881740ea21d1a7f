"""Owns the settings of a worker: the same names on the command line, in the environment and in Python.

Rules kept here:
- A wrong value is refused here, before anything is connected, written or trained.
- A token does not go over a network in the clear unless the user insists.
"""

import os
import ssl
from dataclasses import dataclass, field
from ipaddress import ip_address
from math import inf, isfinite
from pathlib import Path
from re import fullmatch
from urllib.parse import urlsplit

from offbeat.errors import InvalidValue

TOKEN = "OFFBEAT_TOKEN"  # noqa: S105 (the name of an environment variable)
TOKEN_MAX = 1000
VISIBLE = r"[!-~]{1,%d}"
NICE_MAX = 19
THREADS_MAX = 1024


def _within(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidValue(f"{name} is {value} but must lie in {low}..{high}")


def _positive(name: str, seconds: float) -> None:
    if not (isfinite(seconds) and seconds > 0):
        raise InvalidValue(f"{name} is {seconds} but must be a number of seconds > 0")


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    tls: bool
    prefix: str = ""
    """The beginning of all the server's paths."""

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def of(cls, url: str) -> "Address":
        """The address in a URL.

        >>> Address.of("https://fl.example/offbeat/")
        Address(host='fl.example', port=443, tls=True, prefix='/offbeat')
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidValue(f"server is {url!r}: {error}; write it as https://HOST:PORT") from None
        plain = fullmatch(VISIBLE % 2000, url) and not (parts.query or parts.fragment or parts.username)
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
            raise InvalidValue(f"server is {url!r}; write it as https://HOST:PORT, or http://127.0.0.1:PORT")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each part of a request may take, in seconds."""

    connect_s: float = 10.0
    answer_s: float = 30.0
    """For an answer, once the request was sent; a long poll has its own time on top."""
    continue_s: float = 10.0
    """After which an update is sent although the server has not said that it wants it: some proxies never do."""
    piece_s: float = 120.0
    """For a piece of 1 MB, in either direction."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    server: str
    token: str | None = field(default=None, repr=False)
    ca: Path | None = None
    """Certificate of the authority that signed the server's; None for those that the system trusts."""
    insecure: bool = False
    """Send the token to another machine although the connection is not encrypted."""
    device: int | None = None
    name: str | None = None
    folder: Path | None = None
    """Where finished updates are kept until the server has them."""
    only_when: str = ""
    gate: str | None = None
    threads: int | None = None
    nice: int = 0
    journal: Path | None = None
    give_up_after: float | None = None
    """Seconds without an answer from the server after which the worker ends; None is never."""
    failures_max: int = 5
    """Trainings in a row that may fail before the worker gives up."""
    at_least_s: float = 0.0
    """A task takes at least this long: to try slow devices."""
    eligible_every_s: float = 5.0
    """How often a device that may not train is asked again."""
    stop_s: float = 5.0
    """How long a worker that is told to stop may take to push what is finished."""
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        _within("device", self.device, 0, 2**53)
        _within("threads", self.threads, 1, THREADS_MAX)
        _within("nice", self.nice, 0, NICE_MAX)
        _within("failures_max", self.failures_max, 1, 2**31)
        if not 0 <= self.at_least_s < inf:
            raise InvalidValue(f"at_least_s is {self.at_least_s!r} but must be a number of seconds >= 0")
        if self.give_up_after is not None:
            _positive("give_up_after", self.give_up_after)
        _positive("eligible_every_s", self.eligible_every_s)
        _positive("stop_s", self.stop_s)
        if self.name is not None and not fullmatch(VISIBLE % 100, self.name):
            raise InvalidValue(f"name is {self.name!r} but must be 1..100 letters, digits or signs, without spaces")
        if self.token is not None and not fullmatch(VISIBLE % TOKEN_MAX, self.token):
            raise InvalidValue("the token is empty or has odd characters; copy it again, or make a new one")
        self._check_server()

    def _check_server(self) -> None:
        address = self.address
        if self.ca is not None and not address.tls:
            raise InvalidValue(f"ca is for https, but server is {self.server}; leave it out, or use https://")
        if self.token and not (address.tls or address.loopback or self.insecure):
            raise InvalidValue(f"{self.server} would send the token in the clear; use https://, or insist: --insecure")

    @property
    def address(self) -> Address:
        return Address.of(self.server)

    def context(self) -> ssl.SSLContext | None:
        """Whom to trust; None without TLS."""
        return trusted(self.ca) if self.address.tls else None


def trusted(ca: Path | None) -> ssl.SSLContext:
    """Trust servers with a certificate from this authority; without one, from those that the system trusts."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidValue(f"ca {ca} cannot be read: {error.strerror or error}; give a PEM file") from None


def token_of(flag: str | None, file: Path | None) -> str | None:
    """The token from the flag, else from the file, else from the environment."""
    if flag is not None and file is not None:
        raise InvalidValue("--token and --token-file are both given; use one")
    if file is None:
        return flag if flag is not None else os.environ.get(TOKEN) or None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InvalidValue(f"cannot read the token from {file}: {why}") from None
