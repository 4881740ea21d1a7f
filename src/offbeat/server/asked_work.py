"""Owns how much work a task asks of a worker, as far as the server can know it.

Rule kept here: it counts as the local solvers do (`train/solver.py`): a pass has as many iterations as batches, the
short last one included. An honest worker never reports more.
"""

from dataclasses import dataclass

from offbeat.hosting.task_host import TaskDescription
from offbeat.settings import Settings


@dataclass(frozen=True, slots=True)
class AskedWork:
    """How much a training does where its lease does not say it; None where that is not known."""

    local_iterations: int | None
    local_passes: int | None
    batch_size: int | None

    @classmethod
    def of(cls, about: TaskDescription, settings: Settings, gradients_max: int | None) -> "AskedWork":
        """As the settings say, else as the task says; where `gradients_max` is set, only the settings count."""
        batch_size = settings.batch_size or about.batch_size
        if settings.local_iterations or settings.local_passes:
            return cls(settings.local_iterations, settings.local_passes, batch_size)
        if gradients_max is not None:
            return cls(None, None, batch_size)
        return cls(about.local_iterations, about.local_passes, batch_size)

    def gradients(self, samples: int) -> int | None:
        """As many as one training makes on this many samples; short batches count like whole ones."""
        if self.local_iterations is not None:
            return self.local_iterations
        if self.local_passes is not None and self.batch_size is not None:
            return self.local_passes * -(-samples // self.batch_size)
        return None
