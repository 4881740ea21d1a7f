"""Answers that are kept packed come back as they were given, and the oldest are forgotten."""

import tracemalloc
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.rules import Mix
from offbeat.protocol.answer_book import AnswerBook, DecidedTask
from offbeat.protocol.messages import AnswerPush, Decision, Lease, Outcome

WHOLE = st.integers(0, 2**63 - 1)
REAL = st.floats(allow_nan=False)
LEASES = st.builds(
    Lease, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, REAL, REAL | st.just(inf), st.none() | WHOLE, st.none() | REAL
)
MIXES = st.none() | st.builds(Mix, REAL, REAL, REAL, st.booleans())
DECISIONS = st.builds(
    *(Decision, WHOLE, REAL, LEASES, st.sampled_from(Outcome), WHOLE, WHOLE, MIXES),
    *(WHOLE | st.just(2**70), WHOLE),
)


def answer(decision: Decision, why: str = "") -> AnswerPush:
    return AnswerPush(decision.lease.worker, decision.lease.task, decision.outcome, decision, why=why)


@given(st.lists(DECISIONS, max_size=5, unique_by=lambda decision: decision.lease.task), st.text())
def test_an_answer_comes_back_as_it_was_and_says_that_it_is_repeated(told: list[Decision], why: str) -> None:
    book = AnswerBook(10)
    for decision in told:
        book.remember(answer(decision, why))
    assert list(book.items()) == [(d.lease.task, answer(d, why).again()) for d in told]


def as_stored(d: Decision) -> DecidedTask:
    """The decision under the names of the ledger's columns."""
    lease, mix = d.lease, d.mix or (None, None, None, None)
    return DecidedTask(
        *(lease.task, d.outcome.value, lease.worker, d.sequence, lease.device, lease.number, lease.tau),
        *(d.t, d.staleness, d.samples, d.gradients, lease.local_iterations),
        *(d.at, lease.granted_at, lease.deadline, *mix[:3], lease.gamma, mix[3]),
    )


@given(DECISIONS.filter(lambda decision: decision.samples < 2**63))
def test_a_decision_that_the_ledger_has_is_taken_up_as_the_answer_that_it_was(decision: Decision) -> None:
    book = AnswerBook(10)
    book.take_up(as_stored(decision))
    assert book[decision.lease.task] == answer(decision).again()


def test_the_oldest_are_forgotten() -> None:
    book = AnswerBook(3)
    for task in range(10):
        book.remember(
            answer(Decision(task, 1.0, Lease(task, 1, 1, 0, 0, 0.0, 9.0), Outcome.TOO_STALE, 1, 0, None, 1, 1))
        )
    assert list(book) == [7, 8, 9]
    assert 6 not in book
    assert book.get(6) is None


def test_an_answer_takes_few_bytes() -> None:
    book, many = AnswerBook(10**6), 20_000
    tracemalloc.start()
    try:
        for task in range(1000, 1000 + many):
            lease = Lease(task, task % 50, task % 50, task // 50, task - 5, task / 7, task / 7 + 3600.0)
            mix = Mix(1 - 1 / task, 1 / task, 0.0, publish=True)
            book.remember(answer(Decision(task, task / 6, lease, Outcome.APPLIED, task, 4, mix, 600, 12)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / many < 350
