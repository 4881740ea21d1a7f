"""May a device train: its conditions on injected facts, gates as real commands, and the facts of this very machine."""

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.errors import InvalidValue, MissingExtra
from offbeat.worker import eligibility
from offbeat.worker.eligibility import Condition, Eligibility, System, conditions_of

ALL = frozenset(Condition)


@dataclass
class Facts:
    """A device as a test wants it."""

    load: float = 0.0
    mains: bool | None = True
    costs: bool = False

    def busy(self) -> float:
        return self.load

    def plugged_in(self) -> bool | None:
        return self.mains

    def metered(self) -> bool:
        return self.costs


class Broken(Facts):
    """A device that cannot be asked."""

    def busy(self) -> float:
        raise PermissionError(13, "/proc is closed")


def program(folder: Path, text: str, name: str = "gate") -> str:
    """An executable file; its path needs no quotes."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# --- conditions ------------------------------------------------------------------------------------------------------


def test_conditions_are_read_by_name() -> None:
    assert conditions_of("idle,plugged-in,unmetered") == ALL
    assert conditions_of(" idle , idle ") == {Condition.IDLE}
    assert conditions_of("") == conditions_of(" ") == frozenset()


@pytest.mark.parametrize("text", ["asleep", "idle,", "Idle", "idle;plugged-in", "idle plugged-in"])
def test_an_unknown_condition_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(InvalidValue, match="is no condition; use some of idle, plugged-in, unmetered"):
        conditions_of(text)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(), None),
        (Facts(load=20.0), None),
        (Facts(load=20.5), "other processes use 20 % of the processors, above 20 %"),
        (Facts(mains=False), "the device runs on battery"),
        (Facts(mains=None), "does not tell whether it is plugged in; leave plugged-in out"),
        (Facts(costs=True), "the network is metered"),
        (Broken(), "cannot tell whether the device is idle: .*/proc is closed; leave it out"),
    ],
)
def test_each_condition_holds_a_device_back(facts: Facts, reason: str | None) -> None:
    why = Eligibility(ALL, probe=facts).why_not()
    assert (why is None) == (reason is None)
    assert re.fullmatch(f".*{reason or ''}.*", why or ""), "one line that says it"
    assert Eligibility(probe=facts).why_not() is None


def test_only_what_is_asked_for_counts() -> None:
    facts = Facts(load=99.0, mains=False, costs=False)
    assert Eligibility({Condition.UNMETERED}, probe=facts).why_not() is None
    assert Eligibility({Condition.IDLE}, probe=facts, busy_max=99.0).why_not() is None
    assert Eligibility({Condition.IDLE}, probe=facts, busy_max=98.0).why_not() is not None


def test_every_call_looks_again() -> None:
    facts = Facts()
    eligible = Eligibility(ALL, probe=facts)
    assert eligible.why_not() is None
    facts.mains = False
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


def test_a_gate_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    gate = program(tmp_path, f"sleep 60 &\necho $! $$ > {pids}\necho waiting\nwait")
    at = time.monotonic()
    why = Eligibility(gate=gate, gate_s=2.0).why_not()
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


def test_a_gate_that_never_stops_talking_takes_no_memory(tmp_path: Path) -> None:
    gate = program(tmp_path, "yes " + "x" * 300)
    why = Eligibility(gate=gate, gate_s=2.0).why_not()
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


def test_a_gate_is_asked_last(tmp_path: Path) -> None:
    gate = program(tmp_path, f"touch {tmp_path / 'asked'}")
    assert Eligibility({Condition.PLUGGED_IN}, gate, probe=Facts(mains=False)).why_not() is not None
    assert not (tmp_path / "asked").exists()


# --- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine_answers_within_its_limits() -> None:
    at, system = time.monotonic(), System(measure_s=0.2)
    assert 0.0 <= system.busy() <= 100.0
    assert system.plugged_in() in (True, False, None)
    assert system.metered() in (True, False)
    assert time.monotonic() - at < 30
    why = Eligibility(ALL, probe=system).why_not()
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
    assert System(measure_s=0.25).busy() == pytest.approx(others)


@pytest.mark.parametrize(
    ("battery", "answer"),
    [(None, True), (SimpleNamespace(power_plugged=True), True), (SimpleNamespace(power_plugged=False), False)],
)
def test_mains_power(battery: object, answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_psutil(monkeypatch, sensors_battery=lambda: battery)
    assert System().plugged_in() is answer


def test_a_system_that_knows_of_no_battery_is_on_mains_power(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise FileNotFoundError("/sys/class/power_supply")

    fake_psutil(monkeypatch)
    assert System().plugged_in() is True
    fake_psutil(monkeypatch, sensors_battery=hidden)
    assert System().plugged_in() is True
    fake_psutil(monkeypatch, sensors_battery=lambda: SimpleNamespace(power_plugged=None))
    assert System().plugged_in() is None


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
    assert System().metered() is metered


def test_without_networkmanager_every_network_is_unmetered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert System().metered() is False


def test_missing_psutil_is_told_at_once_and_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    for needs in (Condition.IDLE, Condition.PLUGGED_IN):
        with pytest.raises(MissingExtra, match=r"psutil is not installed; run: pip install 'offbeat\[work\]'"):
            Eligibility({needs})
    Eligibility({Condition.UNMETERED}).why_not()
    assert Eligibility().why_not() is None
