"""How much work a cache in front saves the server: many pulls of one model, directly and through nginx.

    python benchmarks/http_cache.py [--pulls 50] [--at-once 10] [--megabytes 10]

Needs nginx (`apt-get install nginx`, or OFFBEAT_NGINX says where it is) and the extras `serve` and `dev`. The server
runs with TLS and tokens, as in production, and so does nginx with the configuration in deploy/nginx.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil

NGINX = os.environ.get("OFFBEAT_NGINX") or shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SHIPPED = Path(__file__).parents[1] / "deploy" / "nginx" / "offbeat.conf"
START_S, LOOK_S = 600.0, 0.05
TASK = """
import numpy as np
from offbeat import Trained

class Line:
    devices = 100

    def initial(self, seed):
        return {{"x": np.random.default_rng(seed).random({numbers}, np.float32)}}

    def train(self, model, work):
        return Trained(samples=1, gradients=1)

    def evaluate(self, model):
        return {{"size": float(model["x"].sum())}}

task = Line()
"""
MAIN = """
daemon off;
{user}
worker_processes 1;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path none; proxy_temp_path none; fastcgi_temp_path none; uwsgi_temp_path none; scgi_temp_path none;
    include offbeat.conf;
}}
"""


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[psutil.Process]:
    """Run a program until the block ends."""
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)  # noqa: S603 (ours)
    try:
        yield psutil.Process(child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(START_S)


def wait_for(path: Path, process: psutil.Process) -> str:
    """The URL of a server, once it has started."""
    until = time.monotonic() + START_S
    while not path.is_file():
        if time.monotonic() > until or process.status() == psutil.STATUS_ZOMBIE:
            raise TimeoutError(f"the server did not start: {(path.parents[1] / 'log').read_text()}")
        time.sleep(LOOK_S)
    return str(json.loads(path.read_text())["url"])


def wait_for_port(port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(LOOK_S)
    raise TimeoutError("nginx did not start")


def configured(folder: Path, server: str, access: Path) -> tuple[list[str], int]:
    """The command that starts nginx in front of this server, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    facts = {
        "LISTEN": f"127.0.0.1:{port}",
        "NAME": "localhost",
        "CERT": access / "server.pem",
        "KEY": access / "server.key",
        "PREFIX": "",
        "SCHEME": "https",
        "SERVER": f"127.0.0.1:{urlsplit(server).port}",
        "CA": access / "ca.pem",
        "CACHE_MAX": "1g",
        "CACHE": folder / "cache",
    }
    text = SHIPPED.read_text()
    for name, value in facts.items():
        text = text.replace(f"${{OFFBEAT_{name}}}", str(value))
    (folder / "offbeat.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(user="user root;" if os.geteuid() == 0 else ""))
    return [str(NGINX), "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"], port


class Place:
    """A server, its tokens and its own figures."""

    def __init__(self, access: Path, tokens: dict[str, str], server: str, process: psutil.Process) -> None:
        self.tokens, self.server, self.process = tokens, server, process
        self.trust = ssl.create_default_context(cafile=access / "ca.pem")

    def get(self, url: str, path: str, token: str) -> bytes:
        """Fetch over a new connection, as a worker that has just joined does."""
        where = urlsplit(url)
        connection = HTTPSConnection(where.hostname or "", where.port, timeout=START_S, context=self.trust)
        connection.request("GET", path, headers={"Authorization": f"Bearer {self.tokens[token]}"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return body

    def sent(self) -> int:
        found = re.search(
            r"^offbeat_sent_bytes_total (\S+)$", self.get(self.server, "/metrics", "viewer").decode(), re.M
        )
        return int(float(found[1])) if found else 0

    def cpu_s(self) -> float:
        used = self.process.cpu_times()
        return float(used.user + used.system)


def measured(place: Place, url: str, path: str, pulls: int, at_once: int) -> dict[str, float]:
    """What the pulls cost the server."""
    sent, cpu_s, began = place.sent(), place.cpu_s(), time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        sizes = set(pool.map(lambda _: len(place.get(url, path, "viewer")), range(pulls)))
    took = time.monotonic() - began
    cpu = place.cpu_s() - cpu_s
    return {
        "model_mb": max(sizes) / 1e6,
        "server_mb": (place.sent() - sent) / 1e6,
        "server_cpu_ms_per_pull": 1000 * cpu / pulls,
        "took_s": took,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--pulls", type=int, default=50)
    arguments.add_argument("--at-once", type=int, default=10)
    arguments.add_argument("--megabytes", type=float, default=10.0)
    chosen = arguments.parse_args()
    if NGINX is None:
        sys.exit("needs nginx: apt-get install nginx")
    offbeat = [sys.executable, "-m", "offbeat"]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "line.py").write_text(TASK.format(numbers=int(chosen.megabytes * 250_000)))
        make = [*offbeat, "init", "access", "--json"]
        made = subprocess.run(make, cwd=folder, check=True, capture_output=True)  # noqa: S603 (ours)
        tokens = json.loads(made.stdout)["tokens"]
        serve = ["serve", "line.py", "--dir", "run", "--port", "0", "--access", "access", "--behind-proxy"]
        process = stack.enter_context(running([*offbeat, *serve, "--host", "localhost"], folder))
        server, access = wait_for(folder / "run" / "server.json", process), folder / "access"
        command, port = configured(folder, server, access)
        stack.enter_context(running(command, folder))
        wait_for_port(port)
        place = Place(access, tokens, server, process)
        run = json.loads((folder / "run" / "server.json").read_text())["run"]
        path = f"/v1/runs/{run}/models/0"
        for where, url in (("directly", server), ("through nginx", f"https://localhost:{port}")):
            load = os.getloadavg()[0]
            found = measured(place, url, path, chosen.pulls, chosen.at_once)
            print(
                f"{where}: {json.dumps({k: round(v, 2) for k, v in found.items()})}, load before {load:.1f}", flush=True
            )


if __name__ == "__main__":
    main()
