"""The settings that `offbeat init` proposes: valid, explained, and used as they are."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from offbeat.cli.options import SERVER_TABLE, settings_of
from offbeat.cli.serve import _table
from offbeat.cli.tokens import _propose
from offbeat.errors import OffbeatError
from offbeat.server.access import TOKENS, Role, TokenBook
from offbeat.server.settings import AccessSettings, ServerSettings
from offbeat.settings import Settings
from offbeat.worker.settings import trusted
from tests.server.serving import Worker, serving
from tests.server.speaking import file_of, ones, refused
from tests.server.test_access_control import As
from tests.unit.test_access import answer, offbeat, refusal

PROPOSED = {"norm_median_max": 10.0, "norm_policy": "refuse", "bad_updates_max": 5}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return Path(answer("init", tmp_path / "access")["settings"])


def test_it_is_in_the_new_folder_and_has_a_gate(made: Path, tmp_path: Path) -> None:
    assert made == tmp_path / "access" / "settings.toml"
    values = tomllib.loads(made.read_text())
    assert {name: values[name] for name in PROPOSED} == PROPOSED
    settings = settings_of(made, {})
    assert {name: getattr(settings, name) for name in PROPOSED} == PROPOSED


def test_the_next_step_uses_it(tmp_path: Path) -> None:
    result = offbeat("init", tmp_path / "my access")
    assert f"--settings '{tmp_path}/my access/settings.toml'" in result.stdout
    assert "read it before you start" in result.stdout


def test_every_value_is_explained_and_every_line_that_is_switched_off_is_valid(made: Path) -> None:
    lines, known = (
        made.read_text().splitlines(),
        {one.name for kind in (Settings, ServerSettings) for one in fields(kind)},
    )
    switched_off = [
        line.removeprefix("# ") for line in lines if line.startswith("# ") and line[2:].split(" = ")[0] in known
    ]
    assert len(switched_off) == 3
    for number, line in enumerate(lines):
        if line.split(" = ")[0] in known:
            assert lines[number - 1].startswith("# "), f"{line} is not explained"
    made.write_text(
        "\n".join(line.removeprefix("# ") if line.removeprefix("# ") in switched_off else line for line in lines)
    )
    assert settings_of(made, {}).norm_max == 100.0
    limits = ServerSettings(**_table(made, {one.name for one in fields(ServerSettings)}))
    assert (limits.public_names, limits.behind_proxy) == (("fl.example.org",), True)


def test_a_server_takes_it_and_its_gate_works(made: Path, tmp_path: Path) -> None:
    values = tomllib.loads(made.read_text())
    assert values.pop(SERVER_TABLE) == {}
    book = TokenBook(made.with_name(TOKENS))
    token = book.add("root", Role.ADMIN)
    room = {"tasks_per_device": 1000, "in_flight_max": 8000}
    with serving(tmp_path, values | room, access=AccessSettings(made.parent)) as running:
        trust = trusted(made.with_name("ca.pem"))
        worker = Worker(As(running.server, running.folder, running.url, trust, token))
        for _ in range(50):
            assert worker.work(0.5).status == 200
        huge = file_of({name: array * 1e6 for name, array in ones().items()})
        refused(worker.push(worker.lease()["task"], huge), 422, "too_large")
        assert worker.work(0.5).status == 200


def test_one_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "settings.toml"
    mine.write_text("alpha = 0.5\n")
    _propose(mine)
    assert mine.read_text() == "alpha = 0.5\n"
    assert "is not empty" in refusal("init", tmp_path)
    assert mine.read_text() == "alpha = 0.5\n"


def test_renewing_a_certificate_leaves_it_alone(made: Path) -> None:
    made.write_text("alpha = 0.5\n")
    assert offbeat("init", made.parent, "--renew").exit_code == 0
    assert made.read_text() == "alpha = 0.5\n"


def test_where_it_cannot_be_written_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match=r"cannot write .*No such file"):
        _propose(tmp_path / "nowhere" / "settings.toml")
