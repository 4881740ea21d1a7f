"""The settings of a worker: where the server is, who it is, and what is refused before anything begins."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import InvalidValue
from offbeat.worker.settings import Address, Timeouts, WorkerSettings, token_of

# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:80/", Address("127.0.0.1", 80, False)),
        ("http://[::1]:7733", Address("::1", 7733, False)),
        ("https://fl.example/a/b/", Address("fl.example", 443, True, "/a/b")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.of(url) == address
    assert Address.of(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "fl.example",
        "ftp://x",
        "https://",
        "https://x:99999",
        "https://x:0",
        "https://u:p@x",
        "https://x?y",
        "http://x/a b",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match=r"server is .*write it as https://HOST:PORT"):
        WorkerSettings(server=url)


def test_a_token_goes_nowhere_in_the_clear() -> None:
    secret = "secret"  # noqa: S105 (nobody's)
    with pytest.raises(InvalidValue, match="in the clear"):
        WorkerSettings(server="http://fl.example", token=secret)
    for server in ("http://127.0.0.1:1", "http://localhost", "http://[::1]:1", "https://fl.example"):
        WorkerSettings(server=server, token=secret)
    WorkerSettings(server="http://fl.example", token=secret, insecure=True)
    assert secret not in repr(WorkerSettings(server="https://fl.example", token=secret))


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": -1},
        {"threads": 0},
        {"nice": 20},
        {"failures_max": 0},
        {"name": "a b"},
        {"name": ""},
        {"token": "a\nb"},
        {"token": ""},
        {"stop_s": 0.0},
        {"eligible_every_s": float("nan")},
        {"ca": Path("x")},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        WorkerSettings(server="http://127.0.0.1:1", **wrong)


def test_timeouts_are_positive() -> None:
    with pytest.raises(InvalidValue, match="piece_s is 0"):
        Timeouts(piece_s=0)


def test_a_ca_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nonsense")
    for path in (tmp_path / "ca.pem", tmp_path / "nothing.pem"):
        with pytest.raises(InvalidValue, match="cannot be read"):
            WorkerSettings(server="https://fl.example", ca=path).context()


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_text("from-file\n")
    monkeypatch.setenv("OFFBEAT_TOKEN", "from-environment")
    assert token_of(None, None) == "from-environment"
    assert token_of("flag", None) == "flag"
    assert token_of(None, tmp_path / "t") == "from-file"
    with pytest.raises(InvalidValue, match="use one"):
        token_of("flag", tmp_path / "t")
    with pytest.raises(InvalidValue, match="cannot read the token"):
        token_of(None, tmp_path / "u")
    monkeypatch.delenv("OFFBEAT_TOKEN")
    assert token_of(None, None) is None
