"""How versions are read: whole, in parts, again, too late; and that nobody who reads slowly holds up anybody."""

from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from offbeat.wire import unpack
from tests.server.serving import TASK, Answered, Running, Worker, packed, serving
from tests.server.speaking import Line, head, refused, settled, until

LARGE = TASK.replace("np.zeros(6, np.float32)", "np.arange(4_000_000, dtype=np.float32)")
"""Sixteen million bytes: more than the buffers between two ends of a connection hold."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server at epoch 5 that keeps two versions of forty bytes, and one more while somebody reads it."""
    with serving(tmp_path_factory.mktemp("server"), limits={"versions_bytes_max": 120}) as running:
        worker = Worker(running)
        for _ in range(5):
            assert worker.work().status == 200
            settled(running)  # two that wait are mixed in one pass, and what is between them can never be read
        yield running


def pull(running: Running, t: int | str = 5, **headers: str) -> Answered:
    return running.call("GET", f"/v1/models/{t}", headers={k.replace("_", "-"): v for k, v in headers.items()})


def test_a_version_is_its_bits(running: Running) -> None:
    whole = pull(running)
    assert unpack(whole.body, running.server.run.layout).vector.tobytes() == running.x
    assert whole.body == packed(running.server.run.mixer.x)
    assert whole.headers["Content-Type"] == "application/octet-stream"
    assert whole.headers["Offbeat-Epoch"] == "5"
    assert whole.headers["Offbeat-Protocol"] == "1"
    assert whole.headers["Accept-Ranges"] == "bytes"
    assert pull(running).headers["ETag"] == whole.headers["ETag"]


def test_any_safetensors_reader_can_read_it(running: Running) -> None:
    arrays = load(pull(running).body)
    assert {name: array.shape for name, array in arrays.items()} == {"x": (6,), "y": (2, 2)}
    assert np.concatenate([arrays["x"], arrays["y"].ravel()]).tobytes() == running.x


def pull_of(running: Running, run: str, t: int | str = 5) -> Answered:
    return running.call("GET", f"/v1/runs/{run}/models/{t}")


def test_what_names_its_run_may_be_kept_for_ever_and_what_does_not_may_not(running: Running) -> None:
    kept, whole, latest = pull_of(running, running.server.context.run_id), pull(running), pull(running, "latest")
    assert kept.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert whole.headers["Cache-Control"] == latest.headers["Cache-Control"] == "no-cache"
    for other in (whole, latest):
        assert (other.body, other.headers["Offbeat-Epoch"]) == (kept.body, "5")
        assert other.headers["ETag"] == kept.headers["ETag"]
    assert pull(running, 4).headers["ETag"] != whole.headers["ETag"]


def test_a_lease_says_where_its_model_may_be_kept_for_ever(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        lease = worker.lease()
        assert lease["model"] == f"/v1/runs/{worker.joined['run']}/models/0"
        assert "immutable" in running.call("GET", lease["model"]).headers["Cache-Control"]


def test_a_model_of_another_run_is_not_handed_out(running: Running) -> None:
    mine = running.server.context.run_id
    for other in ("0" * len(mine), mine[:-1], mine.upper() + "x", "latest", "%20"):
        body = refused(pull_of(running, other), 404, "not_found")
        assert mine in body["message"]
        assert "lease" in body["do"]
    for t in ("latest", "-1", "5.0"):
        refused(pull_of(running, mine, t), 400, "bad_request")
    refused(pull_of(running, mine, 6), 404, "not_found")
    refused(pull_of(running, mine, 0), 410, "gone")


def test_two_runs_have_no_address_in_common(tmp_path: Path) -> None:
    addresses = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with serving(tmp_path / name) as running:
            addresses.append(Worker(running).lease()["model"])
    assert len(set(addresses)) == 2


def test_where_nobody_needs_a_token_everybody_may_read_models(running: Running) -> None:
    answer = running.call("GET", "/v1/allowed/models")
    assert (answer.status, answer.body) == (204, b"")


@pytest.mark.parametrize("wrap", ["{}", "W/{}", '"other", {}', '{}, "other"', "*"])
def test_what_is_there_already_is_not_sent_again(running: Running, wrap: str) -> None:
    tag = pull(running).headers["ETag"]
    for t in ("5", "latest"):
        answer = pull(running, t, If_None_Match=wrap.format(tag))
        assert (answer.status, answer.body) == (304, b"")
        assert answer.headers["ETag"] == tag
        assert answer.headers["Cache-Control"] == pull(running, t).headers["Cache-Control"]


@pytest.mark.parametrize("tag", ['"other"', "", "x", "W/", '"-5"', "5"])
def test_another_tag_gets_the_version(running: Running, tag: str) -> None:
    assert pull(running, If_None_Match=tag).status == 200


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [
        ("bytes=1-", 1, None),
        ("bytes=100-", 100, None),
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=250-300000", 250, None),
        ("bytes=-1", -1, None),
        ("bytes=-40", -40, None),
    ],
)
def test_a_part_of_it(running: Running, asked: str, begin: int, end: int | None) -> None:
    whole = pull(running)
    part = pull(running, Range=asked)
    assert part.status == 206
    assert part.body == whole.body[begin:end]
    size = len(whole.body)
    first = begin % size
    assert part.headers["Content-Range"] == f"bytes {first}-{first + len(part.body) - 1}/{size}"
    assert part.headers["ETag"] == whole.headers["ETag"]
    assert int(part.headers["Content-Length"]) == len(part.body)


