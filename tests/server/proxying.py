"""A real nginx in front of a server, with the configuration that is shipped; it runs as a child and ends by its id.

Needs nginx (Debian: `apt-get install nginx`; elsewhere OFFBEAT_NGINX says where it is).
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from offbeat.server import certificates
from offbeat.worker.settings import trusted
from tests.server.serving import PATIENCE_S, Answered, Running
from tests.server.speaking import until
from tests.server.test_access_control import As

NGINX = os.environ.get("OFFBEAT_NGINX") or shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SHIPPED = Path(__file__).parents[2] / "deploy" / "nginx" / "offbeat.conf"
needs_nginx = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx"),
]
MAIN = """
daemon off;
{user}
worker_processes 2;
pid nginx.pid;
error_log error.log warn;
events {{ worker_connections 512; }}
http {{
    access_log access.log;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path none;
    uwsgi_temp_path none;
    scgi_temp_path none;
    include offbeat.conf;
}}
"""


@dataclass
class Front(As):
    """A server as it is seen through nginx."""

    prefix: str = ""

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, timeout: float = 30
    ) -> Answered:
        return super().call(method, self.prefix + path, body, headers, timeout=timeout)


@dataclass
class Nginx:
    """A running nginx."""

    folder: Path
    url: str
    """Without the prefix."""
    prefix: str

    def front(self, running: Running, access: Path, token: str = "") -> Front:
        """The server behind it, as whoever has a token sees it."""
        trust = trusted(access / certificates.CA_CERT)
        return Front(running.server, running.folder, self.url, trust, token, self.prefix)

    def log(self) -> str:
        """What went wrong."""
        return (self.folder / "error.log").read_text()


def filled_in(text: str, facts: Mapping[str, object]) -> str:
    """The shipped configuration for one place."""
    for name, value in facts.items():
        text = text.replace(f"${{{name}}}", str(value))
    assert "${OFFBEAT" not in text
    return text


@contextmanager
def nginx(
    folder: Path, server: str, access: Path, *, prefix: str = "", conf: str | None = None, host: str = "localhost"
) -> Iterator[Nginx]:
    """nginx before the server at this URL; `conf` is the shipped configuration unless a test changes it."""
    assert NGINX is not None
    folder.mkdir()
    where, port = urlsplit(server), free_port()
    facts = {
        "OFFBEAT_LISTEN": f"127.0.0.1:{port}",
        "OFFBEAT_NAME": host,
        "OFFBEAT_CERT": access / certificates.SERVER_CERT,
        "OFFBEAT_KEY": access / certificates.SERVER_KEY,
        "OFFBEAT_PREFIX": prefix,
        "OFFBEAT_SCHEME": where.scheme,
        "OFFBEAT_SERVER": f"127.0.0.1:{where.port}",
        "OFFBEAT_CA": access / certificates.CA_CERT,
        "OFFBEAT_CACHE_MAX": "100m",
        "OFFBEAT_CACHE": folder / "cache",
    }
    (folder / "offbeat.conf").write_text(filled_in(SHIPPED.read_text() if conf is None else conf, facts))
    (folder / "nginx.conf").write_text(MAIN.format(user="user root;" if os.geteuid() == 0 else ""))
    command = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    with (folder / "stderr").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    made = Nginx(folder, f"https://{host}:{port}", prefix)
    try:
        until(lambda: process.poll() is not None or listens(port))
        assert process.poll() is None, (folder / "stderr").read_text() + made.log()
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
