"""Owns the models that trainings start from, in the object store: each once, for as long as somebody needs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.core.layout import Model
from offbeat.hosting.task_host import Bare


@dataclass(eq=False, slots=True)
class Kept:
    """A version that is needed."""

    model: Model
    users: int = 0
    reference: Any = None


class Versions:
    """What is in the object store; the newest stays, for the next training will start from it."""

    def __init__(self, put: Callable[[Bare], Any]) -> None:
        self._put = put
        self._kept: dict[int, Kept] = {}
        self._newest: int | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, models: Sequence[Model]) -> None:
        """Somebody will need these."""
        for model in models:
            if id(model) not in self._kept:
                self._kept[id(model)] = Kept(model)  # which keeps the model, so that no other gets its id
                before, self._newest = self._newest, id(model)
                self._tidy(before)
            self._kept[id(model)].users += 1

    def references(self, models: Sequence[Model]) -> list[Any]:
        """Where they are; those that are not there yet are put there."""
        return [self._reference(self._kept[id(model)]) for model in models]

    def _reference(self, kept: Kept) -> Any:
        if kept.reference is None:
            kept.reference = self._put(Bare.of(kept.model))
        return kept.reference

    def release(self, models: Sequence[Model]) -> None:
        """Somebody needs them no more."""
        for model in models:
            self._kept[id(model)].users -= 1
            self._tidy(id(model))

    def _tidy(self, key: int | None) -> None:
        if key is not None and key != self._newest and not self._kept[key].users:
            del self._kept[key]
