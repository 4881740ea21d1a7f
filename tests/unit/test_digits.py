"""The digits are those of scikit-learn, which need not be imported for them."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


def test_they_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits as theirs

    from offbeat.tasks.digits import load_digits

    for ours, other in zip(load_digits(), theirs(return_X_y=True), strict=True):
        assert ours.dtype == other.dtype
        assert np.array_equal(ours, other)


def test_scikit_learn_is_not_imported() -> None:
    program = "import sys; from offbeat.tasks.digits import digits; digits(); print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat.errors import MissingExtra
    from offbeat.tasks.digits import load_digits

    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"pip install 'offbeat\[digits\]'"):
        load_digits()
