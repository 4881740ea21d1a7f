"""May a device train: its conditions on injected facts, gates as real commands, and the facts of this very machine."""

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.errors import InvalidValue, MissingExtra
from offbeat.worker import eligibility
from offbeat.worker.eligibility import CONDITIONS, Eligibility, busy, conditions_of, metered, plugged_in

ALL = frozenset(CONDITIONS)


def device(
    monkeypatch: pytest.MonkeyPatch, *, load: float | Exception = 0.0, mains: bool | None = True, costs: bool = False
) -> None:
    """Make this machine a device as a test wants it."""

    def busy() -> float:
        if isinstance(load, Exception):
            raise load
        return load

    monkeypatch.setattr(eligibility, "busy", busy)
    monkeypatch.setattr(eligibility, "plugged_in", lambda: mains)
    monkeypatch.setattr(eligibility, "metered", lambda: costs)


def program(folder: Path, text: str, name: str = "gate") -> str:
    """An executable file; its path needs no quotes."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# --- conditions ------------------------------------------------------------------------------------------------------


def test_conditions_are_read_by_name() -> None:
    assert conditions_of("idle,plugged-in,unmetered") == ALL
    assert conditions_of(" idle , idle ") == {"idle"}
    assert conditions_of("") == conditions_of(" ") == frozenset()


@pytest.mark.parametrize("text", ["asleep", "idle,", "Idle", "idle;plugged-in", "idle plugged-in"])
def test_an_unknown_condition_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(InvalidValue, match="is no condition; use some of idle, plugged-in, unmetered"):
        conditions_of(text)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"load": 20.0}, None),
        ({"load": 20.5}, "other processes use 20 % of the processors, above 20 %"),
        ({"mains": False}, "the device runs on battery"),
        ({"mains": None}, "does not tell whether it is plugged in; leave plugged-in out"),
        ({"costs": True}, "the network is metered"),
        (
            {"load": PermissionError(13, "/proc is closed")},
            "cannot tell whether the device is idle: .*/proc is closed; leave it out",
        ),
    ],
)
def test_each_condition_holds_a_device_back(
    facts: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(monkeypatch, **facts)
    why = Eligibility(ALL).why_not()
    assert (why is None) == (reason is None)
    assert re.fullmatch(f".*{reason or ''}.*", why or ""), "one line that says it"
    assert Eligibility().why_not() is None


def test_only_what_is_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, load=99.0, mains=False, costs=False)
    assert Eligibility({"unmetered"}).why_not() is None
    for busy_max, eligible in ((99.0, True), (98.0, False)):
        monkeypatch.setattr(eligibility, "BUSY_MAX", busy_max)
        assert (Eligibility({"idle"}).why_not() is None) is eligible


def test_every_call_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    eligible = Eligibility(ALL)
    assert eligible.why_not() is None
    device(monkeypatch, mains=False)
    assert eligible.why_not() is not None


# --- gates -----------------------------------------------------------------------------------------------------------


def test_a_gate_of_status_0_lets_through(tmp_path: Path) -> None:
    assert Eligibility(gate=program(tmp_path, "echo fine")).why_not() is None


def test_a_gate_says_why_not_in_its_first_line(tmp_path: Path) -> None:
    gate = program(tmp_path, "echo; echo 'it is night' >&2; echo more; exit 3")
    assert Eligibility(gate=gate).why_not() == f"the gate {gate} said no (status 3): it is night"
    silent = program(tmp_path, "exit 1", "silent")
    assert Eligibility(gate=silent).why_not() == f"the gate {silent} said no (status 1)"


def test_a_gate_gets_its_words_and_no_shell() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(1)"
    why = Eligibility(gate=f'{sys.executable} -c "{code}" "two words" $HOME ; *').why_not()
    assert why is not None
    assert why.endswith("['two words', '$HOME', ';', '*']")


def test_a_gate_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligibility, "GATE_S", 2.0)
    pids = tmp_path / "pids"
    gate = program(tmp_path, f"sleep 60 &\necho $! $$ > {pids}\necho waiting\nwait")
    at = time.monotonic()
    why = Eligibility(gate=gate).why_not()
    assert time.monotonic() - at < 20
    assert why == f"the gate {gate} took longer than 2 s: waiting"
    for pid in map(int, pids.read_text().split()):
        assert _ends(pid)


def _ends(pid: int) -> bool:
    """Whoever adopts it may take a moment to bury it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        os.sched_yield()
    return False


def test_a_gate_may_leave_somebody_behind(tmp_path: Path) -> None:
    """Who still holds its output open, so that waiting for the end of the output would take a minute."""
    pid = tmp_path / "pid"
    gate = program(tmp_path, f"sleep 60 &\necho $! > {pid}\necho no\nexit 1")
    at = time.monotonic()
    try:
        why = Eligibility(gate=gate).why_not()
        assert time.monotonic() - at < 20
        assert why is not None
        assert why.endswith(": no")
    finally:
        os.kill(int(pid.read_text()), 9)


