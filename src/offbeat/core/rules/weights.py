"""Owns the weights that every rule may be given: how much an update counts beside its staleness."""

from offbeat.core.rules.interface import Facts, Weight  # noqa: F401 (the examples use Facts)
from offbeat.core.rules.numbers import above_0
from offbeat.errors import InvalidValue

CAP = 4.0


def participation(cap: float = CAP) -> Weight:
    """As much for every device: (k/m) / count, k updates of m devices so far, count of them this device's; at most cap.

    A device that comes twice as often counts half as much each time. The weights of Rescaled ASGD (2026, arXiv
    2605.13434), from counts in place of computing times. Without a cap, the first update of a slow device would count
    as much as all that the others sent meanwhile.

    >>> weight = participation().factor
    >>> weight(Facts(9, 0, applied=8, seen=2, count=6)), weight(Facts(9, 0, applied=8, seen=2, count=2))
    (0.6666666666666666, 2.0)
    """
    if not cap >= 1.0:
        raise InvalidValue(f"participation: the cap is {cap!r} but must be a number >= 1; {CAP:g} is usual")
    return Weight(f"participation({float(cap)!r})", lambda facts: min(cap, facts.applied / facts.seen / facts.count))


def delay_adaptive(free: float) -> Weight:
    """As much as ever up to a staleness of `free`, then free/staleness.

    Mishchenko et al. 2022, in the form of their notebook; the step of Koloskova et al. 2022 has the same shape. `free`
    is the number of tasks in flight. It lets slow devices count less: not for devices with unlike data.

    >>> [delay_adaptive(2).factor(Facts(9, 8 - staleness)) for staleness in (0, 2, 8)]
    [1.0, 1.0, 0.25]
    """
    above_0("delay-adaptive", "free", free)
    return Weight(
        f"delay-adaptive({float(free)!r})",
        lambda facts: 1.0 if facts.staleness <= free else free / facts.staleness,
    )
