"""Owns the words for a server that speaks http where https was asked for, or the reverse.

Rules kept here:
- It is said only where it is certain: the server says so itself, or it answers in the other language when it is asked.
  So a server that is just being restarted is not taken for one of the other kind.
- What is asked with carries no token and nothing of the worker.
"""

import ssl
from socket import create_connection
from time import monotonic

import h11

from offbeat.worker.api_answers import Unreachable
from offbeat.worker.settings import Address

WORD = "wrong_scheme"
"""The refusal of an Offbeat server."""
OF_PROXIES = (b"plain HTTP request was sent to HTTPS port", b"speaking plain HTTP to an SSL-enabled server port")
"""What nginx and Apache say."""
NO_ANSWERS = ("400", "426")
"""What servers that speak TLS say to http."""
BEGINNING = 64
"""Bytes in which an answer says its status."""
PROBE_S = 5.0


class WrongScheme(Unreachable):
    """The server speaks http where https was asked for, or the reverse; only another address helps."""


def wrong_scheme(address: Address) -> WrongScheme:
    """The error, with the address that would be right."""
    right = Address(address.host, address.port, not address.tls, address.prefix)
    if address.tls:
        said = f"the server at {address.netloc} speaks http, not https: use {right}, or start the server with --access"
    else:
        said = f"the server at {address.netloc} speaks https, not http: use {right}, with --ca where it has its own CA"
    return WrongScheme(said)


def is_other_scheme(address: Address, error: BaseException, until: float) -> bool:
    """Is this why there was no answer? Asks the server, where it may be."""
    until = min(until, monotonic() + PROBE_S)
    if until <= monotonic():
        return False
    if address.tls:
        about_tls = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLCertVerificationError)
        return about_tls and _answers_http(address, until)
    hung_up = isinstance(error, ConnectionResetError | BrokenPipeError | h11.RemoteProtocolError)
    return hung_up and _answers_tls(address, until)


def _answers_http(address: Address, until: float) -> bool:
    ask = f"GET {address.prefix}/v1/health HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n"
    try:
        with create_connection((address.host, address.port), until - monotonic()) as sock:
            sock.sendall(ask.encode())
            words = sock.recv(BEGINNING).decode("latin-1").split()
    except OSError:
        return False
    return len(words) > 1 and words[0].startswith("HTTP/") and words[1] not in NO_ANSWERS


def _answers_tls(address: Address, until: float) -> bool:
    """Whatever its certificate: nothing is sent to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with create_connection((address.host, address.port), until - monotonic()) as sock:
            context.wrap_socket(sock, server_hostname=address.host).close()
    except OSError:
        return False
    return True
