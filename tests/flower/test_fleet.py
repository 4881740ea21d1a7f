"""A fleet that misbehaves: nodes that are slow, die, hang, come late, err; and what the coordinator makes of it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.common.constant import ErrorCode

from offbeat.errors import OffbeatError
from offbeat.storage.ledger import Ledger
from tests.flower.fake import X_0, FakeGrid, Node, error, pushed, reply, start, trained

pytestmark = pytest.mark.slow


def kinds(folder: Path, kind: str) -> list[Any]:
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        return list(ledger.rows(kind))


def never(_message: Message, _node: int) -> None:
    """A node that hangs."""


def test_nobody_is_waited_for() -> None:
    grid = FakeGrid({1: Node(1.0), 2: Node(10_000.0)})
    result = start(grid, epochs=20)
    assert {applied.node for applied in result.history} == {1}
    assert grid.at < 25
    assert [sent.node for sent in grid.sent].count(2) == 1


def test_a_slow_node_is_stale_by_what_was_published_meanwhile() -> None:
    result = start(FakeGrid({1: Node(1.0), 2: Node(5.5)}), epochs=6, alpha=0.6, staleness_fn="polynomial:0.5")
    slow = [applied for applied in result.history if applied.node == 2]
    assert [(a.t, a.tau, a.staleness) for a in slow] == [(6, 0, 5)]
    assert slow[0].alpha_t == pytest.approx(0.6 * 6**-0.5)
    assert result.summary["staleness_largest"] == 5


def test_no_more_tasks_are_in_flight_than_may_be() -> None:
    grid = FakeGrid({number: Node(1.0 + number / 10) for number in range(1, 9)})
    start(grid, epochs=30, in_flight_max=3)
    assert max(grid.in_flight) == 3
    assert {sent.node for sent in grid.sent} == set(range(1, 9)), "everybody has a turn"


def test_a_node_that_dies_with_its_task_frees_its_place(tmp_path: Path) -> None:
    grid = FakeGrid({1: Node(1.0), 2: Node(2.0, leaves_at=1.0)})
    result = start(grid, epochs=8, in_flight_max=2, dir=tmp_path / "run", lease_s=1000)
    assert {applied.node for applied in result.history} == {1}
    assert {row.worker for row in kinds(tmp_path / "run", "left")} == {1}, "node 2 is worker 1"
    assert [row.task for row in kinds(tmp_path / "run", "released")] == [2]
    assert [sent.node for sent in grid.sent].count(2) == 1


def test_a_node_that_comes_back_is_the_same_worker_and_goes_on(tmp_path: Path) -> None:
    grid = FakeGrid({1: Node(1.0), 2: Node(1.5, leaves_at=4.0)})
    seen: list[int] = []

    def evaluate(t: int, _arrays: Any) -> None:
        if t == 8:
            grid.nodes[2].leaves_at = 1e9
            seen.append(len(grid.sent))

    result = start(grid, epochs=20, dir=tmp_path / "run", evaluate_fn=evaluate)
    assert any(applied.node == 2 for applied in result.history[8:])
    assert {row.worker for row in kinds(tmp_path / "run", "joined")} == {0, 1}
    assert len(kinds(tmp_path / "run", "joined")) == 3


def test_a_node_that_was_not_seen_for_a_moment_is_sent_nothing_before_it_has_answered() -> None:
    grid = FakeGrid({1: Node(6.0, unseen=(1.0, 2.0)), 2: Node(1.0)})
    result = start(grid, epochs=8)
    assert [sent.at for sent in grid.sent if sent.node == 1][1] >= 6.0
    assert [applied.tau for applied in result.history if applied.node == 1][:1] == [0]


def test_one_task_at_a_time_is_never_stale() -> None:
    grid = FakeGrid({number: Node(1.0) for number in (1, 2, 3)})
    result = start(grid, epochs=10, in_flight_max=1)
    assert [applied.staleness for applied in result.history] == [0] * 10
    assert len({applied.node for applied in result.history}) > 1


def test_a_hanging_node_loses_its_lease_and_gets_nothing_until_its_message_has_expired(tmp_path: Path) -> None:
    grid = FakeGrid({1: Node(answer=never), 2: Node(1.0)})
    result = start(grid, epochs=12, in_flight_max=1, lease_s=3.0, message_ttl_s=8.0, dir=tmp_path / "run", seed=1)
    assert {applied.node for applied in result.history} == {2}
    to_hanging = [sent.at for sent in grid.sent if sent.node == 1]
    assert to_hanging, "with this seed it is triggered"
    released = kinds(tmp_path / "run", "released")
    assert released
    assert {row.worker for row in released} == {0}
    assert all(later - earlier > 8.0 for earlier, later in pairwise(to_hanging))
    first = to_hanging[0]
    assert min(sent.at for sent in grid.sent if sent.at > first) == pytest.approx(first + 3.0, abs=0.3)


def test_a_message_that_nobody_says_has_expired_is_given_up() -> None:
    def silent(message: Message, _node: int) -> None:
        message.metadata.ttl = 1e9  # this Grid never says so

    grid = FakeGrid({1: Node(answer=silent), 2: Node(10.0)})
    start(grid, epochs=12, lease_s=5.0, message_ttl_s=10.0)
    assert [sent.at for sent in grid.sent if sent.node == 1][:2] == [0.0, pytest.approx(40.0, abs=1.0)]


def test_a_reply_after_the_lease_is_still_mixed_with_its_true_staleness() -> None:
    grid = FakeGrid({1: Node(6.25), 2: Node(1.0)})
    result = start(grid, epochs=7, lease_s=2.0, message_ttl_s=10.0, alpha=0.6, staleness_fn="polynomial:0.5")
    late = [applied for applied in result.history if applied.node == 1]
    assert [(a.t, a.tau, a.staleness) for a in late] == [(7, 0, 6)]
    assert late[0].alpha_t == pytest.approx(0.6 * 7**-0.5)


def test_a_reply_after_the_lease_that_is_too_stale_is_refused(tmp_path: Path) -> None:
    grid = FakeGrid({1: Node(6.25), 2: Node(1.0)})
    options = {"staleness_policy": "reject", "staleness_max": 3}
    result = start(grid, epochs=9, lease_s=2.0, message_ttl_s=10.0, dir=tmp_path / "run", **options)
    assert {applied.node for applied in result.history} == {2}
    assert result.summary["rejected"] == 1
    assert [row.outcome for row in kinds(tmp_path / "run", "decided") if row.worker == 0] == ["too_stale"]


def test_a_node_that_joins_late_starts_from_the_newest_version() -> None:
    grid = FakeGrid({1: Node(1.0), 2: Node(0.75, joins_at=5.0)})
    result = start(grid, epochs=12)
    first = next(applied for applied in result.history if applied.node == 2)
    assert first.tau >= 4
    assert first.staleness <= 1


def test_a_run_begins_before_anybody_is_there() -> None:
    grid = FakeGrid({1: Node(1.0, joins_at=30.0)})
    assert start(grid, epochs=2).summary["t"] == 2


def test_a_reply_is_taken_once_however_often_it_comes() -> None:
    grid = FakeGrid({1: Node(1.0), 2: Node(1.75)})
    grid.echo = True
    result = start(grid, epochs=5, alpha=0.5)
    assert [applied.t for applied in result.history] == [1, 2, 3, 4, 5]
    assert result.arrays["n"].numpy() <= 5
    assert result.summary["applied"] == 5


def test_nan_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def poisoned(message: Message, _node: int) -> Message:
        return reply(message, {"x": np.full(len(X_0), np.nan, np.float32), "n": np.array(0)})

    grid = FakeGrid({1: Node(1.0, answer=poisoned), 2: Node(1.5)})
    result = start(grid, epochs=6, dir=tmp_path / "run", alpha=1.0, staleness_fn="constant")
    x = X_0
    for _ in range(6):
        x = pushed(x, 2)
    assert result.arrays["x"].numpy().tobytes() == x.tobytes()
    assert [row.outcome for row in kinds(tmp_path / "run", "decided") if row.worker == 0] == ["not_finite"] * 5
    assert [row.worker for row in kinds(tmp_path / "run", "quarantined")] == [0]
    assert [sent.node for sent in grid.sent].count(1) == 5


@pytest.mark.parametrize(
    "answer",
    [
        lambda message, _node: error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "ZeroDivisionError: by zero"),
        lambda message, _node: reply(message, {"x": np.zeros(2, np.float32), "n": np.array(0)}),
        lambda message, _node: reply(message, {"x": X_0, "n": np.array(0)}, samples=0),
        lambda message, _node: reply(message, {"x": X_0, "n": np.array(0)}, samples=float("nan")),
        lambda message, _node: reply(message, {"x": X_0, "n": np.array(0)}, samples=[1, 2]),
    ],
    ids=["it raises", "wrong shape", "no samples", "NaN samples", "a list of samples"],
)
def test_a_node_that_errs_again_and_again_gets_no_more_tasks(answer: Any, tmp_path: Path) -> None:
    grid = FakeGrid({1: Node(0.5, answer=answer), 2: Node(1.0)})
    result = start(grid, epochs=10, dir=tmp_path / "run")
    assert {applied.node for applied in result.history} == {2}
    assert [sent.node for sent in grid.sent].count(1) == 5
    assert [row.worker for row in kinds(tmp_path / "run", "quarantined")] == [0]


def test_a_reply_without_metrics_counts_as_one_sample() -> None:
    def bare(message: Message, node: int) -> Message:
        answer = trained(message, node)
        del answer.content["metrics"]
        return answer

    assert start(FakeGrid({1: Node(answer=bare)}), epochs=2).summary["applied"] == 2


def test_a_reply_with_two_models_is_refused() -> None:
    def double(message: Message, node: int) -> Message:
        answer = trained(message, node)
        answer.content["more"] = answer.content["arrays"]
        return answer

    with pytest.raises(OffbeatError, match="holds 2 ArrayRecords"):
        start(FakeGrid({1: Node(answer=double)}), epochs=2)


def test_where_every_node_errs_the_run_says_why() -> None:
    def broken(message: Message, _node: int) -> Message:
        return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "NameError: name 'net' is not defined")

    with pytest.raises(OffbeatError, match=r"every connected node \(2\).*name 'net' is not defined"):
        start(FakeGrid({1: Node(answer=broken), 2: Node(answer=broken)}), epochs=3)


def test_a_message_that_cannot_be_pushed_is_tried_again() -> None:
    grid = FakeGrid({1: Node(1.0), 2: Node(1.5)})
    push: Any = grid.push_messages
    refusals: list[Any] = [[], [None], []]
    grid.push_messages = lambda messages: refusals.pop() if refusals else push(messages)  # type: ignore[method-assign]
    result = start(grid, epochs=6)
    assert result.summary["applied"] == 6
    assert not refusals


def test_messages_carry_what_flower_s_own_do() -> None:
    grid = FakeGrid({1: Node(1.0)})
    start(grid, epochs=3, rho=0.05, lease_s=7.0, train_config=ConfigRecord({"lr": 0.5}))
    configs = [dict(sent.message.content["config"]) for sent in grid.sent]
    assert configs == [{"lr": 0.5, "rho": 0.05, "server-round": n} for n in (1, 2, 3)]
    assert {sent.message.metadata.message_type for sent in grid.sent} == {"train"}
    assert {sent.message.metadata.ttl for sent in grid.sent} == {14.0}


def test_records_may_have_other_names() -> None:
    def answer(message: Message, node: int) -> Message:
        assert "lr" in message.content["settings"]
        message.content["arrays"] = message.content["model"]
        return trained(message, node)

    keys = {"arrayrecord_key": "model", "configrecord_key": "settings", "weighted_by_key": "size"}
    assert (
        start(FakeGrid({1: Node(answer=answer)}), epochs=2, train_config=ConfigRecord({"lr": 1.0}), **keys).summary["t"]
        == 2
    )


def test_versions_are_evaluated_and_a_target_ends_the_run() -> None:
    seen: dict[int, float] = {}

    def evaluate(t: int, arrays: Any) -> MetricRecord | None:
        seen[t] = float(arrays["n"].numpy())
        return MetricRecord({"count": seen[t], "all": [1.0, 2.0]})

    result = start(FakeGrid({1: Node(1.0)}), target="count>=4", evaluate_every=2, evaluate_fn=evaluate)
    assert seen == {0: 0, 2: 2, 4: 4}
    assert {t: metrics["count"] for t, metrics in result.evaluate_metrics_serverapp.items()} == seen
    assert result.summary["ended"] == "target count>=4 reached at epoch 4"
    assert result.summary["count"] == 4
    assert "all" not in result.summary


def test_nodes_train_while_a_version_is_evaluated() -> None:
    grid = FakeGrid({1: Node(1.0)})
    waiting: list[int] = []
    start(grid, epochs=4, evaluate_every=1, evaluate_fn=lambda _t, _arrays: waiting.append(len(grid.open)))
    assert waiting == [0, 1, 1, 1, 0]