def test_a_gate_that_never_stops_talking_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "GATE_S", 2.0)
    gate = program(tmp_path, "yes " + "x" * 300)
    why = Eligibility(gate=gate).why_not()
    assert why == f"the gate {gate} took longer than 2 s: " + "x" * 200


def test_a_gate_reads_no_terminal(tmp_path: Path) -> None:
    assert Eligibility(gate=program(tmp_path, "cat")).why_not() is None


def test_a_gate_that_went_away_is_a_reason(tmp_path: Path) -> None:
    eligible = Eligibility(gate=program(tmp_path, "exit 0"))
    (tmp_path / "gate").unlink()
    why = eligible.why_not()
    assert why is not None
    assert why.endswith("cannot be run: No such file or directory")


@pytest.mark.parametrize("gate", ["", "  ", "no-such-program-anywhere", "'unclosed"])
def test_a_gate_that_can_never_run_is_refused_at_once(gate: str) -> None:
    with pytest.raises(InvalidValue, match="the gate"):
        Eligibility(gate=gate)


def test_a_gate_is_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, mains=False)
    gate = program(tmp_path, f"touch {tmp_path / 'asked'}")
    assert Eligibility({"plugged-in"}, gate).why_not() is not None
    assert not (tmp_path / "asked").exists()


# --- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine_answers_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "MEASURE_S", 0.2)
    at = time.monotonic()
    assert 0.0 <= busy() <= 100.0
    assert plugged_in() in (True, False, None)
    assert metered() in (True, False)
    assert time.monotonic() - at < 30
    why = Eligibility(ALL).why_not()
    assert why is None or "\n" not in why


def fake_psutil(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(**functions))


@pytest.mark.parametrize(("everyone", "own", "others"), [(60.0, 0.0, 60.0), (60.0, 2.0, 10.0), (40.0, 2.0, 0.0)])
def test_what_this_process_does_itself_is_not_counted(
    everyone: float, own: float, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four processors, say, are ours: half of what the system sees."""
    clock = SimpleNamespace(at=100.0, own=7.0)

    def cpu_percent(interval: float) -> float:
        clock.at, clock.own = clock.at + interval, clock.own + own * interval
        return everyone

    fake_psutil(monkeypatch, cpu_percent=cpu_percent)
    times = SimpleNamespace(perf_counter=lambda: clock.at, process_time=lambda: clock.own)
    monkeypatch.setattr(eligibility, "time", times)
    monkeypatch.setattr(eligibility, "os", SimpleNamespace(cpu_count=lambda: 4))
    monkeypatch.setattr(eligibility, "MEASURE_S", 0.25)
    assert busy() == pytest.approx(others)


@pytest.mark.parametrize(
    ("battery", "answer"),
    [(None, True), (SimpleNamespace(power_plugged=True), True), (SimpleNamespace(power_plugged=False), False)],
)
def test_mains_power(battery: object, answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_psutil(monkeypatch, sensors_battery=lambda: battery)
    assert plugged_in() is answer


def test_a_system_that_knows_of_no_battery_is_on_mains_power(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise FileNotFoundError("/sys/class/power_supply")

    fake_psutil(monkeypatch)
    assert plugged_in() is True
    fake_psutil(monkeypatch, sensors_battery=hidden)
    assert plugged_in() is True
    fake_psutil(monkeypatch, sensors_battery=lambda: SimpleNamespace(power_plugged=None))
    assert plugged_in() is None


@pytest.mark.parametrize(
    ("says", "metered"),
    [
        ("echo GENERAL.METERED:no; echo; echo 'GENERAL.METERED:yes (guessed)'", True),
        ("echo GENERAL.METERED:yes", True),
        ("echo 'GENERAL.METERED:no (guessed)'; echo; echo GENERAL.METERED:unknown", False),
        ("[ $LC_ALL = C ] && echo GENERAL.METERED:yes", True),
        ("[ \"$*\" = '-t -f GENERAL.METERED dev show' ] && echo GENERAL.METERED:yes", True),
        ("echo 'Error: NetworkManager is not running.' >&2; exit 8", False),
        ("exec sleep 60", False),
    ],
)
def test_networks_are_metered_as_networkmanager_says(
    says: str, metered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, says, "nmcli")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(eligibility, "NMCLI_S", 0.5 if "sleep" in says else 30.0)
    assert eligibility.metered() is metered


def test_without_networkmanager_every_network_is_unmetered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metered() is False


def test_missing_psutil_is_told_at_once_and_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    for needs in ("idle", "plugged-in"):
        with pytest.raises(MissingExtra, match=r"psutil is not installed; run: pip install 'offbeat\[work\]'"):
            Eligibility({needs})
    Eligibility({"unmetered"}).why_not()
    assert Eligibility().why_not() is None
