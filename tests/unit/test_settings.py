"""Settings: the same names everywhere, types checked, numbers and texts told apart."""

from typing import Any

import numpy as np
import pytest

from offbeat.errors import InvalidValue
from offbeat.settings import Settings


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("epochs", 5.5, "epochs is 5.5 but must be a whole number"),
        ("epochs", "5", "epochs is '5' but must be a whole number"),
        ("alpha", "0.5", "alpha is '0.5' but must be a number"),
        ("alpha", True, "alpha is True but must be a number"),
        ("alpha", None, "alpha is None but must be a number"),
        ("seed", True, "seed is True but must be a whole number"),
        ("seed", -1, "seed is -1"),
        ("rule", 3, "rule is 3 but must be text"),
        ("lease_s", float("nan"), "lease_s is nan but must be a number"),
        ("down_mbps", [1], r"down_mbps is \[1\] but must be a number or text"),
        ("devices", 2**0.5, "devices is 1.414"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        Settings.of({name: value})


def test_numbers_of_any_kind_become_pythons_own() -> None:
    settings = Settings.of({"epochs": np.int64(7), "alpha": np.float32(0.5), "lease_s": 5, "until_s": 3})
    assert (settings.epochs, settings.alpha, settings.lease_s, settings.until_s) == (7, 0.5, 5.0, 3.0)
    assert [type(value) for value in (settings.epochs, settings.alpha, settings.lease_s)] == [int, float, float]


def test_a_number_is_a_number_wherever_it_was_written() -> None:
    assert Settings(down_mbps="10") == Settings(down_mbps=10) == Settings(down_mbps=10.0)
    assert Settings(dropout="uniform:0,0.2").dropout == "uniform:0,0.2"
    assert Settings(down_mbps=None).down_mbps is None


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidValue, match="unknown setting 'epoch'; did you mean epochs"):
        Settings.of({"epoch": 3})


def test_settings_read_back_from_what_they_write() -> None:
    settings = Settings(rule="fedavg:4", down_mbps="10*lognormal:1", until_s=float("inf"))
    assert Settings.of(settings.as_dict()) == settings
