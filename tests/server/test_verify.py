"""`verify` says what it checked and what it replayed, and finds what is wrong."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import offbeat
from offbeat.cli import main
from offbeat.server.verify import sentence, verify
from offbeat.worker.journal import Journal
from tests.server.serving import Running, Worker, serving

SETTINGS = {"evaluate_every": 1000}


def worked(running: Running, tasks: int, journal: Journal | None = None) -> None:
    worker, run = Worker(running), running.server.begun.run_id
    for _ in range(tasks):
        lease = worker.lease()
        data = worker.train(lease)
        answer = worker.push(lease["task"], data).json
        if journal is not None:
            journal.note(run, lease["task"], worker.head(data)["Offbeat-Digest"], answer["outcome"], answer["head"])


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    return done.exit_code, done.stdout


def test_it_says_how_many_decisions_and_updates_it_went_through(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS, {"checkpoint_every": 5}) as running:
        worked(running, 23)
    facts = verify(tmp_path / "run")
    assert (facts["decisions"], facts["chain"], facts["agrees"]) == (23, "whole", True)
    assert 0 < facts["replayed"] <= 23 - facts["from"]
    status, text = said(tmp_path / "run")
    assert status == 0
    wanted = f"replayed {facts['replayed']} updates from epoch {facts['from']}: the same bits."
    assert text.strip() == f"Checked 23 decisions in an unbroken chain; {wanted}"


def test_where_all_updates_are_kept_it_replays_from_the_first_model(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS, {"checkpoint_every": 3, "keep_updates": "all"}) as running:
        worked(running, 12)
    facts = verify(tmp_path / "run")
    assert (facts["replayed"], facts["from"], facts["agrees"]) == (12, 0, True)


@pytest.mark.parametrize(
    "tampered", ["UPDATE events SET new = 0.61", "DELETE FROM events", "UPDATE events SET at = at + 1"]
)
def test_a_changed_decision_is_found_and_named(tmp_path: Path, tampered: str) -> None:
    """Also one whose update was pruned long ago."""
    with serving(tmp_path, SETTINGS, {"checkpoint_every": 3}) as running:
        worked(running, 12)
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        (row,) = ledger.execute("SELECT sequence FROM events WHERE kind = 'decided' AND decision = 1").fetchone()
        ledger.execute(f"{tampered} WHERE sequence = {row}")
        ledger.commit()
    status, text = said(tmp_path / "run")
    assert status == 1
    assert "in a BROKEN chain" in text
    assert f"WRONG: the chain of the ledger: rows {row}" in text or f"to {row}" in text or "they are not those" in text


def test_nothing_is_called_the_same_where_nothing_was_replayed() -> None:
    facts: dict[str, Any] = {"decisions": 300, "chain": "whole", "replayed": 0, "from": 300, "t": 300}
    text = sentence(facts | {"agrees": True, "wrong": []})
    assert "same" not in text
    assert "no update is kept to replay" in text


def test_rows_that_are_missing_at_the_end_are_found(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running:
        worked(running, 5)
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        (last,) = ledger.execute("SELECT max(last) FROM commits").fetchone()
        ledger.execute("DELETE FROM commits WHERE last = ?", (last,))
        (before,) = ledger.execute("SELECT max(last) FROM commits").fetchone()
        ledger.execute("DELETE FROM events WHERE sequence > ?", (before,))
        ledger.commit()
    facts = verify(tmp_path / "run")
    assert facts["chain"] == "whole"
    assert any("rows at its end are missing" in wrong for wrong in facts["wrong"])
    assert any("is of a ledger with other rows" in wrong for wrong in facts["wrong"])


def test_a_journal_is_looked_up(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running, closing(Journal(tmp_path / "journal")) as journal:
        worked(running, 4, journal)
    status, text = said(tmp_path / "run", "--journal", tmp_path / "journal")
    assert status == 0
    assert "4 acknowledgements of the journal looked up" in text
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    for number, change, says in [
        (0, {"task": 99}, "the ledger applied it 0 times"),
        (1, {"digest": "0" * 64}, "the ledger has another update under this number"),
        (2, {"head": "0" * 64}, "does not have the head that came with the acknowledgement"),
    ]:
        changed = [line | change if n == number else line for n, line in enumerate(lines)]
        (tmp_path / "changed").write_text("".join(json.dumps(line) + "\n" for line in changed))
        status, text = said(tmp_path / "run", "--journal", tmp_path / "changed")
        assert (status, says in text) == (1, True)


@pytest.mark.parametrize("text", ["no journal", '{"run": 1}\n', "[1]\n"])
def test_what_is_no_journal_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    with serving(tmp_path, SETTINGS) as running:
        worked(running, 1)
    (tmp_path / "j").write_text(text)
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "run"), "--journal", str(tmp_path / "j")])
    assert done.exit_code == 2
    assert "journal" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_simulated_run_is_verified(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text((Path(__file__).parents[1] / "golden" / "line.py").read_text())
    offbeat.simulate(str(tmp_path / "line.py"), dir=tmp_path / "run", epochs=30, seed=1)
    status, text = said(tmp_path / "run")
    assert status == 0
    assert text.startswith("Checked 30 decisions in an unbroken chain; a simulation keeps no updates to replay")
    file = tmp_path / "run" / "x.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, text = said(tmp_path / "run")
    assert (status, "is not the file that the run wrote" in text) == (1, True)
