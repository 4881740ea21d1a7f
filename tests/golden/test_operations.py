"""The operations page says what the server does: every refusal, command, setting and result that it names is there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from offbeat.cli import main
from offbeat.core.rules import AVERAGED
from offbeat.protocol.worst_served import WORST_TENTH
from offbeat.server.refusals import KINDS
from offbeat.server.settings import ServerSettings
from offbeat.settings import Settings
from offbeat.sim.result_metrics import RESULTS

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_every_refusal_is_on_the_page_with_what_to_do() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert {(word, int(status), do) for status, word, do in rows} == {
        (word, kind.status, kind.do) for word, kind in KINDS.items()
    }


def test_every_command_on_the_page_exists_and_takes_the_flags_that_are_shown() -> None:
    shown = re.findall(r"offbeat (\w+)([^`\n|]*)", PAGE)
    assert {"serve", "work", "init", "token", "status", "verify", "export", "runs", "readmit"} <= {n for n, _ in shown}
    for name, rest in shown:
        if name in main.commands:
            known = {"--help"} | {option for parameter in main.commands[name].params for option in parameter.opts}
            for flag in re.findall(r"--[a-z-]+", rest):
                assert flag in known, f"offbeat {name} has no {flag}"


def test_every_setting_on_the_page_exists() -> None:
    known = {field.name for kind in (Settings, ServerSettings) for field in fields(kind)}
    named = {name for name in re.findall(r"`([a-z]+_[a-z_]+)`", PAGE) if not name.startswith("offbeat_")}
    results = {*RESULTS, "metrics_t", f"accuracy{AVERAGED}", f"accuracy{WORST_TENTH}"}
    assert named - known - KINDS.keys() - results == set()
