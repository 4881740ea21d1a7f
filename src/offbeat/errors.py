"""The one error tree.

OffbeatError                    everything that this package raises on purpose
├── InvalidValue                an argument or setting is out of range (also a ValueError)
│   └── LayoutMismatch          an update's names, shapes or dtypes are not the model's
├── worker.api_answers.RequestRefused  the server said no, and why
├── worker.api_answers.Unreachable     the server does not answer
├── worker.loop.GaveUp          too many trainings in a row failed
├── worker.outbox.OutboxFull    a finished update cannot be kept
├── server.driver.Stuck         the ledger cannot be written now
├── server.recovery.UpdateLost  an acknowledged update is damaged
├── hosting.task_process.TaskFailed, TaskDied   the task's own code, or its process
├── InvariantBroken             a decision that must not happen was about to: the run stops and tells its story
└── MissingExtra                an optional dependency is not installed (also an ImportError)

Rule: a message says what was given, what is allowed, and what to do next.
"""


class OffbeatError(Exception):
    """Root of every error that Offbeat raises on purpose."""


class InvalidValue(OffbeatError, ValueError):
    """An argument or setting is out of range."""


class LayoutMismatch(InvalidValue):
    """The names, shapes or dtypes of an update are not those of the model."""


class InvariantBroken(OffbeatError):
    """The coordinator was about to do what it must never do; the message tells what led to it."""


class MissingExtra(OffbeatError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'offbeat[{extra}]'")
