"""Owns the server's TLS: a certificate authority of its own, a server certificate, and the context that uses it.

Rules kept here:
- Workers trust one file, ca.pem, and nothing else. It is made once; the server's certificate is renewed from it.
- A private key is readable by its owner alone, and never leaves the folder.
- Only making certificates needs `cryptography`; using them does not.
"""

import re
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.server.access import locked, write_private
from offbeat.server.tls_words import WordsContext
from offbeat.storage.disk import aside, cannot_write

with suppress(ImportError):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_CERT, CA_KEY = "ca.pem", "ca.key"
SERVER_CERT, SERVER_KEY = "server.pem", "server.key"
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Hosts that every server certificate is good for."""
DAYS = 825
"""Validity of a server's certificate: some systems take none that is longer."""
CA_DAYS = 3650
EARLY = timedelta(hours=1)
"""Valid from a little before now: the clock of a worker may be behind."""
DNS_MAX = 253

_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_DNS = re.compile(rf"({_LABEL}\.)*(?![0-9]+$){_LABEL}", re.ASCII)  # all digits at the end: a mistyped address
_USES = ("digital_signature", "content_commitment", "key_cert_sign", "crl_sign")
_NEVER = ("key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")


class Issued(NamedTuple):
    """What a server's certificate is good for, and until when."""

    hosts: tuple[str, ...]
    until: datetime


class _Ca(NamedTuple):
    cert: "x509.Certificate"
    key: "ec.EllipticCurvePrivateKey"


def make(folder: Path, hosts: Sequence[str]) -> Issued:
    """A new certificate authority in `folder`, and a server certificate for these hosts and this machine."""
    _refuse_missing()
    names = _names(hosts)
    with locked(_folder(folder)):
        if (folder / CA_CERT).exists() or (folder / CA_KEY).exists():
            raise InvalidValue(f"{folder} has a CA already; renew what it signed with: offbeat init {folder} --renew")
        ca = _new_ca()
        write_private(folder / CA_KEY, _pem(ca.key))
        _write(folder / CA_CERT, ca.cert)
        return _issue(folder, ca, names)


def renew(folder: Path, hosts: Sequence[str] = ()) -> Issued:
    """A new server certificate and key from the CA in `folder`; for the same hosts as before if none are given."""
    _refuse_missing()
    names = _names(hosts or read(folder).hosts)
    ca = _load_ca(folder)
    with locked(folder):
        return _issue(folder, ca, names)


def read(folder: Path) -> Issued:
    _refuse_missing()
    cert = _load(folder / SERVER_CERT, "renew it with --host NAME")
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise InvalidValue(f"{folder / SERVER_CERT} names no hosts; renew it with --host NAME") from error
    return Issued(tuple(str(name.value) for name in names), cert.not_valid_after_utc)


def names_of(folder: Path) -> tuple[str, ...]:
    """The hosts that the server's certificate is good for; none where they cannot be read."""
    with suppress(OffbeatError):
        return tuple(host.lower() for host in read(folder).hosts)
    return ()


def server_context(folder: Path) -> ssl.SSLContext:
    """TLS for the server: with what `make` made, or with a certificate (and its chain) and a key in their place."""
    cert, key = folder / SERVER_CERT, folder / SERVER_KEY
    context = WordsContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=str)  # "": a key with a pass phrase is refused, not asked for
    except OSError as error:
        raise InvalidValue(
            f"cannot use {cert} with {key}: {_why(error)}; "
            "they must be a PEM certificate and its own key, without a pass phrase"
        ) from error
    return context


# --- hosts -----------------------------------------------------------------------------------------------------------


def _names(hosts: Iterable[str]) -> "list[x509.GeneralName]":
    """Those given, then those that are always there, each once."""
    return list(dict.fromkeys(_name(host) for host in (*hosts, *ALWAYS)))


def _name(host: str) -> "x509.GeneralName":
    address = _address(host)
    if address is None:
        return x509.DNSName(_dns(host))
    if address.is_unspecified:
        raise InvalidValue(f"{host} is where a server listens; give the name or address that workers connect to")
    return x509.IPAddress(address)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return None
    return None if "%" in host else address  # a zone means something on one machine only


def _dns(host: str) -> str:
    try:
        name = host.lower().encode("idna").decode()
    except UnicodeError:
        name = ""
    if len(name) > DNS_MAX or not _DNS.fullmatch(name):
        raise InvalidValue(f"{host!r} is no host; use a DNS name or an IP address, without scheme, port or wildcard")
    return name


# --- certificates ----------------------------------------------------------------------------------------------------


def _new_ca() -> _Ca:
    key, number = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    name = _called(f"Offbeat CA {number & 0xFFFFFFFF:08x}")  # two of them must not be taken for one another
    cert = (
        _builder(key.public_key(), name, datetime.now(UTC) + timedelta(days=CA_DAYS))
        .issuer_name(name)
        .serial_number(number)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    return _Ca(cert.sign(key, hashes.SHA256()), key)


def _issue(folder: Path, ca: _Ca, names: "list[x509.GeneralName]") -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(datetime.now(UTC) + timedelta(days=DAYS), ca.cert.not_valid_after_utc)
    issuer = ca.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    cert = (
        _builder(key.public_key(), _called("Offbeat server"), until)
        .issuer_name(ca.cert.subject)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    write_private(folder / SERVER_KEY, _pem(key))
    _write(folder / SERVER_CERT, cert.sign(ca.key, hashes.SHA256()))
    return read(folder)


def _builder(key: "ec.EllipticCurvePublicKey", name: "x509.Name", until: datetime) -> "x509.CertificateBuilder":
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .not_valid_before(datetime.now(UTC) - EARLY)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*uses: str) -> "x509.KeyUsage":
    return x509.KeyUsage(**{use: use in uses for use in _USES + _NEVER})


def _called(name: str) -> "x509.Name":
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


# --- files -----------------------------------------------------------------------------------------------------------


def _refuse_missing() -> None:
    if "ec" not in globals():
        raise MissingExtra("cryptography", "serve")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _load(path: Path, do: str) -> "x509.Certificate":
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidValue(f"cannot read {path}: {_why(error)}; {do}") from error


def _load_ca(folder: Path) -> _Ca:
    """Refused if it can sign nothing that a worker would take."""
    cert = _load(folder / CA_CERT, "bring back the one that `offbeat init` made")
    try:
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidValue(
            f"cannot read {folder / CA_KEY}: {_why(error)}; it is needed to renew: bring it back"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise InvalidValue(f"{folder / CA_KEY} is not the key of {CA_CERT}; bring back the two that belong together")
    if cert.not_valid_after_utc <= datetime.now(UTC):
        raise InvalidValue(
            f"{folder / CA_CERT} ended on {cert.not_valid_after_utc:%Y-%m-%d}; "
            "make a new folder with: offbeat init, and give every worker its ca.pem"
        )
    return _Ca(cert, key)


def _write(path: Path, cert: "x509.Certificate") -> None:
    with aside(path) as temporary:
        temporary.write_bytes(cert.public_bytes(serialization.Encoding.PEM))


def _pem(key: "ec.EllipticCurvePrivateKey") -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _why(error: Exception) -> str:
    """One line, without the path, which the message names already."""
    text = (getattr(error, "strerror", None) or str(error)).splitlines()
    return text[0] if text else type(error).__name__
