"""Owns what a coordinator went through lately: every error about a task tells its story."""

import re
from collections import deque

from offbeat.protocol.messages import Command, Event

STORY_LENGTH = 256


class Story:
    """The latest events, with the commands that answered them."""

    def __init__(self) -> None:
        self._told: deque[tuple[Event, list[Command]]] = deque(maxlen=STORY_LENGTH)

    def add(self, event: Event, commands: list[Command]) -> None:
        self._told.append((event, commands))

    def latest(self, count: int) -> list[str]:
        return [f"{event} -> {commands}" for event, commands in list(self._told)[-count:]]

    def of_task(self, task: int) -> list[str]:
        """The lines in which an event or a command names this task."""
        return [line for line in self.latest(STORY_LENGTH) if re.search(rf"\btask={task}\b", line)]
