"""What the coordinator is made of: who waits and who is next, whose data count, the settings, and keyed draws."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core import draws
from offbeat.errors import InvalidValue
from offbeat.protocol.contribution import FORGET_BELOW, Contribution
from offbeat.protocol.idle import PICKS_MAX, Choice, Idle, WorkerSet
from offbeat.protocol.plan import Plan, Target
from offbeat.protocol.scheduler import Scheduler

CHI_SQUARE_LIMIT_9 = 27.9
"""With 9 degrees of freedom a fair draw exceeds this once in a thousand."""


def everybody(_: int) -> bool:
    return True


def chi_square(counts: Counter[int], cells: int) -> float:
    expected = counts.total() / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in range(cells))


# --- who waits -------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_waiting_is_a_set_that_can_be_indexed(steps: list[tuple[bool, int]]) -> None:
    waiting = WorkerSet()
    model: set[int] = set()
    for add, worker in steps:
        (waiting.add if add else waiting.discard)(worker)
        (model.add if add else model.discard)(worker)
        assert len(waiting) == len(model)
        assert sorted(waiting[i] for i in range(len(waiting))) == sorted(model)
        assert [worker for worker in range(20) if worker in waiting] == sorted(model)
        assert waiting.members() == [waiting[i] for i in range(len(waiting))]


def test_whoever_left_the_waiting_is_out_wherever_it_stood() -> None:
    for gone in range(4):
        waiting = WorkerSet()
        for worker in range(4):
            waiting.add(worker)
        waiting.discard(gone)
        waiting.add(9)
        assert sorted(waiting.members()) == sorted({0, 1, 2, 3, 9} - {gone})


# --- who is next -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["random", "fair"])
def test_whoever_is_picked_no_longer_waits(choice: Choice) -> None:
    idle = Idle(choice, seed=1)
    for worker in range(6):
        idle.add(worker, mass=worker / 2)
        idle.add(worker, mass=worker / 2)
    assert len(idle) == 6
    idle.discard(3)
    idle.discard(3)
    assert 3 not in idle
    assert 4 in idle
    assert sorted(idle.pick(everybody) or 0 for _ in range(5)) == [0, 1, 2, 4, 5]
    assert len(idle) == 0
    assert idle.pick(everybody) is None


def test_random_takes_everybody_with_equal_chance() -> None:
    idle, counts = Idle("random", seed=5), Counter[int]()
    for _ in range(5000):
        for worker in range(10):
            idle.add(worker, mass=0.0)
        counts[idle.pick(everybody) or 0] += 1
    assert chi_square(counts, 10) < CHI_SQUARE_LIMIT_9


def test_random_does_not_look_at_the_contribution() -> None:
    idle, counts = Idle("random", seed=6), Counter[int]()
    for _ in range(5000):
        for worker in range(10):
            idle.add(worker, mass=float(worker))
        counts[idle.pick(everybody) or 0] += 1
    assert chi_square(counts, 10) < CHI_SQUARE_LIMIT_9


def test_the_choice_is_keyed_by_the_seed() -> None:
    def picks(seed: int) -> list[int | None]:
        idle = Idle("random", seed)
        for worker in range(50):
            idle.add(worker, mass=0.0)
        return [idle.pick(everybody) for _ in range(50)]

    assert picks(1) == picks(1)
    assert picks(1) != picks(2)


def test_fair_takes_the_least_contribution_first() -> None:
    idle = Idle("fair", seed=0)
    mass = {0: 3.0, 1: 0.5, 2: 2.0, 3: 0.0, 4: 1.0}
    for worker, so_far in mass.items():
        idle.add(worker, so_far)
    assert [idle.pick(everybody) for _ in range(6)] == [3, 1, 4, 2, 0, None]


def test_fair_is_random_among_equals() -> None:
    for mass in (0.0, 1.5):
        counts = Counter[int]()
        for seed in range(2000):
            idle = Idle("fair", seed)
            for worker in range(10):
                idle.add(worker, mass)
            counts[idle.pick(everybody) or 0] += 1
        assert chi_square(counts, 10) < CHI_SQUARE_LIMIT_9


@pytest.mark.parametrize("choice", ["random", "fair"])
@pytest.mark.parametrize("mass", [0.0, 1.0])
def test_whoever_is_not_available_is_passed_over_and_goes_on_waiting(choice: Choice, mass: float) -> None:
    idle = Idle(choice, seed=3)
    for worker in range(6):
        idle.add(worker, mass and mass + worker)
    assert sorted(idle.pick(lambda worker: worker % 2 == 1) or 0 for _ in range(3)) == [1, 3, 5]
    assert idle.pick(lambda worker: worker % 2 == 1) is None
    assert len(idle) == 3
    assert sorted(worker for worker in range(6) if worker in idle) == [0, 2, 4]
    assert sorted(idle.pick(everybody) or 0 for _ in range(3)) == [0, 2, 4]


@pytest.mark.parametrize(("choice", "mass"), [("random", 0.0), ("fair", 0.0), ("fair", 1.0)])
def test_the_search_for_somebody_available_is_bounded(choice: Choice, mass: float) -> None:
    idle, tries = Idle(choice, seed=0), []
    for worker in range(1000):
        idle.add(worker, mass and mass + worker)
    assert idle.pick(lambda worker: bool(tries.append(worker))) is None  # type: ignore[func-returns-value]
    assert len(tries) == PICKS_MAX
    assert len(idle) == 1000


def test_fair_looks_at_the_pool_first_and_then_at_the_ranked() -> None:
    idle = Idle("fair", seed=0)
    idle.add(1, mass=0.0)
    idle.add(2, mass=0.1)
    assert idle.pick(lambda worker: worker == 2) == 2
    assert idle.pick(everybody) == 1


def test_fair_ranks_whoever_comes_back_by_its_mass_of_then() -> None:
    idle = Idle("fair", seed=0)
    idle.add(1, mass=1.0)
    idle.discard(1)
    idle.add(1, mass=5.0)
    idle.add(2, mass=3.0)
    assert [idle.pick(everybody) for _ in range(3)] == [2, 1, None]


def test_fair_knows_what_was_counted_since_a_worker_began_to_wait() -> None:
    """Under FedAvg an update counts when its group is complete, and its device waits by then."""
    idle = Idle("fair", seed=0)
    idle.add(1, mass=0.0)
    idle.add(2, mass=0.3)
    idle.add(3, mass=0.4)
    now = {1: 0.5, 2: 0.6, 3: 0.4}
    assert [idle.pick(everybody, now.__getitem__) for _ in range(4)] == [3, 1, 2, None]


def test_fair_keeps_no_trace_of_whoever_stopped_waiting() -> None:
    """Every poll that ends without a task is an `add` and a `discard`."""
    idle = Idle("fair", seed=0)
    for _ in range(10_000):
        idle.add(1, mass=1.0)
        idle.discard(1)
    assert len(idle._by_mass) < 1000


# --- whose data count ------------------------------------------------------------------------------------------------


def naive(updates: list[tuple[int, float, float]]) -> dict[int, float]:
    shares: dict[int, float] = {}
    for device, keep, new in updates:
        shares = {name: share * keep for name, share in shares.items()}
        shares[device] = shares.get(device, 0.0) + new
    return shares


def test_contribution_worked_out_by_hand() -> None:
    contribution = Contribution()
    for device in (1, 2, 1):
        contribution.count(device, keep=0.5, new=0.5)
        contribution.publish()
    assert contribution.mass == {1: 1.0, 2: 0.5}
    assert contribution.surviving() == {1: 0.625, 2: 0.25}


COEFFICIENT = st.sampled_from([0.0, 1e-60, 1e-13, 0.1, 0.5, 0.9, 1.0]) | st.floats(0, 1)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 4), COEFFICIENT, COEFFICIENT), max_size=50))
def test_what_survives_is_what_shrinking_everybody_would_give(updates: list[tuple[int, float, float]]) -> None:
    contribution = Contribution()
    for device, keep, new in updates:
        contribution.count(device, keep, new)
        contribution.publish()
    mass = Counter[int]()
    for device, _, new in updates:
        mass[device] += new  # type: ignore[assignment]
    assert contribution.mass == pytest.approx(dict(mass))
    left = contribution.surviving()
    assert left.keys() <= mass.keys()
    for device, share in naive(updates).items():
        assert left.get(device, 0.0) == pytest.approx(share, rel=1e-9, abs=10 * FORGET_BELOW)


def test_a_long_run_neither_overflows_nor_forgets() -> None:
    contribution, rng = Contribution(), np.random.default_rng(0)
    updates = [(int(rng.integers(5)), 0.4, 0.6) for _ in range(20_000)]
    for update in updates:
        contribution.count(*update)
        contribution.publish()
    assert contribution.surviving() == pytest.approx(naive(updates), abs=1e-9)
    assert sum(contribution.surviving().values()) == pytest.approx(1.0)
    assert sum(contribution.mass.values()) == pytest.approx(12_000)


def test_a_group_counts_by_its_shares_of_the_mean_once_it_is_published() -> None:
    """FedAvg's running mean: 30, 10 and 60 samples are 0.3, 0.1 and 0.6 of the version, whatever came first."""
    contribution = Contribution()
    contribution.count(9, keep=0.0, new=1.0)
    contribution.publish()
    contribution.count(1, keep=0.0, new=1.0)
    contribution.count(2, keep=0.75, new=0.25)
    assert contribution.mass == {9: 1.0}
    assert contribution.surviving() == {9: 1.0}, "the newest version is still the one before"
    contribution.count(3, keep=0.4, new=0.6)
    contribution.publish()
    assert contribution.mass == pytest.approx({9: 1.0, 1: 0.3, 2: 0.1, 3: 0.6})
    assert contribution.surviving() == pytest.approx({1: 0.3, 2: 0.1, 3: 0.6})


