"""Whose word is believed about where a request comes from."""

from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from offbeat.errors import InvalidValue
from offbeat.server.listener import address_of
from offbeat.server.settings import AccessSettings, ServerSettings


def said(remote: str, *forwarded: str, behind_proxy: bool = True) -> str:
    transport = Mock()
    transport.get_extra_info.side_effect = {"peername": (remote, 4)}.get
    headers = CIMultiDict([("X-Forwarded-For", one) for one in forwarded])
    request = make_mocked_request("GET", "/", headers=headers, transport=transport)
    return address_of(request, behind_proxy=behind_proxy)


@pytest.mark.parametrize("proxy", ["127.0.0.1", "127.0.0.9", "::1"])
def test_a_proxy_on_this_machine_says_who_it_speaks_for(proxy: str) -> None:
    assert said(proxy, "203.0.113.5") == "203.0.113.5"
    assert said(proxy, "2001:db8::5") == "2001:db8::5"


def test_the_address_that_the_proxy_added_itself_counts() -> None:
    assert said("127.0.0.1", "198.51.100.7, 203.0.113.5") == "203.0.113.5"
    assert said("127.0.0.1", "198.51.100.7", "203.0.113.5") == "203.0.113.5"


def test_others_are_not_believed() -> None:
    assert said("192.0.2.1", "203.0.113.5") == "192.0.2.1"
    assert said("127.0.0.1", "203.0.113.5", behind_proxy=False) == "127.0.0.1"


@pytest.mark.parametrize("text", ["", "unknown", "203.0.113.5:80", "_secret", "203.0.113.5,", "x" * 5000])
def test_what_is_no_address_is_not_believed(text: str) -> None:
    assert said("127.0.0.1", text) == "127.0.0.1"
    assert said("127.0.0.1") == "127.0.0.1"


def test_who_is_behind_a_proxy_is_not_open_by_accident() -> None:
    behind = ServerSettings(behind_proxy=True)
    with pytest.raises(InvalidValue, match="offbeat init DIR"):
        AccessSettings().check(behind)
    AccessSettings(insecure=True).check(behind)
    with pytest.raises(InvalidValue, match="true or false"):
        ServerSettings(behind_proxy="yes")  # type: ignore[arg-type]
