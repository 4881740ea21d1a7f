"""Owns the checkpoint of a simulated run: its vectors, the states of its devices, and its place in the ledger."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from offbeat.core.layout import Layout, Model
from offbeat.storage.model_file import load_models, load_states, save_models
from offbeat.task import DeviceState


class RunCheckpoint(NamedTuple):
    models: Mapping[str, Model]
    states: Mapping[str, DeviceState]
    place: Mapping[str, str]
    """Where the run stood."""

    @classmethod
    def read(cls, path: Path, layout: Layout) -> "RunCheckpoint":
        models, place = load_models(path, layout)
        return cls(models, load_states(path), place)

    def write(self, path: Path) -> None:
        save_models(path, self.models, self.place, self.states)

    @property
    def nbytes(self) -> int:
        models = sum(model.vector.nbytes for model in self.models.values())
        return models + sum(state.nbytes for state in self.states.values())