@pytest.mark.parametrize("asked", ["bytes=0-", "bytes=0-999999", "bytes=-999999"])
def test_all_of_it_as_a_part(running: Running, asked: str) -> None:
    part = pull(running, Range=asked)
    assert part.status in (200, 206)
    assert part.body == pull(running).body


@pytest.mark.parametrize(
    "asked",
    ["bytes=5-1", "bytes=", "bytes=-", "bytes=a-b", "words=0-1", "bytes=0-1,4-5", "0-1", "bytes=" + "9" * 5000 + "-"],
)
def test_what_cannot_be_understood_gets_the_whole(running: Running, asked: str) -> None:
    answer = pull(running, Range=asked)
    assert (answer.status, answer.body) == (200, pull(running).body)


@pytest.mark.parametrize("asked", ["bytes=99999-", "bytes=296-", "bytes=296-400", "bytes=999999999999999999-"])
def test_beyond_the_end_there_is_nothing(running: Running, asked: str) -> None:
    answer = pull(running, Range=asked)
    refused(answer, 416, "no_such_bytes")
    assert answer.headers["Content-Range"] == f"bytes */{len(pull(running).body)}"


def test_a_part_of_another_version_is_not_sent(running: Running) -> None:
    tag = pull(running).headers["ETag"]
    assert pull(running, Range="bytes=10-", If_Range=tag).status == 206
    for other in (pull(running, 4).headers["ETag"], '"other"', f"W/{tag}", "Mon, 16 Nov 2026 05:15:03 GMT"):
        answer = pull(running, Range="bytes=10-", If_Range=other)
        assert (answer.status, answer.body) == (200, pull(running).body)


def test_the_pieces_of_a_cut_pull_make_the_whole(running: Running) -> None:
    with Line(running, head("GET", "/v1/models/5")) as line:
        _, headers = line.head()
        first = line.reader.read(100)
    rest = pull(running, Range="bytes=100-", If_Range=headers["ETag"])
    assert first + rest.body == pull(running).body


def test_the_past_is_gone_and_the_future_not_there_yet(running: Running) -> None:
    for t in (0, 1):
        assert "5" in refused(pull(running, t), 410, "gone")["message"]
    for t in (6, 999_999_999_999_999):
        assert "5" in refused(pull(running, t), 404, "not_found")["message"]
    assert pull(running, 4).status == 200, "whoever was just leased it can still read it"
    for text in ("-1", "newest", "1e3", "9" * 16, "5.0", "%35%00", "LATEST"):
        refused(pull(running, text), 400, "bad_request")
    assert pull(running, "%35").status == 200


def is_gone(running: Running, t: int) -> bool:
    """Whoever asks at that very moment may be cut off, too."""
    with suppress(ConnectionError, HTTPException):
        return pull(running, t, Range="bytes=0-0").status == 410
    return False


def test_a_slow_reader_holds_up_nobody_and_gets_its_version(tmp_path: Path) -> None:
    with serving(tmp_path, limits={"versions_bytes_max": 50_000_000}, task=LARGE) as running:
        worker, x_0 = Worker(running), packed(running.server.run.mixer.x)
        with Line(running, head("GET", "/v1/models/0")) as slow:
            status, headers = slow.head()
            assert (status, int(headers["Content-Length"])) == (200, len(x_0))
            got = slow.reader.read(1)
            for t in range(3):
                lease = worker.lease()
                assert lease["tau"] == t
                assert worker.push(lease["task"], worker.train(lease)).json["t"] == t + 1
                settled(running)
                got += slow.reader.read(1)
            assert pull(running, 0).body == x_0, "while somebody reads it, others can have it too"
            assert got + slow.reader.read(len(x_0) - len(got)) == x_0
        until(lambda: is_gone(running, 0))


def test_where_memory_is_short_the_readers_of_the_oldest_are_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, limits={"versions_bytes_max": 1}, task=LARGE) as running:  # which is two
        worker = Worker(running)
        with Line(running, head("GET", "/v1/models/0")) as slow:
            size = int(slow.head()[1]["Content-Length"])
            worker.work()
            settled(running)
            assert pull(running, 0).status == 200
            with Line(running, head("GET", "/v1/models/1")) as slow_too:
                slow_too.head()
                worker.work()
                until(lambda: is_gone(running, 0))
                with suppress(ConnectionError):
                    assert len(slow.reader.read()) < size, "it does not end as if all were there"
                assert len(slow_too.reader.read(size)) == size
        assert worker.work().status == 200


def test_a_reader_that_goes_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path, task=LARGE) as running:
        with Line(running, head("GET", "/v1/models/0")) as line:
            line.head()
            until(lambda: running.server.run.versions._read)
        until(lambda: not running.server.run.versions._read)
        assert Worker(running).work().status == 200
