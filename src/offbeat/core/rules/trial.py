"""Owns the trial of a rule before a run: made-up updates show what would otherwise stop the run after it has begun."""

from collections.abc import Iterator
from typing import NamedTuple

from offbeat.core.rules.interface import Answer, Facts, Memory, Rule
from offbeat.errors import InvalidValue, OffbeatError

UPDATES = 16
DEVICES = 3


class Tried(NamedTuple):
    publishes_always: bool
    """Did every update publish a version?"""


def tried(rule: Rule) -> Tried:
    """What a rule does with a few updates; refused where it raises, or answers what cannot be done."""
    publishes = [bool(answer.publish) for answer in made_up(rule)]
    return Tried(all(publishes))


def made_up(rule: Rule, updates: int = UPDATES) -> Iterator[Answer]:
    """What a rule answers to made-up updates, one after the other."""
    t, memory = 1, rule.memory
    for number in range(updates):
        facts = Facts(
            t,
            max(0, t - 1 - number % (1 + (rule.staleness_max if rule.staleness_max is not None else DEVICES))),
            device=number % DEVICES,
            distance=1.0 if rule.needs_distance else None,
            count=number // DEVICES + 1,
            applied=number + 1,
            seen=min(number + 1, DEVICES),
            caches=min(number + 1, DEVICES),
            dot=dict.fromkeys(rule.dots, 1.0),
        )
        answer, memory = _decided(rule, facts, memory)
        t += bool(answer.publish)
        yield answer


def _decided(rule: Rule, facts: Facts, memory: Memory) -> tuple[Answer, Memory]:
    try:
        return rule.decide(facts, memory)
    except OffbeatError:
        raise
    except Exception as error:
        raise InvalidValue(
            f"rule {rule.spec} was tried on a made-up update and raised {type(error).__name__}: {error}; "
            f"the update was {facts}"
        ) from error
