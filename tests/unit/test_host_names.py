"""How the names of hosts are written, and which of them are a server's own."""

import pytest

from offbeat.errors import InvalidValue
from offbeat.server.host_names import host_in, names_in, stands_for
from offbeat.server.own_names import OwnNames
from offbeat.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("netloc", "host"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST.:7733", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[0:0:0:0:0:0:0:1]:7733", "::1"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("", ""),
        (":7733", ""),
        ("::1", ""),
        ("user@localhost", ""),
        ("localhost/", ""),
        ("localhost:80:80", ""),
        ("localhost:", ""),
        ("local host", ""),
        ("a" * 300, ""),
    ],
)
def test_the_host_of_a_place(netloc: str, host: str) -> None:
    assert host_in(netloc) == host


def test_the_names_in_a_setting() -> None:
    assert names_in("") == names_in("  ") == ()
    assert names_in("FL.example.org., 192.0.2.7,[2001:DB8::1],*.example.net") == (
        *("fl.example.org", "192.0.2.7", "2001:db8::1", "*.example.net"),
    )
    assert names_in("bücher.example") == ("xn--bcher-kva.example",)


@pytest.mark.parametrize(
    "wrong",
    ["https://fl.example.org", "fl.example.org:7733", "a,,b", "a b", "*", "*.", "-a", "x/y", "a" * 300, "é" * 90],
)
def test_what_is_no_name_is_refused_when_the_server_is_set_up(wrong: str) -> None:
    with pytest.raises(InvalidValue, match=r"public_name holds .* without https:// and without a port"):
        ServerSettings(public_name=wrong)


def test_a_list_in_a_file_is_refused_in_words() -> None:
    with pytest.raises(InvalidValue, match="one text, with commas"):
        ServerSettings(public_name=["a"])  # type: ignore[arg-type]


def test_a_star_stands_for_one_label() -> None:
    assert stands_for("*.example.org", "fl.example.org")
    for host in ("example.org", "a.b.example.org", ".example.org", "evilexample.org", ""):
        assert not stands_for("*.example.org", host)


def names(**settings: object) -> set[str] | None:
    found = OwnNames.of(ServerSettings(**settings), ["fl.example.org"]).names  # type: ignore[arg-type]
    return None if found is None else set(found)


def test_which_names_are_asked_for() -> None:
    own = {"localhost", "127.0.0.1", "::1", "fl.example.org"}
    assert names() == own
    assert names(host="0.0.0.0") is None, "tokens and the certificate keep strangers out"  # noqa: S104
    assert names(behind_proxy=True) is None, "the proxy answers for the name"
    assert names(host="192.0.2.7", public_name="b.example") == own | {"192.0.2.7", "b.example"}
    assert names(host="0.0.0.0", public_name="b.example") == own | {"b.example"}  # noqa: S104
    assert names(behind_proxy=True, public_name="b.example") == own | {"b.example"}
