"""Owns whether a served run goes on to another end than it had, and what that means for those who run it, in words."""

from offbeat.method import unlike_one_long_run
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.ends import Ends, refuse_reached
from offbeat.server.folder import Begun, check_target
from offbeat.settings import Settings
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_evaluation


def extension_of(c: Coordinator, ledger: Ledger, begun: Begun, settings: Settings) -> list[str]:
    """What follows from the ends that are asked for; empty where the run has them already.

    Refused where the run would not go on with them.
    """
    before, ends = Ends.of(c.plan), begun.ends
    if ends == before:
        return []
    refuse_reached(c, ends, c.at, lambda: map(as_evaluation, ledger.rows("evaluated")))
    check_target(ends.put_into(c.plan).target, begun.about, begun.method)
    words = [f"Going on from epoch {c.t_decided} to {ends} (before: {before})."]
    told = unlike_one_long_run(settings, begun.method.plan, begun.method.rule, ends)
    if c.end_reason:
        words.append("Workers that were told that the run is finished have ended: start them again.")
        told.append(f"version {c.t}, the last before, was evaluated")
    return words + [f"Unlike in one long run, {what}." for what in told]