def test_differences_add_up_and_nothing_fades() -> None:
    contribution = Contribution()
    for device in (1, 2, 1):
        contribution.count(device, keep=1.0, new=0.25)
        contribution.publish()
    assert contribution.mass == contribution.surviving() == {1: 0.5, 2: 0.25}


def test_what_is_overwritten_does_not_survive() -> None:
    contribution = Contribution()
    contribution.count(1, keep=0.5, new=0.5)
    contribution.publish()
    contribution.count(2, keep=0.0, new=1.0)
    contribution.publish()
    assert contribution.surviving() == {2: 1.0}
    assert contribution.mass == {1: 0.5, 2: 1.0}


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("in_flight_max", "queue_max", "evaluate_every") for value in (0, -1)),
        *((name, 0) for name in ("answers_kept", "released_kept", "tasks_per_device", "epochs", "gradients")),
        *(
            (name, value)
            for name in ("lease_s", "retry_after_s", "pace_wait_s", "until_s")
            for value in (0.0, -1.0, nan)
        ),
        *(("bad_updates_max", value) for value in (0, -1)),
        ("staleness_max", -1),
        ("staleness_policy", "wait"),
    ],
)
def test_a_plan_refuses_what_makes_no_sense_and_names_it(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=name) as refused:
        Plan(**{name: value})
    assert str(value) in str(refused.value)


