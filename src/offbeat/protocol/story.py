"""Owns what a coordinator went through lately: every error about a task tells its story."""

from collections import deque

from offbeat.protocol.messages import AnswerPush, Command, Event, MixUpdate, ReleaseTask, SendTask

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
        return [
            f"{event} -> {commands}"
            for event, commands in self._told
            if getattr(event, "task", None) == task or any(_task(command) == task for command in commands)
        ]


def _task(command: Command) -> int | None:
    match command:
        case SendTask() | ReleaseTask():
            return command.lease.task
        case MixUpdate():
            return command.decision.lease.task
        case AnswerPush():
            return command.task
    return None
