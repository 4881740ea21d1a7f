"""Bugs that were read in public systems for asynchronous federated learning: each has a test that would catch it here.

Rules kept here:
- One bug, one test, however small; the docstring names the system and what it does.
- The right answer is written out as a number or as the plain formula, never taken from the code under test.
- Left out: bugs of methods that the library does not ship (Zeno++). Those of CA2FL, ACE, FADAS and other rules with
  vectors of their own are in `test_bugs_of_other_rules.py`.
"""

import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import offbeat
from offbeat import Facts, Mix, Rule, Work
from offbeat.core.kernel import Term, Updater, mixed
from offbeat.core.layout import Model, Vector
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, FleetJoined, Outcome, UpdateArrived
from offbeat.protocol.plan import Plan
from offbeat.task import solve, start
from offbeat.torch import Task
from tests.contract.schedule import Arrival, run, same_bits

# --- the weight of an update -----------------------------------------------------------------------------------------


def weight(rule: Rule, staleness: int = 0) -> float:
    return rule.decide(Facts(t=100, tau=99 - staleness), rule.memory)[0].new


def test_alpha_does_not_compound() -> None:
    """Plato multiplies its mixing hyperparameter by s in place, so that every stale update shrinks all later ones."""
    rule = offbeat.fedasync(0.6, offbeat.polynomial(0.5))
    stale_then_fresh = [Arrival(0)] * 20 + [Arrival(20)]
    mixes = run(rule, [0.0], stale_then_fresh, lambda *_: np.ones(1)).mixes
    assert mixes[3].new == pytest.approx(0.3, rel=1e-15)
    assert mixes[-1].new == 0.6


def test_the_weight_is_not_divided_by_the_number_of_devices() -> None:
    """APPFL multiplies alpha_t by 1/num_clients as well."""
    rule = offbeat.fedasync(0.6)
    mixes = run(rule, [0.0], [(t, t % 10) for t in range(30)], lambda *_: np.ones(1), samples=[7] * 10).mixes
    assert {mix.new for mix in mixes} == {0.6}


def test_the_hinge_subtracts_b() -> None:
    """AFL-Lib's hinge adds b to the staleness where it must be subtracted."""
    assert offbeat.hinge(10, 4)(5) == pytest.approx(1 / 11)  # added: 1/91
    assert offbeat.hinge(10, 4)(15) == pytest.approx(1 / 111)  # added: 1/191


def test_the_hinge_adds_one_outside_the_slope() -> None:
    """FedLab puts the 1 inside the bracket: 1/(a*((staleness - b) + 1)), which does not meet 1 at b."""
    assert offbeat.hinge(10, 4)(5) == pytest.approx(1 / 11)  # inside: 1/20
    assert offbeat.hinge(0.1, 4)(5) == pytest.approx(1 / 1.1)  # inside: 5
    assert offbeat.hinge(1e-9, 4)(5) == pytest.approx(1)


@pytest.mark.parametrize("exceeds", [lambda u: 2.0 if u else 1.0, lambda u: 2.0 / (1 + u)])
def test_no_update_weighs_more_than_a_fresh_one(exceeds: Callable[[int], float]) -> None:
    """FLSim divides s by s of the mean staleness, so that weights exceed 1."""
    for build in (offbeat.fedasync, offbeat.delta):
        with pytest.raises(InvalidValue, match="staleness function"):
            build(0.6, exceeds)
    with pytest.raises(InvalidValue, match="staleness function"):
        offbeat.fedbuff(3, staleness_fn=exceeds)


def test_the_weight_is_what_the_user_set() -> None:
    """FedML's asynchronous aggregation weighs by 1/(1 + staleness), whatever was configured."""
    assert weight(offbeat.fedasync(0.3)) == 0.3
    assert weight(offbeat.fedasync(0.3), staleness=3) == 0.3
    assert weight(offbeat.fedasync(0.3, offbeat.polynomial(0.5)), staleness=3) == pytest.approx(0.15)


# --- staleness -------------------------------------------------------------------------------------------------------


def test_staleness_is_not_counted_from_the_last_upload() -> None:
    """APPFL counts from a client's last upload unless told who it is: a late joiner pays for the whole history."""
    rule = offbeat.fedasync(0.6, offbeat.polynomial(0.5))
    arrivals = [Arrival(t, 0) for t in range(50)] + [Arrival(50, 1), Arrival(51, 0), Arrival(50, 1)]
    mixes = run(rule, [0.0], arrivals, lambda *_: np.ones(1)).mixes
    assert mixes[50].new == 0.6  # the first update ever of device 1, from the newest version
    assert mixes[52].new == pytest.approx(0.6 * 3**-0.5)  # two versions in between, one of them its own


