"""FedAsync from the outside: what it takes, what it refuses, what it gives back."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result as FlowerResult

import offbeat
import offbeat.flower
from offbeat.errors import InvalidValue
from offbeat.flower import FedAsync
from offbeat.flower.flower_run import FlowerRun
from tests.flower.fake import FakeGrid, Node, initial, start, trained

pytestmark = pytest.mark.slow


def test_the_names_are_there() -> None:
    assert sorted(offbeat.flower.__all__) == offbeat.flower.__all__
    assert all(getattr(offbeat.flower, name) for name in offbeat.flower.__all__)
    assert offbeat.flower.FedAsync is FedAsync
    with pytest.raises(AttributeError, match="no attribute 'FedSync'"):
        offbeat.flower.FedSync  # noqa: B018


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"alpha": 2.0}, "alpha"),
        ({"in_flight_max": 0}, "in_flight_max"),
        ({"epochs": 0}, "epochs"),
        ({"staleness_fn": "linear"}, "staleness"),
        ({"staleness_policy": "reject"}, "needs staleness_max"),
        ({"in_flight_maks": 3}, "did you mean in_flight_max"),
        ({"devices": 3}, "devices is no setting of FedAsync on Flower"),
        ({"batch_size": 3}, "batch_size is no setting"),
        ({"rule": "fedsgd"}, "rule 'fedsgd' is unknown"),
        ({"rule": "sgd"}, "trains on one machine"),
        ({"rule": offbeat.fedbuff(3), "alpha": 0.5}, "alpha belongs to a rule that is given by its name"),
        ({"poll_s": 0}, "poll_s is 0 but must be > 0"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"message_ttl_s": -1.0}, "message_ttl_s"),
    ],
)
def test_wrong_settings_are_refused_at_once(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidValue, match=what):
        FedAsync(**options)


def test_what_could_never_end_is_refused() -> None:
    with pytest.raises(InvalidValue, match="give evaluate_fn"):
        start(FakeGrid({1: Node()}), target="accuracy>=0.9")
    with pytest.raises(InvalidValue, match="lease_s is infinite"):
        start(FakeGrid({1: Node()}), epochs=1, timeout=float("inf"))


def test_rounds_are_epochs_and_the_timeout_is_the_lease_where_nothing_else_is_said() -> None:
    result = start(FakeGrid({1: Node()}), num_rounds=4, timeout=20)
    assert result.summary["t"] == 4
    assert result.summary["settings"]["lease_s"] == 20
    result = start(FakeGrid({1: Node()}), num_rounds=4, timeout=20, epochs=2, lease_s=30.0)
    assert result.summary["t"] == 2
    assert result.summary["settings"]["lease_s"] == 30


def test_a_run_ends_in_time() -> None:
    grid = FakeGrid({1: Node(answer=lambda _message, _node: None)})
    result = start(grid, until_s=12.0)
    assert result.summary["ended"] == "12 s"
    assert grid.at == pytest.approx(12.0, abs=0.5)
    assert result.arrays["x"].numpy().tobytes() == initial()["x"].numpy().tobytes()


def test_the_result_is_flower_s_and_more() -> None:
    result = start(FakeGrid({1: Node()}), epochs=3, evaluate_fn=lambda t, _: MetricRecord({"loss": 1.0 / (t + 1)}))
    assert isinstance(result, FlowerResult)
    assert "ServerApp-side Evaluate Metrics" in repr(result)
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert {"t", "applied", "staleness_mean", "x_sha256", "loss", "settings"} <= result.summary.keys()
    assert [applied.t for applied in result.history] == [1, 2, 3]


def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = start(FakeGrid({1: Node()}), epochs=2)
    assert result.summary["dir"] is None
    assert not list(tmp_path.iterdir())


def test_what_is_not_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr.offbeat"):
        start(FakeGrid({1: Node()}), epochs=1, evaluate_config=ConfigRecord({"a": 1}))
    assert "evaluate_config is not used" in caplog.text
    assert "[epoch 1/1] node 1, tau 0, staleness 0, alpha_t 0.6000" in caplog.text


def test_no_version_is_kept_longer_than_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that uses x_tau keeps one model per message under way, and no more."""
    kept: list[int] = []
    forget = FlowerRun.forget

    def counted(run: FlowerRun, task: int) -> None:
        forget(run, task)
        kept.append(len(run._bases))

    monkeypatch.setattr(FlowerRun, "forget", counted)
    start(FakeGrid({1: Node(1.0), 2: Node(1.5), 3: Node(3.0)}), "delta", epochs=20)
    assert max(kept) <= 3


def test_several_samples_weigh_more() -> None:
    """FedAvg: 30 and 10 samples."""

    def sized(samples: int) -> Any:
        def answer(message: Message, node: int) -> Message:
            replied = trained(message, node)
            replied.content["metrics"]["num-examples"] = samples
            return replied

        return answer

    result = start(FakeGrid({1: Node(answer=sized(30)), 8: Node(answer=sized(10))}), "fedavg:2", epochs=1)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((30 * 1 + 10 * 8) / 40)
    x = initial()["x"].numpy()
    expected = x * 0.75 + (30 * 1 + 10 * 8) / 40 / 7
    assert result.arrays["x"].numpy() == pytest.approx(expected, abs=1e-6)
