"""A short soak: what `make soak` does for an hour, done for half a minute; and what its tools can tell."""

import json
from pathlib import Path

import pytest

from tests.soak import report
from tests.soak.__main__ import soaked
from tests.soak.plan import Deed, server_blows, worker_blows
from tests.soak.soak import SoakSettings

SHORT = SoakSettings(30.0, 7, workers=4, liars=1, training_s=0.05)


@pytest.mark.slow
def test_half_a_minute_of_kills_stalls_and_lies_loses_nothing(tmp_path: Path) -> None:
    assert soaked(tmp_path, SHORT, keep=True) == 0
    facts = json.loads((tmp_path / "soak.json").read_text())
    totals = facts["totals"]
    assert facts["failure"] is None
    assert totals["server_killed"] >= 1
    assert totals["workers_killed"] >= 3
    assert totals["acknowledged"] > 20
    assert totals["applied"] >= totals["acknowledged"]
    assert totals["lies"] > 5
    assert totals["health_count"] > 0
    assert (tmp_path / "soak.png").stat().st_size > 1000
    assert "| acknowledged and lost, applied twice | 0, 0 |" in report.markdown(facts)


def test_a_seed_draws_the_same_blows_again() -> None:
    for first, second in ((server_blows(3), server_blows(3)), (worker_blows(3, 12), worker_blows(3, 12))):
        assert [next(first) for _ in range(200)] == [next(second) for _ in range(200)]
    assert next(server_blows(3)) != next(server_blows(4))


def test_an_hour_has_enough_blows() -> None:
    at_s, kills = 0.0, 0
    for blow in server_blows(1):
        at_s += blow.at_s + blow.back_s + 5.0  # a start takes less
        kills += 1
        if at_s > 3600.0:
            break
    assert kills > 200
    in_an_hour = []
    for hit in worker_blows(1, 12):
        if hit.at_s > 3600.0:
            break
        in_an_hour.append(hit.deed)
    assert in_an_hour.count(Deed.KILL) > 1200  # some find nobody at home
    assert in_an_hour.count(Deed.STALL) > 100