def test_staleness_is_not_told_by_anyone() -> None:
    """flower-async takes the staleness from what the client reports about itself."""
    assert {field.name for field in fields(Facts)} == {
        *("t", "tau", "device", "samples", "distance", "count", "applied", "seen", "caches", "weight", "dot")
    }
    assert [Facts(t=9, tau=tau).staleness for tau in (8, 7, 0)] == [0, 1, 8]
    with pytest.raises(InvalidValue, match="tau"):
        Facts(t=9, tau=9)


def test_a_fresh_update_counts_in_full() -> None:
    """NVFlare calls a fresh update's staleness 1, and the paper's text would too: it then gets half, or 2^-a."""
    assert Facts(t=1, tau=0).staleness == 0
    assert weight(offbeat.fedasync(0.6, offbeat.polynomial(0.5))) == 0.6
    assert weight(offbeat.fedbuff(1)) == 1.0


# --- FedBuff ---------------------------------------------------------------------------------------------------------


def test_fedbuff_discounts_by_the_root_of_one_plus_staleness() -> None:
    """NVFlare weighs by 1/(1 + sqrt(staleness)) where the method says 1/sqrt(1 + staleness)."""
    weights = [weight(offbeat.fedbuff(1), staleness) for staleness in (0, 1, 3, 8)]
    assert weights == pytest.approx([1, 2**-0.5, 1 / 2, 1 / 3])  # NVFlare: 1, 1/2, 0.37, 0.26


def test_fedbuff_divides_by_k_once() -> None:
    """AFL-Lib divides the sum of the buffer by K when it is filled and again when it is applied."""
    result = run(offbeat.fedbuff(4), [10.0, -2.0], [Arrival(0)] * 4, lambda x, _: x + 1)
    assert len(result.versions) == 2
    np.testing.assert_allclose(result.x, [11, -1], rtol=1e-6)


# --- mixing ----------------------------------------------------------------------------------------------------------


def test_what_the_server_holds_keeps_its_share() -> None:
    """FedScale averages the pushed models, normalised by their discounts: the model before has no share at all."""
    stale = offbeat.fedasync(0.6, offbeat.polynomial(0.5))
    assert stale.decide(Facts(t=9, tau=5), stale.memory)[0] == pytest.approx(Mix(0.7, 0.3, 0.0, True))
    x_t = run(offbeat.fedasync(0.25), [8.0], [Arrival(0)], lambda *_: np.zeros(1)).x
    assert x_t.tolist() == [6.0]


def test_fedasync_mixes_models_and_not_differences() -> None:
    """APPFL's shipped settings add alpha_t (x_new - x_tau) to the newest model, which is the delta rule."""
    pushed = iter(np.array([[8.0], [4.0]], np.float32))
    result = run(offbeat.fedasync(0.5), [0.0], [Arrival(0), Arrival(0)], lambda *_: next(pushed))
    assert [x.tolist() for x in result.versions] == [[0.0], [4.0], [4.0]]  # differences: 0, 4, 6