@pytest.mark.parametrize("policy", ["reject", "pace"])
def test_a_policy_with_a_bound_needs_the_bound(policy: Any) -> None:
    with pytest.raises(InvalidValue, match=f"{policy} needs staleness_max"):
        Plan(staleness_policy=policy)
    assert Plan(staleness_policy=policy, staleness_max=0).bound() == 0
    assert Plan(staleness_policy=policy, staleness_max=4).bound() == 4


def test_weigh_has_no_bound() -> None:
    assert Plan().bound() == inf
    assert Plan(staleness_max=4).bound() == inf


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"choice": "first"}, "scheduler is 'first'; use one of random, fair"),
        ({"trigger_every_s": -1.0}, "trigger_every_s is -1.0"),
        ({"trigger_every_s": nan}, "trigger_every_s is nan"),
        ({"over_selection": 0.9}, "over_selection is 0.9"),
        ({"over_selection": nan}, "over_selection is nan"),
        ({"group_deadline_s": 0.0}, "group_deadline_s is 0.0"),
        ({"group_deadline_s": nan}, "group_deadline_s is nan"),
        ({"local_iterations_min": 1}, "local_iterations_min and local_iterations_max together"),
        ({"local_iterations_max": 1}, "local_iterations_min and local_iterations_max together"),
        ({"local_iterations_min": 3, "local_iterations_max": 2}, "1 <= min <= max"),
        ({"local_iterations_min": 0, "local_iterations_max": 2}, "1 <= min <= max"),
    ],
)
def test_a_scheduler_refuses_what_makes_no_sense_and_names_it(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        Scheduler(**arguments)


@pytest.mark.parametrize("arguments", [{"group": -1}, {"group": 2, "over_selection": inf}], ids=str)
def test_a_scheduler_refuses_a_group_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=list(arguments)[-1]):
        Scheduler(**arguments)


