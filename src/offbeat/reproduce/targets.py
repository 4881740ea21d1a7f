"""Owns the targets: which curves each figure has, at which scale."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

from offbeat.errors import InvalidValue
from offbeat.reproduce import paper
from offbeat.reproduce.paper import FEDAVG_K, As, PaperReading, Values
from offbeat.settings import Settings

Kind = Literal["curves", "ends", "grid"]
ADAPTIVE = ("Const", "Poly", "Hinge")
HINGE_A = 10
RECIPE = 1
"""Raised when settings or tasks change their meaning: every result before it is out of date."""
HASH_LETTERS = 10


@dataclass(frozen=True)
class Scale:
    seeds: tuple[int, ...]
    cifar: Values
    cifar_epochs: int
    wikitext: Values
    wikitext_epochs: int
    evaluations: int
    large_batch_gradients: int
    """Steps of SGD at batch 1000, each of which costs 20 ordinary ones."""
    staleness: tuple[int, ...]
    sensitivity_epochs: int
    whole_grid: bool


SCALES: dict[str, Scale] = {
    "smoke": Scale(
        seeds=(0,),
        cifar={"width": 4, "test_max": 500},
        cifar_epochs=20,
        wikitext={"width": 16, "vocabulary": 500, "test_max": 20},
        wikitext_epochs=10,
        evaluations=5,
        large_batch_gradients=5,
        staleness=(2, 16),
        sensitivity_epochs=10,
        whole_grid=False,
    ),
    "laptop": Scale(
        seeds=(0, 1, 2),
        cifar={"width": 16},
        cifar_epochs=300,
        wikitext={"width": 100, "vocabulary": 2000},
        wikitext_epochs=120,
        evaluations=15,
        large_batch_gradients=300,
        staleness=(2, 8, 20, 50),
        sensitivity_epochs=150,
        whole_grid=False,
    ),
    "paper": Scale(
        seeds=tuple(range(10)),
        cifar={},
        cifar_epochs=paper.CIFAR_EPOCHS,
        wikitext={},
        wikitext_epochs=paper.WIKITEXT_EPOCHS,
        evaluations=200,
        large_batch_gradients=20_000,
        staleness=(2, 4, 6, 8, 12, 16, 20, 30, 40, 50),
        sensitivity_epochs=paper.CIFAR_EPOCHS,
        whole_grid=True,
    ),
}


@dataclass(frozen=True)
class FigureCurve:
    """One line of a figure, identified by the hash of everything that determines its results."""

    label: str
    task: str
    values: Mapping[str, Any] = field(hash=False)
    seeds: tuple[int, ...]

    def settings(self, seed: int) -> Settings:
        return Settings.of({**self.values, "seed": seed})

    @property
    def hash(self) -> str:
        """Of everything that determines its results except the seed."""
        plain = Settings().as_dict()
        chosen = {name: value for name, value in self.settings(0).as_dict().items() if value != plain[name]}
        text = json.dumps({"recipe": RECIPE, "task": self.task, "settings": chosen}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]

    @property
    def name(self) -> str:
        settings = self.settings(0)
        words = [self.task, settings.rule]
        if settings.rule == "fedasync":
            words += [settings.staleness_fn, f"alpha{settings.alpha:g}", settings.device_model]
        return "-".join("".join(c if c.isalnum() or c == "." else "" for c in word) for word in [*words, self.hash])


class PlacedCurve(NamedTuple):
    """Where the final metric of a curve goes in a figure of kind `ends` or `grid`."""

    line: Any
    x: Any
    curve: FigureCurve


@dataclass(frozen=True)
class ReproductionTarget:
    name: str
    title: str
    metric: str
    curves: tuple[FigureCurve, ...]
    kind: Kind = "curves"
    axis: Literal["gradients", "virtual_s"] = "gradients"
    places: tuple[PlacedCurve, ...] = ()
    """For `ends` and `grid`; two places may share one curve."""


@dataclass(frozen=True)
class CurveMaker:
    """Makes the curves of one data set, for one reading of the paper and one scale."""

    task: str
    reading: PaperReading
    values: Values
    epochs: int
    h: int
    """Gradients of one task: 10 on CIFAR-10, 30 on WikiText-2 (29 where a device has one chunk less)."""
    scale: Scale

    def fedasync(self, adaptive: str, alpha: float, k: int, **changes: Any) -> FigureCurve:
        epochs = changes.pop("epochs", self.epochs)
        values = {
            "device_model": f"sampled:{k}",
            "alpha": alpha,
            "staleness_fn": self._staleness_fn(adaptive, k),
            "epochs": epochs,
            **self.reading.fedasync,
        }
        if self.reading.halved_at is not None:
            values["alpha_schedule"] = f"step:{round(self.reading.halved_at * epochs)},0.5"
        return self._curve(f"FedAsync+{adaptive}, alpha {alpha:g}", epochs, values | changes)

    def _staleness_fn(self, adaptive: str, k: int) -> str:
        b = self.reading.hinge_b.get(k, 4)
        if adaptive == "Const" or (adaptive == "Hinge" and k - 1 <= b):
            return "constant"  # where no staleness exceeds b, Hinge is Const, and the runs are the same
        return "polynomial:0.5" if adaptive == "Poly" else f"hinge:{HINGE_A},{b:g}"

    def fedavg(self, **changes: Any) -> FigureCurve:
        """FedAvg of ten devices, with as many gradients as FedAsync."""
        groups = max(1, self.epochs // FEDAVG_K)
        values = {"rule": f"fedavg:{FEDAVG_K}", "device_model": "constant", "in_flight_max": FEDAVG_K, "epochs": groups}
        return self._curve("FedAvg, k 10", groups, values | self.reading.fedavg | changes)

    def sgd(self, label: str = "SGD", **changes: Any) -> FigureCurve:
        """SGD on one machine with as many gradients; each version takes as many of them as a task does."""
        epochs = changes.pop("epochs", self.epochs)
        values = {"rule": "sgd", "local_iterations": self.h, "epochs": epochs, **self.reading.sgd}
        return self._curve(label, epochs, values | changes)

    def _curve(self, label: str, epochs: int, values: Values) -> FigureCurve:
        every = max(1, epochs // self.scale.evaluations)
        merged = {"executor": "inline", "evaluate_every": every, **self.reading.common, **self.values, **values}
        if merged.get("rule") == "sgd" and str(merged.get("warm_up", "all")).partition(",")[0] != "all":
            del merged["warm_up"]
        return FigureCurve(label, self.task, merged, self.scale.seeds)


def target(name: str, scale: str = "laptop", as_: As = "text") -> ReproductionTarget:
    if name not in TARGETS:
        raise InvalidValue(f"unknown target {name!r}; use one of {', '.join(TARGETS)}")
    if scale not in SCALES:
        raise InvalidValue(f"unknown scale {scale!r}; use one of {', '.join(SCALES)}")
    return TARGETS[name](SCALES[scale], as_)


def _cifar(scale: Scale, as_: As) -> CurveMaker:
    return CurveMaker("cifar10", paper.CIFAR[as_], scale.cifar, scale.cifar_epochs, 10, scale)


def _cifar_k(k: int, scale: Scale, as_: As) -> ReproductionTarget:
    maker = _cifar(scale, as_)
    large = {"batch_size": 1000, "epochs": max(1, scale.large_batch_gradients // maker.h)}
    curves = [maker.sgd("SGD, batch 50", batch_size=50), maker.sgd("SGD, batch 1000", **large), maker.fedavg()]
    curves += [maker.fedasync(fn, alpha, k) for alpha in maker.reading.alphas for fn in ADAPTIVE]
    return ReproductionTarget(f"cifar-k{k}", f"CIFAR-10, maximum staleness {k}", "accuracy", tuple(curves))


def _wikitext_k(k: int, scale: Scale, as_: As) -> ReproductionTarget:
    maker = CurveMaker("wikitext2", paper.WIKITEXT[as_], scale.wikitext, scale.wikitext_epochs, 30, scale)
    curves = [maker.sgd(), maker.fedavg()]
    curves += [maker.fedasync(fn, alpha, k) for alpha in maker.reading.alphas for fn in ADAPTIVE]
    return ReproductionTarget(f"wikitext-k{k}", f"WikiText-2, maximum staleness {k}", "perplexity", tuple(curves))


def _staleness(scale: Scale, as_: As) -> ReproductionTarget:
    maker, rho = _cifar(scale, as_), paper.STALENESS_RHO[as_]
    places = [PlacedCurve(fn, k, maker.fedasync(fn, 0.9, k, rho=rho)) for fn, k in product(ADAPTIVE, scale.staleness)]
    return _placed("staleness", "CIFAR-10 at the end, alpha 0.9", "ends", places)


GAMMAS, RHOS, ALPHAS = (0.05, 0.1, 0.2), (0.005, 0.01, 0.02), (0.5, 0.7, 0.9)


def _sensitivity(scale: Scale, as_: As) -> ReproductionTarget:
    maker = _cifar(scale, as_)
    factor = 10 if as_ == "authors" else 1  # their flag is gamma*rho
    places = []
    for k, (gamma, rho, alpha) in product((4, 16), _grid(whole=scale.whole_grid)):
        changes = {"gamma": gamma, "rho": rho * factor, "epochs": scale.sensitivity_epochs}
        places.append(PlacedCurve(k, (gamma, rho, alpha), maker.fedasync("Const", alpha, k, **changes)))
    return _placed("sensitivity", "CIFAR-10, FedAsync+Const", "grid", places)


def _placed(name: str, title: str, kind: Kind, places: Sequence[PlacedCurve]) -> ReproductionTarget:
    curves = {place.curve.hash: place.curve for place in places}
    return ReproductionTarget(name, title, "accuracy", tuple(curves.values()), kind, places=tuple(places))


def _grid(*, whole: bool) -> Iterator[tuple[float, float, float]]:
    """All combinations, or those that change at most one setting from the middle of all."""
    for gamma, rho, alpha in product(GAMMAS, RHOS, ALPHAS):
        changed = (gamma != GAMMAS[1]) + (rho != RHOS[1]) + (alpha != ALPHAS[1])
        if whole or changed <= 1:
            yield gamma, rho, alpha


def _skewed(scale: Scale, as_: As) -> ReproductionTarget:
    maker = _cifar(scale, as_)
    skew = {"partition": "dirichlet:0.3"}
    curves = [maker.fedavg(**skew), *(maker.fedasync(fn, 0.6, 16, **skew) for fn in ADAPTIVE)]
    title = "CIFAR-10, Dirichlet(0.3), maximum staleness 16"
    return ReproductionTarget("skewed", title, "accuracy", tuple(curves))


def _clock(scale: Scale, as_: As) -> ReproductionTarget:
    maker = _cifar(scale, as_)
    devices = {"device_model": "lognormal:1.5", "in_flight_max": FEDAVG_K}
    curves = [maker.fedavg(**devices), *(maker.fedasync(fn, 0.6, 16, **devices) for fn in ADAPTIVE)]
    return ReproductionTarget(
        "clock", "CIFAR-10, lognormal:1.5 devices, ten at work", "accuracy", tuple(curves), axis="virtual_s"
    )


def _partial(scale: Scale, as_: As) -> ReproductionTarget:
    """The network of the paper's width, for the first 3,000 gradients of one seed."""
    epochs = min(scale.cifar_epochs, 300)
    maker = CurveMaker("cifar10", paper.CIFAR[as_], {}, epochs, 10, scale)
    curves = tuple(replace(curve, seeds=(0,)) for curve in (maker.fedavg(), maker.fedasync("Poly", 0.6, 4)))
    title = f"CIFAR-10, full width, the first {10 * epochs:,} gradients"
    return ReproductionTarget("cifar-partial", title, "accuracy", curves)


TARGETS: dict[str, Callable[[Scale, As], ReproductionTarget]] = {
    "cifar-k4": partial(_cifar_k, 4),
    "cifar-k16": partial(_cifar_k, 16),
    "wikitext-k4": partial(_wikitext_k, 4),
    "wikitext-k16": partial(_wikitext_k, 16),
    "staleness": _staleness,
    "sensitivity": _sensitivity,
    "skewed": _skewed,
    "clock": _clock,
    "cifar-partial": _partial,
}
