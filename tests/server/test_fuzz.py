"""Every route is driven with whatever may come, against a real server over real sockets, while a probe asks for its
health: p99 under 250 ms, none above 1 s. Afterwards the run takes an honest push, and its status is sane."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from offbeat.server.app import ROUTES
from offbeat.web.app import OF_RUN, OF_SITE
from tests.server.probing import probing, server_process
from tests.server.serving import Running, Worker
from tests.server.speaking import Line, described, file_of, head, ones, put
from tests.server.test_openapi import ENDLESS, MODES, OPERATIONS, OVER_AND_OVER, Fleet, operation_of
from tests.unit.test_wire_bounds import hostile

pytestmark = pytest.mark.slow
SECONDS = 15.0
P99_S, LARGEST_S = 0.25, 1.0
ROOM = ("--tasks-per-device", "1000", "--in-flight-max", "8000", "--epochs", "1000000", "--evaluate-every", "1000000")
PATIENT = (*ROOM, "--bad-updates-max", "1000000", "--poll-s", "0.2", "--head-s", "2", "--stall-s", "2")
DATA = file_of(ones())
NAMES = count()
MANY = 10_000
MANY_TASK = f"""
import numpy as np
from offbeat import Trained


class Many:
    devices = 8

    def initial(self, seed):
        return {{f"layers.{{i // 4}}.attention.{{'qkvo'[i % 4]}}_proj": np.zeros(2, np.float32) for i in range({MANY})}}

    def train(self, model, work):
        return Trained(1, 1)

    def evaluate(self, model):
        return {{}}


task = Many()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server_process(tmp_path_factory.mktemp("fuzzed"), *PATIENT) as running:
        yield running


@contextmanager
def healthy(running: Running, data: bytes = DATA) -> Iterator[None]:
    """Meanwhile the server answers at once, and afterwards it is as well as before."""
    before = running.status()
    with probing(running.url) as latencies:
        yield
    print(f"while fuzzed: {latencies}")  # noqa: T201
    assert latencies.refused == []
    assert len(latencies.took) > 100
    assert latencies.p99 < P99_S, latencies
    assert latencies.largest < LARGEST_S, latencies
    honest = Worker(running, f"honest{next(NAMES)}")
    assert honest.push(honest.lease()["task"], data).status == 200
    after = running.status()
    assert after["applied"] > before["applied"]
    assert after["trouble"] is None or "updates were refused" in after["trouble"]  # which is what happened
    assert after["finished"] is False
    assert all(isfinite(value) for value in after.values() if isinstance(value, int | float))
    assert 0 <= after["gradients"] < 2**63


def driven(strategy: st.SearchStrategy[Any], try_one: Callable[[Any], None]) -> None:
    """Try examples until the time is over."""
    end = monotonic() + SECONDS
    quick = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))

    @quick
    @given(strategy)
    def tried(example: Any) -> None:
        if monotonic() < end:
            try_one(example)

    while monotonic() < end:
        tried()


def said(running: Running, data: bytes) -> bytes:
    """Whatever the server answers to these bytes, until it hangs up or has nothing more to say."""
    with Line(running) as line:
        line.socket.settimeout(5.0)
        with suppress(ConnectionError, TimeoutError):
            line.send(data)
            line.socket.shutdown(socket.SHUT_WR)
            return line.reader.read()
    return b""


def no_failure(told: bytes) -> None:
    for status in re.findall(rb"HTTP/1\.[01] (\d{3})", told):
        assert int(status) < 500 or int(status) in (503, 507), told[:1000]


# --- the document ----------------------------------------------------------------------------------------------------


def test_what_the_document_allows_and_forbids(running: Running) -> None:
    end, fleet = monotonic() + 2 * SECONDS, Fleet(running)
    with healthy(running), requests.Session() as session:
        for name in sorted(OPERATIONS):
            for mode in GenerationMode:
                for known in (False, True) if (name, mode) in MODES or name == ENDLESS else ():
                    _document(running, session, fleet if known else None, name, mode, end)


def _document(running: Running, session: Any, fleet: Fleet | None, name: str, mode: Any, end: float) -> None:
    @settings(OVER_AND_OVER, max_examples=10)
    @given(case=operation_of(name).as_strategy(mode))
    def tried(case: Any) -> None:
        if monotonic() > end:
            return
        if fleet is not None:
            fleet.fill_in(case)
        if name == ENDLESS:
            case.query = {**(case.query or {}), "limit": "1"}
            case.headers = {**(case.headers or {}), "Last-Event-ID": "0"}
        answer = case.call(base_url=running.url, session=session, timeout=30)
        assert answer.status_code < 500 or answer.status_code in (503, 507), answer.content

    tried()
    running.call("DELETE", "/v1/pause")  # which may just have been asked for


# --- raw bytes -------------------------------------------------------------------------------------------------------

