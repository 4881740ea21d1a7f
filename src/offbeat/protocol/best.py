"""Owns which evaluated version is the best, by one of the task's metrics.

Rules kept here:
- The first of several that are equally good is the best: what is kept changes only for something better.
- A version whose metric is NaN, or is missing, is never the best.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from typing import Self

from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Evaluated

SMALL_IS_GOOD = ("loss", "error", "perplexity")
"""Metrics with these names, or ending in _loss and so on, are better the smaller they are."""


def small_is_good(metric: str) -> bool:
    return re.split(r"[_.]", metric.lower())[-1] in SMALL_IS_GOOD


@dataclass(frozen=True, slots=True)
class BestBy:
    metric: str
    smallest: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `accuracy`, `accuracy:max`, `loss` or `loss:min`.

        >>> BestBy.parse("accuracy"), BestBy.parse("test_loss")
        (BestBy(metric='accuracy', smallest=False), BestBy(metric='test_loss', smallest=True))
        """
        found = re.fullmatch(r"\s*([\w.]+?)\s*(?::\s*(min|max))?\s*", text)
        if found is None:
            raise InvalidValue(f"keep_best is {text!r}; write it like accuracy, loss:min or score:max")
        return cls(found[1], small_is_good(found[1]) if found[2] is None else found[2] == "min")

    def better(self, new: Evaluated, old: Evaluated | None) -> bool:
        """Is the new one better than the best so far?"""
        value = new.metrics.get(self.metric)
        if value is None or isnan(value):
            return False
        best = None if old is None else old.metrics[self.metric]
        return best is None or (value < best if self.smallest else value > best)

    def of(self, evaluations: Iterable[Evaluated]) -> Evaluated | None:
        """The best of these; None where none of them has the metric.

        >>> BestBy.parse("a").of([Evaluated(0, 0, {"a": 1}), Evaluated(1, 1, {"a": 3}), Evaluated(2, 2, {"a": 3})]).t
        1
        """
        best: Evaluated | None = None
        for evaluation in evaluations:
            if self.better(evaluation, best):
                best = evaluation
        return best

    def __str__(self) -> str:
        return f"{self.metric}:{'min' if self.smallest else 'max'}"