def test_pushing_the_same_model_does_not_make_it_grow() -> None:
    """FedML adds the full weights of a client to the model, so that its norm grows with every update."""
    x_0 = np.array([3.0, -4.0], np.float32)
    for rule in (offbeat.fedasync(0.3), offbeat.delta(1.0), offbeat.fedbuff(2), offbeat.fedavg(2)):
        x = run(rule, x_0, [Arrival(0)] * 50, lambda x_tau, _: x_tau).x
        assert np.linalg.norm(x) == pytest.approx(5, rel=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_queued_update_counts(compiled: bool) -> None:
    """Plato mixes only the first of the updates that arrived together."""
    if compiled:
        pytest.importorskip("numba")
    updater, w, out = Updater(compiled=compiled), np.zeros(3, np.float32), np.empty(3, np.float32)
    pushed = [np.full(3, value, np.float32) for value in (8, 4, 2)]
    updater.mix(out, w, [Term(Mix(0.5, 0.5, 0.0, True), x_new) for x_new in pushed])
    assert out.tolist() == [3.0] * 3  # halfway to 8 is 4, halfway to 4 is 4, halfway to 2 is 3
    one_by_one = w.copy()
    for x_new in pushed:
        updater.mix(one_by_one, one_by_one, [Term(Mix(0.5, 0.5, 0.0, True), x_new)])
    assert same_bits(out, one_by_one)


# --- buffers and broken updates --------------------------------------------------------------------------------------


def test_float_buffers_mix_and_whole_numbers_follow_the_newest() -> None:
    """APPFL lets the last client overwrite everything that is not a parameter."""

    def model(value: float, count: int) -> Model:
        arrays = {
            "w": np.array([value], np.float32),
            "mean": np.array([10 * value], np.float32),
            "seen": np.array(count),
        }
        return Model.of(arrays, buffers=("mean", "seen"))

    rule = offbeat.fedasync(0.25)
    mix, _ = rule.decide(Facts(t=1, tau=0), rule.memory)
    assert isinstance(mix, Mix)
    x = mixed(Updater(), model(4, 7), mix, model(8, 3))
    assert (x["w"].tolist(), x["mean"].tolist(), int(x["seen"])) == ([5.0], [50.0], 3)


def test_batch_norm_statistics_of_a_training_mix() -> None:
    """APPFL again, through training: BatchNorm's running mean is a float buffer, its counter is not."""
    rng = np.random.default_rng(1)
    data = [(rng.standard_normal((16, 2), np.float32) + 5, rng.integers(2, size=16))]
    task = Task(lambda: nn.Sequential(nn.BatchNorm1d(2)), nn.functional.cross_entropy, data, batch_size=8)
    x_0 = start(task, 0)
    x_new = solve(task, x_0, Work(0)).x_new
    x = mixed(Updater(), x_0, Mix(0.75, 0.25, 0.0, True), x_new)
    assert x_new["0.running_mean"].min() > 0.5
    np.testing.assert_allclose(x["0.running_mean"], 0.25 * x_new["0.running_mean"], rtol=1e-6)
    assert (int(x_0["0.num_batches_tracked"]), int(x["0.num_batches_tracked"])) == (0, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_broken_update_is_refused(value: float, compiled: bool) -> None:
    """Flower and APPFL mix NaN in: one diverged device ends the training of all."""
    if compiled:
        pytest.importorskip("numba")
    update = Model.of({"w": np.ones(3, np.float32), "b": np.array([value], np.float32)})
    updater = Updater(compiled=compiled)
    finite = updater.finite(update.vector)
    assert math.isfinite(updater.distance(update.vector, np.ones(4, np.float32))) == finite
    c = Coordinator(offbeat.fedasync(0.6), Plan())
    c.handle(FleetJoined(0.0, 1))
    answer, *_ = c.handle(UpdateArrived(1.0, worker=0, task=1, samples=1, gradients=1, finite=finite))
    assert isinstance(answer, AnswerPush)
    assert answer.outcome is Outcome.NOT_FINITE
    assert c.t_decided == 0


# --- the proximal term -----------------------------------------------------------------------------------------------


def slope(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def pushed_down_a_slope(rho: float, gradient: npt.ArrayLike, local_iterations: int) -> tuple[Vector, Vector]:
    """x_tau and x_new of a device whose loss has the same gradient everywhere."""
    inputs = np.array([gradient], np.float32)
    task = Task(
        lambda: nn.Linear(inputs.size, 1, bias=False),
        slope,
        [(inputs, np.zeros(1))],
        gamma=0.1,
        rho=rho,
        local_iterations=local_iterations,
    )
    x_tau = start(task, 0)
    return x_tau.vector, solve(task, x_tau, Work(0)).x_new.vector


@pytest.mark.parametrize("size", [0.1, 1.0, 50.0])
def test_the_proximal_pull_grows_with_the_distance(size: float) -> None:
    """AFL-Lib's proximal term is the norm and not its square: it pulls as hard from near as from far."""
    gradient, rho = size * np.array([3.0, 4.0]), 0.5
    x_tau, x_new = pushed_down_a_slope(rho, gradient, local_iterations=2)
    moved = -0.1 * gradient
    moved = moved - 0.1 * (gradient + rho * moved)
    # x has size 1 and `size`: float32 rounding. The unsquared norm would pull by 0.05 in all cases
    np.testing.assert_allclose(x_new - x_tau, moved, rtol=1e-5, atol=1e-6)


def test_the_proximal_term_is_applied() -> None:
    """The paper's authors scale x_tau by rho in their WikiText loop and then forget to add it."""
    free, held = (np.subtract(*pushed_down_a_slope(rho, [1.0, 1.0], 200)[::-1]) for rho in (0.0, 2.0))
    np.testing.assert_allclose(free, [-20, -20], rtol=1e-4)
    np.testing.assert_allclose(held, [-0.5, -0.5], rtol=1e-4)  # where the slope and rho * distance balance
