"""Owns the rules that keep a vector per device: what the device sent last, so that absent devices count, too.

The sum of these vectors is kept, and divided by how many there are so far. The papers divide by a declared number of
devices and count those that never came as 0: `devices` does that.
"""

from offbeat.core.rules.composition import LANDING
from offbeat.core.rules.interface import Facts, Memory, Rule, Steps, VectorStep, move
from offbeat.core.rules.numbers import above_0, whole
from offbeat.errors import InvalidValue


def ca2fl(m: int, eta: float = 1.0, *, devices: int | None = None, groups: int = 0) -> Rule:
    """Calibrated buffering: every m-th update publishes x + eta (h + 1/m * sum of (D - own)), D = x_new - x_tau.

    h is the mean of what every device sent last, from before this buffer; own is this device's, and becomes D. CA2FL:
    Wang et al., ICLR 2024. `groups` keeps one vector for all devices that are alike modulo it, in place of one each.
    A weight multiplies D - own; what is kept is D as it came.

    >>> rule = ca2fl(1, devices=4)
    >>> answer, _ = rule.decide(Facts(t=1, tau=0), rule.memory)
    >>> for step in answer.steps + answer.closing:
    ...     print(step.into, "=", " ".join(f"{c:+g} {name}" for name, c in step.terms))
    _d = +1 new -1 base
    _change = +1 _d -1 own
    g = +1 g +1 _change
    changes = +1 changes +1 _change
    own = +1 _d
    g = +1 g +0.25 sum
    sum = +1 sum +1 changes
    changes =\x20
    w = +1 x +1 g
    g =\x20
    """
    whole("ca2fl", m, "m")
    above_0("ca2fl", "eta", eta)
    _check("ca2fl", devices, groups)

    def formula(facts: Facts, memory: Memory) -> tuple[Steps, Memory]:
        share = eta / m * facts.weight
        complete = memory["count"] + 1 == m
        steps: tuple[VectorStep, ...] = (
            move("_d", new=1.0, base=-1.0),
            move("_change", _d=1.0, own=-1.0),
            move("g", g=1.0, _change=share),
            move("changes", changes=1.0, _change=1.0),
            move("own", _d=1.0),
        )
        # How many there were before this buffer: h is the mean of these.
        there = devices or memory["there"]
        closing: tuple[VectorStep, ...] = (move("sum", sum=1.0, changes=1.0), move("changes"), *LANDING)
        if complete and there:
            closing = (move("g", g=1.0, sum=eta / there), *closing)
        after = {"count": 0, "there": facts.caches} if complete else {**memory, "count": memory["count"] + 1}
        return Steps(1.0, share, -share, complete, steps, closing if complete else ()), after

    spec = f"ca2fl({m}, eta={float(eta)!r}{_said(devices, groups)})"
    slots, memory = ("g", "sum", "changes"), {"count": 0, "there": 0}
    return Rule(spec, formula, memory, needs_base=True, slots=slots, caches=groups)


def ace(eta: float = 0.1, *, devices: int | None = None, groups: int = 0) -> Rule:
    """All devices in every step: each update publishes x + eta * (mean of what every device sent last).

    ACE: 2025, arXiv 2511.19066; the asynchronous form of MIFA (Gu et al. 2021). In the paper all devices are asked
    once before the first step, and devices do one local iteration. What a device sent last is added again with every
    update of others, so eta must be smaller than with `delta`: by about the number of devices that are in flight. On
    the command line, eta is alpha where no number says it. A weight multiplies the whole step.

    >>> rule = ace(1.0, devices=4)
    >>> answer, _ = rule.decide(Facts(t=1, tau=0), rule.memory)
    >>> for step in answer.steps + answer.closing[:1]:
    ...     print(step.into, "=", " ".join(f"{c:+g} {name}" for name, c in step.terms))
    _d = +1 new -1 base
    sum = +1 sum +1 _d -1 own
    own = +1 _d
    g = +0.25 sum
    """
    above_0("ace", "eta", eta)
    _check("ace", devices, groups)

    def formula(facts: Facts, memory: Memory) -> tuple[Steps, Memory]:
        share = eta / (devices or facts.caches) * facts.weight
        steps = (
            move("_d", new=1.0, base=-1.0),
            move("sum", sum=1.0, _d=1.0, own=-1.0),
            move("own", _d=1.0),
        )
        return Steps(1.0, share, -share, True, steps, (move("g", sum=share), *LANDING)), memory

    spec = f"ace(eta={float(eta)!r}{_said(devices, groups)})"
    return Rule(spec, formula, needs_base=True, slots=("g", "sum"), caches=groups)


def _said(devices: int | None, groups: int) -> str:
    return (f", devices={devices}" if devices else "") + (f", groups={groups}" if groups else "")


def _check(rule: str, devices: int | None, groups: int) -> None:
    if devices is not None:
        whole(rule, devices, "devices", "how many devices there are, those included that never come")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
        raise InvalidValue(f"{rule}: groups is {groups!r} but must be a whole number >= 0; 0 is a vector per device")
