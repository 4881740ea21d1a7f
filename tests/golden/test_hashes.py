"""The same seed gives the same bits as in the version whose digests are recorded."""

import json
from typing import Any

import pytest

from tests.golden.hashes import EXECUTORS, ON_RAY, RECORDED, cases, machine, of_digits, of_line

THEN = json.loads(RECORDED.read_text())
SAME = (("inline", "processes:2", "ray:2"), ("batched", "batched+processes:2", "ray:2+batched"))
"""Executors that give the same bits as each other."""


def test_every_case_is_recorded() -> None:
    assert THEN["line"].keys() == cases().keys()
    assert THEN["digits"].keys() == {*EXECUTORS, *ON_RAY}
    for alike in SAME:
        assert len({THEN["digits"][executor] for executor in alike}) == 1


@pytest.mark.parametrize("name", cases())
def test_rules_policies_and_worlds_end_with_the_recorded_bits(name: str) -> None:
    assert of_line(**cases()[name]) == THEN["line"][name]


def test_other_processes_train_to_the_recorded_bits() -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    assert of_line(executor="processes:2") == THEN["line"]["fedasync weigh"]


@pytest.fixture(scope="module")
def digits() -> dict[str, str]:
    for library in ("torch", "sklearn", "numba", "cloudpickle"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    return {executor: of_digits(executor) for executor in EXECUTORS}


def test_executors_end_with_the_recorded_bits(digits: dict[str, str]) -> None:
    check(digits)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ON_RAY)
def test_executors_on_ray_end_with_the_recorded_bits(digits: dict[str, str], executor: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    check(digits | {executor: of_digits(executor)})


def check(found: dict[str, Any]) -> None:
    """On a machine of the recorded kind against the record; on another one, only the executors with each other."""
    for alike in SAME:
        assert len({found[executor] for executor in alike if executor in found}) == 1, f"{alike} differ: {found}"
    if machine() == THEN["machine"]:
        assert found == {executor: THEN["digits"][executor] for executor in found}