@pytest.mark.parametrize(
    ("group", "over_selection", "quota"), [(0, 1.0, 0), (10, 1.0, 10), (10, 1.3, 13), (3, 1.3, 4), (7, 2.0, 14)]
)
def test_the_quota_of_a_group(group: int, over_selection: float, quota: int) -> None:
    assert Scheduler(group=group, over_selection=over_selection).quota == quota


def test_local_iterations_follow_the_speed() -> None:
    h = Scheduler(local_iterations_min=2, local_iterations_max=10).local_iterations
    assert [h(seconds, 0.5) for seconds in (0.5, 1.0, 2.0, 100.0, None)] == [10, 5, 2, 2, 10]
    assert h(1.0, None) == 10
    assert Scheduler().local_iterations(1.0, 0.5) is None


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("accuracy>=0.95", Target("accuracy", ">=", 0.95)),
        (" loss <= 1e-3 ", Target("loss", "<=", 0.001)),
        ("test.loss<=-2", Target("test.loss", "<=", -2.0)),
    ],
)
def test_a_target_is_read_and_written(text: str, target: Target) -> None:
    assert Target.parse(text) == target
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text", ["", "accuracy", "accuracy>0.9", "accuracy=0.9", ">=0.9", "a>=", "a>=b", "a>=1e", "a b>=1"]
)
def test_a_target_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"accuracy>=0\.95 or loss<=0\.1"):
        Target.parse(text)


def test_a_target_is_reached_at_its_value() -> None:
    high, low = Target.parse("a>=0.5"), Target.parse("a<=0.5")
    assert [high.reached({"a": a}) for a in (0.4, 0.5, 0.6, nan)] == [False, True, True, False]
    assert [low.reached({"a": a}) for a in (0.4, 0.5, 0.6, nan)] == [True, True, False, False]
    assert not high.reached({})
    assert not high.reached({"b": 1.0})


# --- keyed draws -----------------------------------------------------------------------------------------------------

KEY = st.integers(0, 2**64 - 1)
DRAWS: list[Callable[..., float]] = [draws.word, draws.uniform, partial(draws.below, 2**60)]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(KEY, KEY, KEY, KEY, st.integers(1, 10**6))
def test_draws_depend_on_their_key_alone_and_stay_in_bounds(
    seed: int, stream: int, number: int, attempt: int, bound: int
) -> None:
    key = (seed, stream, number, attempt)
    assert 0 <= draws.word(*key) < 2**64
    assert 0.0 < draws.uniform(*key) < 1.0
    assert 0 <= draws.below(bound, *key) < bound
    for draw in DRAWS:
        assert draw(*key) == draw(*key)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_part_of_the_key_matters(draw: Callable[..., float]) -> None:
    keys = [(1, 2, 3, 4), (9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9), (2, 1, 3, 4), (1, 2, 4, 3)]
    assert len({draw(*key) for key in keys}) == len(keys)


def test_draws_are_uniform() -> None:
    whole = Counter(draws.below(10, 3, 1, number) for number in range(10_000))
    parts = Counter(int(10 * draws.uniform(4, 1, number)) for number in range(10_000))
    bits = Counter(draws.word(5, 1, number) % 10 for number in range(10_000))
    for counts in (whole, parts, bits):
        assert chi_square(counts, 10) < CHI_SQUARE_LIMIT_9


def test_neighbouring_keys_are_not_alike() -> None:
    """The correlation of two neighbours is within four standard errors of 0."""
    for neighbour in ((0, 0, 1), (0, 1, 0), (1, 0, 0)):
        a = [draws.uniform(7, 7, number) for number in range(4000)]
        b = [draws.uniform(7 + neighbour[0], 7 + neighbour[1], number + neighbour[2]) for number in range(4000)]
        assert abs(float(np.corrcoef(a, b)[0, 1])) < 4 / 4000**0.5


def test_bounds_at_the_ends() -> None:
    assert draws.below(1, 0, 0, 0) == 0
    assert draws.uniform(0, 0, 0) == draws.uniform(2**64, 0, 0)  # keys are taken modulo 2**64
    lowest, highest = (0 + 0.5) * 2.0**-52, (2**52 - 0.5) * 2.0**-52
    assert 0.0 < lowest < highest < 1.0
