"""Troubles are told while they last, and logged when they begin and end; most updates refused is one of them."""

import logging
import threading

import pytest

from offbeat.server.open_troubles import LOG_EVERY_S, REFUSED, OpenTroubles
from offbeat.server.push_answers import ENOUGH, LATEST, PushAnswers
from offbeat.server.refusals import Refusal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def troubles(clock: Clock, caplog: pytest.LogCaptureFixture) -> OpenTroubles:
    caplog.set_level(logging.INFO, "offbeat.server")
    return OpenTroubles(clock)


def told(troubles: OpenTroubles) -> tuple[str, ...]:
    return () if troubles.text is None else (troubles.text,)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_trouble_is_logged_when_it_begins_and_when_it_is_over(
    troubles: OpenTroubles, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(troubles) == ()
    for many in range(50):
        troubles.note("disk", f"refused {many} times")
    assert told(troubles) == ("refused 49 times",)
    assert logged(caplog) == [("WARNING", "refused 0 times")]
    for _ in range(3):
        troubles.over("disk")
    assert told(troubles) == ()
    assert logged(caplog)[1:] == [("INFO", "over: refused 49 times")]


def test_a_trouble_that_comes_and_goes_does_not_fill_the_log(
    troubles: OpenTroubles, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        troubles.note("disk", "full")
        assert troubles.text == "full"
        troubles.over("disk")
    assert len(logged(caplog)) == 2
    clock.now = LOG_EVERY_S
    troubles.note("disk", "full again")
    assert logged(caplog)[2:] == [("WARNING", "full again")]


def test_all_of_them_are_told_the_newest_first(troubles: OpenTroubles) -> None:
    troubles.note("a", "first", has_passed=lambda: True)
    troubles.note("b", "second")
    assert troubles.text == "second; first"
    assert [about for about, _ in troubles.probes()] == ["a"]
    troubles.over("b")
    assert troubles.text == "first"


def test_threads_may_note_and_end_troubles_at_the_same_time(troubles: OpenTroubles) -> None:
    def noisy(about: str) -> None:
        for _ in range(300):
            troubles.note(about, about, has_passed=lambda: False)
            assert troubles.text
            assert len(troubles.probes()) >= 1
            troubles.over(about)

    threads = [threading.Thread(target=noisy, args=(f"subject {number % 2}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told(troubles) == ()


# --- most updates refused --------------------------------------------------------------------------------------------


def refused(error: str) -> Refusal:
    return Refusal(error, "because")


def test_it_takes_enough_answers_and_half_of_them_refused(troubles: OpenTroubles) -> None:
    answers = PushAnswers(troubles)
    for _ in range(ENOUGH - 1):
        answers.add(refused("not_finite"))
    assert told(troubles) == ()
    answers.add(refused("wrong_layout"))
    (said,) = told(troubles)
    assert said.startswith("20 of the latest 20 updates were refused, 19 of them as not_finite; ")
    assert "gamma" in said


def test_it_is_over_when_less_than_a_third_of_the_latest_are_refused(troubles: OpenTroubles) -> None:
    answers = PushAnswers(troubles)
    for _ in range(LATEST):
        answers.add(refused("not_a_model"))
    many = 0
    while told(troubles):
        answers.add(None)
        many += 1
    assert LATEST / 2 < many <= LATEST


def test_a_single_liar_among_honest_workers_is_no_trouble(troubles: OpenTroubles) -> None:
    answers = PushAnswers(troubles)
    for number in range(500):
        answers.add(None if number % 3 else refused("not_finite"))
        assert told(troubles) == ()


@pytest.mark.parametrize(
    "error", ["too_stale", "finished", "busy", "not_now", "disk_full", "unknown_session", "not_yours"]
)
def test_when_an_update_comes_and_who_sends_it_does_not_count(troubles: OpenTroubles, error: str) -> None:
    answers = PushAnswers(troubles)
    for _ in range(3 * LATEST):
        answers.add(refused(error))
    assert not [about for about in troubles._open if about == REFUSED]
