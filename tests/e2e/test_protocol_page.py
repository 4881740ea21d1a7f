"""docs/protocol.md is true and complete: a real server answers as it shows, and it names every field and header."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from tests.server.serving import serving

from offbeat.server.refusals import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text("utf-8")
LOGISTIC = ROOT / "examples" / "logistic.py"
DOCUMENT = json.loads((resources.files("offbeat.server") / "openapi.json").read_text())
TOOLS = ("bash", "curl", "jq", "sha256sum")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
MARK = "--- and next ---"
EXACT = ("state", "outcome", "error", "gamma_schedule", "partition")
"""Texts that are the same in every session; of others, only that they are texts is compared."""


class Step(NamedTuple):
    """A command of the page, and what the page shows below it."""

    command: str
    shown: str


def session() -> list[Step]:
    """All commands of the page, in order."""
    steps: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            while command.endswith("\\"):
                line, _, shown = shown.partition("\n")
                command += f"\n{line}"
            steps.append(Step(command, shown.strip()))
    return steps


def played(steps: list[Step], server: str, folder: Path) -> list[str]:
    """What each command prints, all of them in one shell."""
    script = "\n".join(f"{step.command}\nprintf '\\n%s\\n' '{MARK}'" for step in steps)
    done = subprocess.run(
        ["bash", "-u", "-c", script],  # noqa: S607 (whichever there is)
        cwd=folder,
        env={"SERVER": server, "PATH": os.environ["PATH"]},  # and no proxy
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return [part.strip() for part in done.stdout.split(MARK)[:-1]]


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")
def test_the_session_of_the_page_is_what_a_server_answers(tmp_path: Path) -> None:
    assert "offbeat serve examples/logistic.py --gamma 0.2 --batch-size 20" in PAGE
    steps = session()
    assert len(steps) > 10
    with serving(tmp_path, {"gamma": 0.2, "batch_size": 20}, task=LOGISTIC.read_text()) as running:
        answers = played(steps, running.url, tmp_path)
    for step, answer in zip(steps, answers, strict=True):
        if step.shown.startswith("{"):
            assert list(differences(json.loads(step.shown), json.loads(answer))) == [], step.command
        elif step.shown.startswith("HTTP/"):
            assert head_of(step.shown).items() <= head_of(answer).items(), step.command
        else:
            assert answer == step.shown, step.command


def differences(shown: Any, answered: Any, where: str = "") -> Iterator[str]:
    """Where an answer is not as the page shows it; it may have more fields, and other texts."""
    if type(shown) is not type(answered):
        yield f"{where}: {shown!r} is shown, {answered!r} is the answer"
    elif isinstance(shown, dict):
        for name, value in shown.items():
            if name in answered:
                yield from differences(value, answered[name], name)
            else:
                yield f"{name} is shown, and not in the answer"
    elif (not isinstance(shown, str) or where in EXACT) and shown != answered:
        yield f"{where}: {shown!r} is shown, {answered!r} is the answer"


def head_of(text: str) -> dict[str, str]:
    """The headers of an answer, without those that name the run or the server's version."""
    pairs = (line.partition(": ") for line in text.splitlines()[1:])
    return {name: value for name, _, value in pairs if name not in ("ETag", "Offbeat-Version")}


def test_the_comparison_can_fail() -> None:
    assert (
        list(differences({"t": 1, "state": "idle", "run": "a"}, {"t": 1, "state": "idle", "run": "b", "new": 0})) == []
    )
    for answered in ({"t": 2}, {"t": None}, {"t": True}, {}):
        assert len(list(differences({"t": 1}, answered))) == 1
    assert len(list(differences({"lease": {"state": "idle"}}, {"lease": {"state": "working"}}))) == 1


def code() -> set[str]:
    """Every word in code type, and every name in the session."""
    spans = re.findall(r"`([^`\n]+)`", PAGE)
    return {word for span in spans for word in re.findall(r"[\w-]+", span)} | set(re.findall(r'"(\w+)":', PAGE))


@pytest.mark.parametrize(
    "schema", ["Join", "Joined", "Lease", "Answer", "Progress", "Offset", "Acknowledgement", "Refusal"]
)
def test_every_field_that_a_worker_meets_is_on_the_page(schema: str) -> None:
    fields = DOCUMENT["components"]["schemas"][schema]["properties"]
    nested = fields.get("settings", {}).get("properties", {})
    assert ({*fields, *nested} - code()) == set()


def test_every_header_that_a_worker_sends_is_on_the_page() -> None:
    sent = {
        parameter["name"]
        for path in ("/v1/workers/{worker}/ask", "/v1/tasks/{task}/update", "/v1/tasks/{task}/heartbeat")
        for operation in DOCUMENT["paths"][path].values()
        for parameter in operation["parameters"]
        if parameter["in"] != "path"
    }
    assert len(sent) > 10
    assert sent - code() == set()


def test_every_null_is_explained() -> None:
    explained = PAGE.partition("## Every null")[2].partition("\n## ")[0]
    for schema in ("Join", "Lease", "Extended", "Progress", "Acknowledgement"):
        for name, facts in DOCUMENT["components"]["schemas"][schema]["properties"].items():
            assert "null" not in facts.get("type", ()) or f"`{name}`" in explained, name


def test_every_refusal_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\b[45]\d\d `(\w+)`", PAGE))
    assert len(named) > 10
    assert named <= KINDS.keys()
    for status, word in re.findall(r"\b([45]\d\d) `(\w+)`", PAGE):
        assert KINDS[word].status == int(status)
