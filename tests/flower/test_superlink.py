"""A real SuperLink and four SuperNodes of different speed, one of them killed with its task in hand."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from offbeat.storage.ledger import Ledger
from tests.flower.fake import X_0, one_file, pushed
from tests.flower.superlink import SuperLink, end, until

pytestmark = pytest.mark.slow

APP = Path(__file__).parent / "line_app"
DELAYS_S = (0.0, 0.5, 2.0, 1000.0)
"""The last one is killed before it answers."""


def leased(folder: Path) -> set[int]:
    """Workers that were given a task."""
    if not (folder / "ledger.sqlite").exists():
        return set()
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        return {row.worker or 0 for row in ledger.rows("leased")}


def test_four_nodes_of_different_speed_one_of_them_killed(tmp_path: Path) -> None:
    folder, told = tmp_path / "run", tmp_path / "run.json"
    with SuperLink(tmp_path / "fleet") as link:
        nodes = [link.node(partition_id=i, delay_s=delay_s) for i, delay_s in enumerate(DELAYS_S)]
        link.run(APP, dir=str(folder))
        try:
            until(lambda: len(leased(folder)) == len(nodes), "every node has a task")
            end(nodes[-1], signal.SIGKILL)
            until(told.exists, "the run is finished")
        except TimeoutError as error:
            raise AssertionError(link.logs()) from error
    facts = json.loads(told.read_text())
    check_arithmetic(facts["history"], facts["partitions"], facts["x"])
    assert set(facts["partitions"]) == {0, 1, 2}, "all but the dead one contributed, and nobody was waited for"
    assert facts["summary"]["staleness_largest"] >= 1
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        dead = leased(folder) - {row.worker for row in ledger.rows("decided")}
        assert {row.worker for row in ledger.rows("released")} >= dead
        assert len(dead) == 1


def check_arithmetic(history: list[list[float]], partitions: list[int], x_hex: str) -> None:
    """Every update, from the version that it says, mixed as the paper's algorithm in one file mixes it."""
    oracle, versions = one_file(), [X_0]
    for (t, _node, tau, staleness, alpha_t, _at), partition in zip(history, partitions, strict=True):
        assert (t, staleness) == (len(versions), len(versions) - 1 - tau)
        x_new = pushed(versions[int(tau)], partition)
        x, expected = oracle.updater(versions[-1], x_new, int(tau), int(t), 0.6, oracle.polynomial(0.5))
        assert alpha_t == expected
        versions.append(x)
    assert np.asarray(versions[-1], np.float32).tobytes().hex() == x_hex
