"""gamma in the course of a run."""

import pytest

from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Evaluated
from offbeat.protocol.scheduler import Plateau, Step, gamma_schedule


def evaluated(*losses: float) -> list[Evaluated]:
    return [Evaluated(float(t), t, {"loss": loss}) for t, loss in enumerate(losses)]


def test_a_step_happens_at_its_version() -> None:
    step = Step(0.2, 3, 0.5)
    assert [step(t, []) for t in range(5)] == [0.2, 0.2, 0.2, 0.1, 0.1]
    assert not step.uses_evaluations


def test_a_plateau_shrinks_gamma_at_every_evaluation_without_a_new_best() -> None:
    gamma = Plateau(16.0, "loss", 0.25)
    assert gamma(0, []) == gamma(0, evaluated(5.0)) == gamma(9, evaluated(5.0, 4.0, 3.0)) == 16.0
    assert gamma(9, evaluated(5.0, 4.0, 4.0)) == 4.0, "as good as the best is no new best"
    assert gamma(9, evaluated(5.0, 4.0, 4.5, 4.2)) == 1.0, "better than the last is not enough"
    assert gamma(9, evaluated(5.0, 4.0, 4.5, 3.9)) == 4.0
    assert gamma(9, evaluated(5.0, float("nan"), 4.0)) == 4.0


def test_schedules_are_read_from_settings() -> None:
    assert gamma_schedule("constant", 0.1) is None
    assert gamma_schedule("step:800,0.5", 0.1) == Step(0.1, 800, 0.5)
    assert gamma_schedule("plateau:test.loss,0.25", 20.0) == Plateau(20.0, "test.loss", 0.25)


@pytest.mark.parametrize(
    "spec",
    ["", "step", "step:0.5", "step:x,0.5", "step:3,0", "step:3,inf", "plateau:0.5", "plateau:loss,2", "constant:1"],
)
def test_a_schedule_that_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(InvalidValue, match="use constant, step:T,F or plateau:METRIC,F"):
        gamma_schedule(spec, 0.1)


def test_a_schedule_needs_a_gamma() -> None:
    with pytest.raises(InvalidValue, match="needs gamma"):
        gamma_schedule("step:3,0.5", None)


def test_a_plateau_counted_one_by_one_is_the_same_function() -> None:
    gamma = Plateau(0.1, "loss", 0.7)
    told = evaluated(5.0, 4.0, 4.5, float("nan"), 3.9, 3.9, 4.2, 1.0, 1.5, 0.3, 7.0)
    so_far = gamma.start
    for count, evaluation in enumerate(told, 1):
        so_far = gamma.after(so_far, evaluation)
        assert so_far.gamma == gamma(0, told[:count])
