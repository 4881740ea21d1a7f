"""Conformance: known answers, T1 to T18, that an implementation of FedAsync must reproduce; this file keeps the list.

Rules kept here and in the files named `test_conformance_*.py` beside it:
- A test carries the number of what it proves: `test_t4_...` is one of the proofs of T4.
- The answer is a closed form, worked out in float64 without the library. The library runs in float32, so a tolerance
  is a bound on rounding or on sampling, says which, and is far below what the nearest plausible slip would change.
"""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

KNOWN_ANSWERS = [f"T{number}" for number in range(1, 19)]
PROOF = re.compile(r"^def test_t(\d+)_\w+\(", re.MULTILINE)


def test_every_known_answer_is_proved() -> None:
    files = Path(__file__).parent.glob("test_conformance*.py")
    proved = {f"T{number}" for file in files for number in PROOF.findall(file.read_text(encoding="utf-8"))}
    assert proved == set(KNOWN_ANSWERS)


# T9 is arithmetic about the paper's theorem: the library ships no certificate and computes no bound. It is kept here
# so that what the documentation says of the trend is checked.


def theorem_terms(h_min: float, staleness_max: float, imbalance: float) -> npt.NDArray[np.float64]:
    """The theorem's five terms, constants left out, at alpha = H^-1/2, gamma = T^-1/2, T = H^5 and H_max = delta*H."""
    h_max, epochs = imbalance * h_min, h_min**5
    alpha, gamma = h_min**-0.5, epochs**-0.5
    return np.array(
        [
            1 / (alpha * gamma * epochs * h_min),
            gamma * h_max**3 / h_min,
            alpha * staleness_max * h_max / h_min,
            alpha**2 * gamma * staleness_max**2 * h_max**2 / h_min,
            gamma * staleness_max**2 * h_max**2 / h_min,
        ]
    )


@pytest.mark.parametrize("imbalance", [1.0, 2.0])
@pytest.mark.parametrize("staleness_max", [1.0, 4.0, 16.0])
def test_t9_exponents_of_the_papers_theorem(staleness_max: float, imbalance: float) -> None:
    grid = [2.0, 7.0, 30.0]
    terms = np.array([theorem_terms(h, staleness_max, imbalance) for h in grid])
    exponents = np.diff(np.log(terms), axis=0) / np.diff(np.log(grid))[:, None]
    # float64 arithmetic: twelve digits
    np.testing.assert_allclose(exponents, [[-3, -0.5, -0.5, -2.5, -1.5]] * 2, rtol=1e-12)
    k, delta = staleness_max, imbalance
    np.testing.assert_allclose(theorem_terms(1, k, delta), [1, delta**3, k * delta, *[(k * delta) ** 2] * 2])


def test_t9_the_papers_bound_rises_with_delay_and_imbalance_and_falls_with_local_work() -> None:
    grid = [1.0, 2.0, 4.0, 16.0]
    along_delay = [theorem_terms(10, k, 2).sum() for k in grid]
    along_imbalance = [theorem_terms(10, 4, delta).sum() for delta in grid]
    along_work = [theorem_terms(h, 4, 2).sum() for h in grid]
    assert (np.diff(along_delay) > 0).all()
    assert (np.diff(along_imbalance) > 0).all()
    assert (np.diff(along_work) < 0).all()
