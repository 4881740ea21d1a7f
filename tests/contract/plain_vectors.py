"""What a rule's answers do to vectors, one operation after the other in plain numpy: nothing of the kernel is used."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat.core.rules import Answer, Average, Larger, Mix, Move, OnParameters, Product, Root, VectorStep

Floats = npt.NDArray[np.float32]
F = np.float32


@dataclass
class PlainVectors:
    """w, x, the slots, a cache per device and the mean, as they would be without any of the machinery."""

    w: Floats
    average: Average | None = None
    parameters: int | None = None
    """Elements that are trained; None is all."""
    versions: dict[int, Floats] = field(default_factory=dict)
    slots: dict[str, Floats] = field(default_factory=dict)
    caches: dict[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.x = self.mean = self.versions[0] = self.w.copy()

    def apply(self, answer: Answer, x_new: Floats, x_tau: Floats, t: int) -> None:
        if isinstance(answer, Mix):
            terms = (("w", answer.keep), ("new", answer.new), ("base", answer.base))
            self._run((Move("w", terms),), {"new": x_new, "base": x_tau})
        else:
            named = {"new": x_new, "base": x_tau}
            if answer.cache is not None:
                named["own"] = self.caches.get(answer.cache, np.zeros_like(self.w))
            self._run((*answer.steps, *answer.closing), named)
            if answer.cache is not None:
                self.caches[answer.cache] = named["own"]
        if answer.publish:
            self.publish(t)

    def publish(self, t: int, closing: tuple[VectorStep, ...] = ()) -> None:
        self._run(closing, {})
        self.x = self.versions[t] = self.w.copy()
        if self.average is not None:
            share, trained = self.average.share(t), self.parameters
            mean = F(1.0 - share) * self.mean + F(share) * self.x if share < 1 else self.x.copy()
            if trained is not None:
                mean[trained:] = self.x[trained:]
            self.mean = mean

    def _run(self, steps: tuple[VectorStep, ...], named: dict[str, Floats]) -> None:
        for step, part in _flat(steps, self.parameters):
            before = self._read(step.into, named).copy()
            before[part] = self._result(step, named)[part]
            if step.into in ("own",) or step.into.startswith("_"):
                named[step.into] = before
            elif step.into == "w":
                self.w = before
            else:
                self.slots[step.into] = before

    def _read(self, name: str, named: dict[str, Floats]) -> Floats:
        known = {"w": self.w, "x": self.x, **self.slots, **named}
        return known.get(name, np.zeros_like(self.w))

    def _result(self, step: Any, named: dict[str, Floats]) -> Floats:
        def of(name: str) -> Floats:
            return self._read(name, named)

        if isinstance(step, Move):
            total: Floats | None = None
            for name, number in step.terms:
                if F(number):
                    term = F(number) * of(name)
                    total = term if total is None else total + term
            return np.zeros_like(self.w) if total is None else total
        if isinstance(step, Product):
            made = F(step.share) * (of(step.left) * of(step.right))
            return F(step.keep) * of(step.into) + made if F(step.keep) else made
        if isinstance(step, Larger):
            return np.maximum(of(step.into), of(step.of))
        assert isinstance(step, Root)
        under = np.sqrt(of(step.under)) + F(step.eps)
        return np.where(under == 0, F(0), (F(step.step) * of(step.over)) / np.where(under == 0, F(1), under))


def _flat(steps: tuple[VectorStep, ...], parameters: int | None) -> Iterator[tuple[Any, slice]]:
    for step in steps:
        if isinstance(step, OnParameters):
            yield from ((inner, slice(0, parameters)) for inner in step.steps)
        else:
            yield step, slice(None)
