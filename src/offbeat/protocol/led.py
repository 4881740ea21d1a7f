"""Owns a coordinator that is led through a run that was recorded: who was given a task is told to it.

Who waited at which moment, and which heartbeat kept a lease, is forgotten at checkpoints. What came of it is recorded:
the leases, and how they ended. Told these, it decides on every update by itself, as the coordinator did that was
recorded: the same code, with the same rule, gate, policy and limits.
"""

from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Command, EndSilence, Lease, PublishVersion, ReleaseTask, SendTask

Dispatched = SendTask | ReleaseTask | EndSilence | PublishVersion
"""What a coordinator does of its own accord, as time passes and workers ask."""


class LedCoordinator(Coordinator):
    """It grants, releases and wakes nothing by itself."""

    def follow(self, at: float, command: Dispatched) -> list[Command]:
        """Do what was done then. Answers what it does by that: a lease that it grants is made anew, not copied."""
        self.at, self._commands = at, []
        match command:
            case SendTask(lease):
                self._grant_again(lease)
            case ReleaseTask(lease):
                self._release_again(lease, command)
            case EndSilence(lease) if lease.task in self.silent:
                if command.resumed:
                    self.book.reopen(self.silent[lease.task], lease.deadline)
                else:
                    self.dispatcher.give_away(lease.worker)
            case PublishVersion(t) if t > self.t_decided:
                self._publish_group()
            case _:
                pass  # it has done so already, for the same reason as the coordinator that was recorded
        return self._commands

    def _grant_again(self, lease: Lease) -> None:
        if lease.task not in self.leases:  # else the worker was told again of what it has
            self.idle.discard(lease.worker)
            asked_at = self.dispatcher.waits.granted(lease.worker)
            granted = self.dispatcher.grant(lease.worker, self.at, self.t)
            self._commands.append(SendTask(granted, asked_at))

    def _release_again(self, lease: Lease, command: ReleaseTask) -> None:
        mine = self.leases.get(lease.task)
        if mine is None:
            return
        if command.silent:
            self.dispatcher.pace.closed(mine)
            self.book.silence(mine)
        else:
            self.dispatcher.release(mine, revoked=command.revoked)

    def _trigger(self) -> None:
        """Leases are told."""

    def _wake_next(self) -> None:
        """So is all that comes of the passing of time."""