PATHS = sorted(
    {route.path for route in (*ROUTES, *OF_SITE, *OF_RUN)}
    | {"/metrics", "/", "*", "http://elsewhere/v1/health", "/v1/workers/0/ask?wait_s=0"}
)
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS", "CONNECT", "TRACE", "get", "G\x00T", ""]
FIELDS = [
    *("Host", "Content-Length", "Transfer-Encoding", "Content-Type", "Content-Encoding", "Expect", "Connection"),
    *("Offbeat-Session", "Offbeat-Samples", "Offbeat-Gradients", "Offbeat-Metrics", "Offbeat-Size", "Offbeat-Offset"),
    *("Offbeat-Digest", "Offbeat-Layout", "Offbeat-Protocol", "Offbeat-Train-S", "Last-Event-ID", "Range", "Cookie"),
    *("If-None-Match", "If-Range", "Authorization", "X-Forwarded-For", "X-CSRF-Token", "Origin", "Upgrade", "Accept"),
]
VALUES = [
    *("0", "1", "-1", "9" * 4300, "1e999", "nan", "chunked", "gzip", "identity, chunked", "100-continue", "close"),
    *("application/json", "application/octet-stream", "multipart/form-data; boundary=x", "bytes=0-", "bytes=-1", "*"),
    *("keep-alive, Upgrade", "websocket", "offbeat=" + "x;" * 2000, "Bearer " + "x" * 4000, "{" * 3000, "\xff" * 100),
]
letters = st.text(st.characters(max_codepoint=255), max_size=40)
bodies = st.one_of(
    st.binary(max_size=300),
    st.sampled_from([b"{}", b"[" * 5000, b'{"a":' * 2000, b'{"name":"x","protocol":1}', b"token=" + b"x" * 5000]),
    st.lists(st.binary(min_size=1, max_size=20), max_size=5).map(
        lambda some: b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in some) + b"0\r\n\r\n"
    ),
    st.sampled_from([b"ffffffffffffffff\r\n", b"1;" + b"x" * 5000 + b"\r\n\r\n", b"-1\r\n\r\n", b"0\r\nX: y\r\n\r\n"]),
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A request, more or less."""
    path = re.sub(r"\{[^}]*\}", lambda _: draw(st.sampled_from(["0", "1", "x", "9" * 30, "%00"])), draw(places))
    version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""]))
    fields = draw(st.lists(st.tuples(st.sampled_from(FIELDS) | letters, st.sampled_from(VALUES) | letters), max_size=6))
    lines = [f"{draw(st.sampled_from(METHODS))} {path} {version}", *(f"{name}: {value}" for name, value in fields)]
    end = draw(st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r"]))
    return (end.join(lines) + 2 * end).encode("latin-1") + draw(bodies)


places = st.sampled_from(PATHS) | letters.map(lambda text: f"/{text}") | letters.map(lambda text: f"/v1/status?{text}")


def test_any_bytes(running: Running) -> None:
    with healthy(running):
        driven(st.binary(max_size=2000), lambda data: no_failure(said(running, data)))


def test_any_head_request_line_and_chunk(running: Running) -> None:
    with healthy(running):
        driven(st.lists(heads(), min_size=1, max_size=3).map(b"".join), lambda data: no_failure(said(running, data)))


# --- updates ---------------------------------------------------------------------------------------------------------

numbers = st.sampled_from([0, 1, 4, 6, 24, 40, 2**31, 2**62, 2**63 - 1, 2**63, -1, 10**30, 1.5, True, None, "6"])
json_values = st.recursive(
    numbers | letters, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(letters, inner, max_size=6)
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "I64", "F31"]) | json_values,
        "shape": st.lists(numbers, max_size=40) | json_values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | json_values,
    },
)
headers = st.dictionaries(st.sampled_from(["x", "y", "__metadata__"]) | letters, entries | json_values, max_size=5)


def test_any_header_of_an_update(running: Running) -> None:
    worker = Worker(running, f"fuzz{next(NAMES)}")

    def pushed(header: Any) -> None:
        data = described(json.dumps(header).encode(), DATA[-40:])
        no_failure(said(running, put(worker, worker.lease()["task"], data) + data))

    with healthy(running):
        driven(headers, pushed)


def hammered(running: Running, texts: list[bytes]) -> None:
    """Eight workers push updates with these headers, all the time."""
    end = monotonic() + SECONDS

    def push(number: int) -> None:
        worker = Worker(running, f"hammer{next(NAMES)}")
        for turn in count(number):
            if monotonic() > end:
                return
            data = described(texts[turn % len(texts)], b"")
            answer = worker.push(worker.lease()["task"], data)
            assert answer.status in (413, 422), answer

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(push, range(8)))


def test_headers_that_take_long_to_read(running: Running) -> None:
    most = Worker(running, f"w{next(NAMES)}").joined["update_bytes_max"]
    with healthy(running):
        hammered(running, list(hostile(most - 200).values()))


def test_headers_that_take_long_to_read_of_a_model_with_ten_thousand_arrays(tmp_path: Path) -> None:
    arrays = {f"layers.{i // 4}.attention.{'qkvo'[i % 4]}_proj": np.ones(2, np.float32) for i in range(MANY)}
    with server_process(tmp_path, *PATIENT, task=MANY_TASK) as running:
        most = Worker(running, "w").joined["update_bytes_max"]
        honest = file_of(dict(reversed(arrays.items())))
        length = int.from_bytes(honest[:8], "little")
        almost = honest[8 : 8 + length].replace(b'"shape": [2]', b'"shape": [3]', 1)
        with healthy(running, honest):
            hammered(running, [*hostile(most // 2).values(), almost])


# --- everything at once ----------------------------------------------------------------------------------------------


def test_many_slow_and_silent_connections(running: Running) -> None:
    """Heads, bodies and uploads that stop half-way, over and over."""
    worker = Worker(running, f"slow{next(NAMES)}")
    begun = [
        b"",
        b"GET /v1/hea",
        head("POST", "/login", {"Content-Length": 60_000}) + b"t",
        head("POST", "/v1/workers", {"Content-Length": 60_000, "Content-Type": "application/json"}) + b"{",
        head("GET", "/v1/events"),
        head("GET", "/events"),
        put(worker, worker.lease()["task"], DATA) + DATA[:10],
    ]
    end = monotonic() + SECONDS
    with healthy(running):
        lines: list[Line] = []
        for number in count():
            if monotonic() > end:
                break
            lines.append(Line(running, begun[number % len(begun)]))
            if len(lines) > 300:
                lines.pop(0).cut()
        for line in lines:
            line.cut()
