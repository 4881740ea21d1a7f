"""The server's TLS: a worker that trusts its CA gets through to it by every name it has, and to nobody else."""

import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server import certificates
from offbeat.server.certificates import Issued, make, read, renew, server_context
from offbeat.worker.settings import trusted

pytest.importorskip("cryptography", reason="cryptography is not installed")
from cryptography import x509
from cryptography.hazmat.primitives import serialization

HOSTS = ["fed.example.org", "10.0.0.7", "2001:db8::1", "bücher.example", "my_server"]
WAIT_S = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    folder = tmp_path_factory.mktemp("access") / "new" / "folder"
    make(folder, HOSTS)
    return folder


def strict(ca: Path | None) -> ssl.SSLContext:
    """A worker's context, as strict as the newest Python makes it."""
    context = trusted(ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def greeting(server: ssl.SSLContext, worker: ssl.SSLContext, host: str) -> tuple[str, str | None]:
    """What a worker hears from a server over a real socket, and the version of TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        thread = threading.Thread(target=_greet, args=(listening, server))
        thread.start()
        try:
            with (
                socket.create_connection(listening.getsockname(), WAIT_S) as plain,
                worker.wrap_socket(plain, server_hostname=host) as tls,
            ):
                return tls.recv(100).decode(), tls.version()
        finally:
            thread.join(WAIT_S)


def _greet(listening: socket.socket, context: ssl.SSLContext) -> None:
    plain, _ = listening.accept()
    plain.settimeout(WAIT_S)
    try:
        with context.wrap_socket(plain, server_side=True) as tls:
            tls.sendall(b"hello")
    except OSError:  # the worker did not like us, and says so
        plain.close()


# --- handshakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1", "::1", "FED.example.org"])
def test_a_worker_gets_through_by_every_name(made: Path, host: str) -> None:
    assert greeting(server_context(made), strict(made / "ca.pem"), host) == ("hello", "TLSv1.3")


def test_a_certificate_and_its_key_can_be_given_by_themselves(made: Path, tmp_path: Path) -> None:
    context = server_context(placed(tmp_path, made / "server.pem", made / "server.key"))
    assert greeting(context, trusted(made / "ca.pem"), "localhost")[0] == "hello"


def placed(folder: Path, cert: Path, key: Path) -> Path:
    """A folder with just these two."""
    folder.mkdir(exist_ok=True)
    (folder / "server.pem").write_bytes(cert.read_bytes())
    (folder / "server.key").write_bytes(key.read_bytes())
    return folder


@pytest.mark.parametrize("host", ["other.example.org", "example.org", "a.fed.example.org", "10.0.0.8", "::2"])
def test_a_wrong_host_is_refused(made: Path, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"ismatch|not valid for"):
        greeting(server_context(made), trusted(made / "ca.pem"), host)


def test_a_wrong_ca_is_refused(made: Path, tmp_path: Path) -> None:
    make(tmp_path, HOSTS)
    for ca in (tmp_path / "ca.pem", None):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|self-signed"):
            greeting(server_context(made), trusted(ca), "localhost")


def test_old_versions_of_tls_are_refused(made: Path) -> None:
    assert server_context(made).minimum_version is ssl.TLSVersion.TLSv1_2
    assert trusted(made / "ca.pem").minimum_version is ssl.TLSVersion.TLSv1_2
    worker = trusted(made / "ca.pem")
    worker.maximum_version = ssl.TLSVersion.TLSv1_2
    assert greeting(server_context(made), worker, "localhost") == ("hello", "TLSv1.2")


def test_a_worker_checks_both_chain_and_name(made: Path) -> None:
    for context in (trusted(made / "ca.pem"), trusted(None)):
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(trusted(made / "ca.pem").get_ca_certs()) == 1


# --- what is made ----------------------------------------------------------------------------------------------------


def test_keys_are_their_owners_alone(made: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert set(modes) == {"ca.pem", "ca.key", "server.pem", "server.key"}
    assert (modes["ca.key"], modes["server.key"]) == (0o600, 0o600)


def test_the_extensions_are_those_that_strict_readers_ask_for(made: Path) -> None:
    found = {}
    for name in ("ca.pem", "server.pem"):
        cert = x509.load_pem_x509_certificate((made / name).read_bytes())
        found[name] = {type(e.value).__name__: e.critical for e in cert.extensions}
    both = {"BasicConstraints": True, "KeyUsage": True, "SubjectKeyIdentifier": False, "AuthorityKeyIdentifier": False}
    assert found["ca.pem"] == both
    assert found["server.pem"] == both | {"ExtendedKeyUsage": False, "SubjectAlternativeName": False}


def test_the_certificate_is_valid_for_as_long_as_all_systems_take(tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    issued = make(tmp_path, ["a.example"])
    assert before <= issued.until - timedelta(days=certificates.DAYS) <= datetime.now(UTC)
    assert issued == read(tmp_path) == Issued(("a.example", "localhost", "127.0.0.1", "::1"), issued.until)
    cert = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    assert cert.not_valid_before_utc < before


def test_no_certificate_outlives_its_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "CA_DAYS", 10)
    make(tmp_path, [])
    monkeypatch.setattr(certificates, "CA_DAYS", 3650)
    assert renew(tmp_path).until <= datetime.now(UTC) + timedelta(days=10)


def test_a_ca_is_never_overwritten(tmp_path: Path) -> None:
    make(tmp_path, [])
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(InvalidValue, match=r"has a CA already; renew what it signed with: offbeat init .* --renew"):
        make(tmp_path, [])
    assert (tmp_path / "ca.pem").read_bytes() == before


# --- renewing --------------------------------------------------------------------------------------------------------


def test_who_trusted_the_ca_trusts_what_is_renewed(tmp_path: Path) -> None:
    make(tmp_path, ["one.example"])
    trusting, old = strict(tmp_path / "ca.pem"), (tmp_path / "server.key").read_bytes()
    assert renew(tmp_path).hosts == ("one.example", "localhost", "127.0.0.1", "::1")
    assert (tmp_path / "server.key").read_bytes() != old
    assert greeting(server_context(tmp_path), trusting, "one.example")[0] == "hello"
    renew(tmp_path, ["two.example"])
    assert greeting(server_context(tmp_path), trusting, "two.example")[0] == "hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        greeting(server_context(tmp_path), trusting, "one.example")
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


def test_a_running_server_can_take_up_what_is_renewed(tmp_path: Path) -> None:
    make(tmp_path, ["one.example"])
    serving, trusting = server_context(tmp_path), trusted(tmp_path / "ca.pem")
    renew(tmp_path, ["two.example"])
    serving.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    assert greeting(serving, trusting, "two.example")[0] == "hello"


def test_renewing_needs_a_ca_that_can_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", [])
    make(tmp_path / "b", [])
    key = (tmp_path / "a" / "ca.key").read_bytes()
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(InvalidValue, match=r"ca\.key is not the key of ca\.pem"):
        renew(tmp_path / "a")
    (tmp_path / "a" / "ca.key").unlink()
    with pytest.raises(InvalidValue, match=r"ca\.key: No such file or directory; it is needed to renew"):
        renew(tmp_path / "a")
    (tmp_path / "a" / "ca.key").write_bytes(key)
    renew(tmp_path / "a")

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Later":
            assert tz is UTC
            return cls(2100, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(certificates, "datetime", Later)
    with pytest.raises(InvalidValue, match=r"ended on .* make a new folder"):
        renew(tmp_path / "a")


# --- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "a b", "http://a", "a:80", "10.0.0.7:80", "*.a.example", "a..b", ".a", "a.", "-a", "a-", "a/b"),
        *("256.1.1.1", "1.2.3", "fe80::1%eth0", "[::1", "[a]", "x" * 64, ".".join(["x" * 50] * 6), "\udcff", "a\n"),
    ],
)
def test_what_is_no_host_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidValue, match="is no host; use a DNS name or an IP address"):
        make(tmp_path / "new", ["a.example", host])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])  # noqa: S104 (nothing listens)
def test_where_a_server_listens_is_no_name_of_it(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidValue, match="give the name or address that workers connect to"):
        make(tmp_path, [host])


def test_hosts_come_first_and_once(tmp_path: Path) -> None:
    issued = make(tmp_path, ["B.example", "b.example", "[::1]", "127.0.0.1"])
    assert issued.hosts == ("b.example", "::1", "127.0.0.1", "localhost")


@settings(deadline=None)
@given(st.text(max_size=30) | st.ip_addresses().map(str) | st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True))
def test_any_text_is_a_host_or_refused(host: str) -> None:
    try:
        name = certificates._name(host)
    except InvalidValue:
        return
    assert certificates._name(str(name.value)) == name  # so that renewing for the same hosts changes none


# --- files that are not as they should be ----------------------------------------------------------------------------


def test_files_that_do_not_fit_are_one_clear_line(made: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    make(tmp_path / "other", [])
    for folder in (
        tmp_path,
        placed(tmp_path / "bad", tmp_path / "bad.pem", made / "server.key"),
        placed(tmp_path / "mixed", made / "server.pem", tmp_path / "other" / "server.key"),
    ):
        with pytest.raises(InvalidValue, match="they must be a PEM certificate and its own key") as refused:
            server_context(folder)
        assert "\n" not in str(refused.value)
    for ca in (tmp_path / "nothing", tmp_path / "bad.pem", made / "ca.key"):
        with pytest.raises(InvalidValue, match=r"cannot be read: .*; give a PEM file"):
            trusted(ca)
    (tmp_path / "other" / "server.pem").write_text("no certificate")
    with pytest.raises(InvalidValue, match=r"cannot read .*server\.pem: .*; renew it with --host NAME"):
        renew(tmp_path / "other")
    renew(tmp_path / "other", ["a.example"])
    server_context(tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(OffbeatError, match=r"cannot write .*file"):
        make(tmp_path / "file", [])


def test_a_certificate_that_names_no_hosts_is_renewed_with_some(tmp_path: Path) -> None:
    make(tmp_path, [])
    (tmp_path / "server.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    with pytest.raises(InvalidValue, match="names no hosts; renew it with --host NAME"):
        renew(tmp_path)


def test_a_key_with_a_pass_phrase_is_refused_and_not_asked_for(made: Path, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key((made / "server.key").read_bytes(), password=None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(InvalidValue, match="without a pass phrase"):
        server_context(placed(tmp_path / "locked", made / "server.pem", tmp_path / "locked.key"))


WITHOUT = """
import sys
sys.modules["cryptography"] = None
from pathlib import Path
from offbeat.errors import MissingExtra
from offbeat.server.certificates import make, server_context
from offbeat.worker.settings import trusted
folder = Path(sys.argv[1])
server_context(folder), trusted(folder / "ca.pem"), trusted(None)
try:
    make(folder / "new", [])
except MissingExtra as error:
    print(error)
"""


def test_without_cryptography_only_making_is_refused(made: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cryptography is not installed; run: pip install 'offbeat[serve]'\n"
    assert not (made / "new").exists()
