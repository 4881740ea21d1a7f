"""Settings: the same names everywhere, types checked, numbers and texts told apart."""

import inspect
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from offbeat.errors import InvalidValue
from offbeat.settings import GROUPS, Settings, SettingsDict
from offbeat.sim.api import simulate


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


def test_the_keyword_arguments_of_simulate_are_the_settings() -> None:
    typed, of_class = get_type_hints(SettingsDict), get_type_hints(Settings)
    named = {name: hint for name, hint in get_type_hints(simulate).items() if name in of_class}
    assert typed.keys() | named.keys() == of_class.keys()
    assert not typed.keys() & named.keys()
    assert typed == {name: of_class[name] for name in typed}
    for name, hint in named.items():
        assert {*get_args(of_class[name]), of_class[name]} & {*get_args(hint)}, name
    assert inspect.signature(simulate).parameters["settings"].kind is inspect.Parameter.VAR_KEYWORD


def test_a_type_checker_refuses_a_misspelt_setting_and_a_wrong_type() -> None:
    """mypy warns of an ignore that is not needed, so that each of these lines is checked by `make check`."""

    def checked_by_mypy() -> None:
        simulate("digits", alpha=0.3, epochs=5, dropout="uniform:0,0.2")
        simulate("digits", alhpa=0.3)  # type: ignore[call-arg]
        simulate("digits", epochs="5")  # type: ignore[arg-type]

    with pytest.raises(InvalidValue, match="unknown setting 'alhpa'; did you mean alpha"):
        simulate("digits", alhpa=0.3)  # type: ignore[call-arg]
    assert callable(checked_by_mypy)


def test_every_setting_has_a_group_and_a_help_text() -> None:
    groups = {setting.metadata["group"] for setting in fields(Settings)}
    assert groups == GROUPS.keys()
    assert all(setting.metadata["help"].strip() for setting in fields(Settings))
