"""Owns what is compared: methods x settings x seeds, from one TOML file or as a `Spec` made in Python.

Rules kept here:
- A mistake is refused in one line, before anything runs.
- No setting silently loses to another, and no two runs share a folder.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from offbeat.errors import InvalidValue
from offbeat.method import rule_of
from offbeat.settings import Settings, read_toml

PLAIN_KEYS = ("task", "seeds", "metric", "lower_is_better", "reach")
KEYS = {*PLAIN_KEYS, "settings", "methods", "grid"}
FOLDER_NAME_MAX = 200
"""Bytes of a folder's name; file systems take 255."""


class ComparedRun(NamedTuple):
    method: str
    seed: int
    settings: Settings
    folder: Path


@dataclass(frozen=True, slots=True)
class Spec:
    task: str
    seeds: Sequence[int]
    methods: Mapping[str, Mapping[str, Any]]
    metric: str = "accuracy"
    reach: str | None = None
    """The method whose final metric the others' times are measured to."""
    lower_is_better: bool = False
    suffixes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _need("task", self.task, str, "text: digits, or a file: path.py or path.py:name")
        _need("metric", self.metric, str, "the name of a metric, such as accuracy")
        _need("lower_is_better", self.lower_is_better, bool, "true or false")
        _check_seeds(self.seeds)
        _check_methods(self.methods)
        for name in self.methods:
            if self.reach is not None and self.reference(name) not in list(self.methods):
                raise InvalidValue(f"reach is {self.reach!r} but must be one of {', '.join(self.methods)}")
        for name, method in self.methods.items():
            _check_settings(name, {**method, "seed": self.seeds[0]})

    @classmethod
    def read(cls, path: Path | str) -> Self:
        text = read_toml(Path(path))
        try:
            return cls(**_arguments(text))
        except InvalidValue as error:
            raise InvalidValue(f"{path}: {error}") from error

    def reference(self, name: str) -> str | None:
        """The method that this one is measured against: under a grid, the one with the same combination."""
        if not isinstance(self.reach, str) or self.reach in self.methods:
            return self.reach
        return self.reach + self.suffixes.get(name, "")

    def entries(self, folder: Path) -> list[ComparedRun]:
        return [
            ComparedRun(name, seed, Settings.of({**method, "seed": seed}), folder / safe(name) / f"seed-{seed}")
            for name, method in self.methods.items()
            for seed in self.seeds
        ]


def safe(name: str) -> str:
    """A name as that of a file.

    >>> safe("FedAvg, 1.3 x")
    'FedAvg--1.3-x'
    """
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in name)


# --- from TOML -------------------------------------------------------------------------------------------------------


def _arguments(text: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(text.keys() - KEYS)
    if unknown:
        raise InvalidValue(f"unknown key {unknown[0]!r}; use {', '.join(sorted(KEYS))}")
    common, methods, grid = (_table(name, text.get(name, {})) for name in ("settings", "methods", "grid"))
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InvalidValue(f"[grid] {key} is {values!r} but must be a list of values, such as [0.3, 0.6]")
    for name, method in methods.items():
        for key in grid.keys() & _table(f"methods.{name}", method).keys():
            raise InvalidValue(f"{key} is set by [grid] and by [methods.{name}]; leave it out of one of them")
    spread = list(_spread(methods, common, grid))
    _check_names(name for name, _, _ in spread)
    given = {key: text[key] for key in PLAIN_KEYS if key in text}
    made, suffixes = {name: values for name, _, values in spread}, {name: suffix for name, suffix, _ in spread}
    return {"task": "digits", "seeds": [0], "methods": made, "suffixes": suffixes, **given}


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(f"{name} is {value!r} but must be a table: write [{name}], then its keys")
    return value


def _spread(
    methods: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every method with every combination of the grid: its name, what the grid added to the name, its settings."""
    for name, method in methods.items():
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            suffix = "".join(f" {key}={value}" for key, value in chosen.items())
            yield name + suffix, suffix, {**common, **chosen, **method}


# --- checks ----------------------------------------------------------------------------------------------------------


def _need(name: str, value: Any, kind: type, allowed: str) -> None:
    if not isinstance(value, kind):
        raise InvalidValue(f"{name} is {value!r} but must be {allowed}")


def _check_seeds(seeds: Any) -> None:
    listed = isinstance(seeds, list | tuple) and bool(seeds)
    if not listed or not all(type(seed) is int and seed >= 0 for seed in seeds):  # True is an int, too
        raise InvalidValue(f"seeds must be a list of whole numbers >= 0, such as [1, 2, 3], but it is {seeds!r}")
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise InvalidValue(f"seeds holds {twice[0]} more than once; every seed is one run")


def _check_methods(methods: Any) -> None:
    if not isinstance(methods, Mapping) or not methods:
        raise InvalidValue("there is no method; write a table [methods.NAME] for each, with its settings")
    for name, method in methods.items():
        _need("the name of a method", name, str, "text")
        _need(f"method {name!r}", method, Mapping, "a table of settings")
        if "seed" in method:
            raise InvalidValue(f"seed is set for method {name!r}; write seeds = [{method['seed']}] beside task instead")
    _check_names(methods)


def _check_names(names: Iterable[str]) -> None:
    """A name is a folder's name, and no other's."""
    folders: dict[str, str] = {}
    for name in names:
        folder = safe(name)
        if not folder or folder.startswith(".") or len(folder.encode()) > FOLDER_NAME_MAX:
            raise InvalidValue(
                f"method {name[:60]!r} cannot be the name of a folder: "
                f"it must begin with something other than a dot and have at most {FOLDER_NAME_MAX} letters"
            )
        if folder in folders:
            raise InvalidValue(f"methods {folders[folder]!r} and {name!r} would share the folder {folder}; rename one")
        folders[folder] = name


def _check_settings(name: str, settings: Mapping[str, Any]) -> None:
    try:
        rule_of(Settings.of(settings))
    except InvalidValue as error:
        raise InvalidValue(f"method {name!r}: {error}") from error
