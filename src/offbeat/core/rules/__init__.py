"""The mixing rules: `interface` says what a rule is, `library` has their names, the other files are the families.

every_arrival   fedasync, delta, ringmaster, asyncfeded, dcasgd    a version with every update
buffered        fedbuff, rennala, fedavg                           several updates, one version
cached          ca2fl, ace                                         a vector per device
momentum        momentum, adam, amsgrad, fadas, nesterov           what becomes of a version's step
weights         participation, delay_adaptive                      how much an update counts
average         poly, ema                                          a mean of the versions, beside x_t
"""

from offbeat.core.rules.average import AVERAGED, Average, average_from_spec, ema, poly, with_average
from offbeat.core.rules.buffered import fedavg, fedbuff, rennala
from offbeat.core.rules.cached import ace, ca2fl
from offbeat.core.rules.composition import compose
from offbeat.core.rules.every_arrival import asyncfeded, dcasgd, delta, fedasync, ringmaster, sgd
from offbeat.core.rules.interface import (
    Answer,
    Facts,
    Finisher,
    Formula,
    Larger,
    Memory,
    Mix,
    Move,
    OnParameters,
    Product,
    Publication,
    Root,
    Rule,
    Steps,
    VectorStep,
    Weight,
    move,
    uses_base,
)
from offbeat.core.rules.library import from_spec
from offbeat.core.rules.momentum import adam, amsgrad, fadas, momentum, nesterov
from offbeat.core.rules.numbers import Schedule, scaled_from
from offbeat.core.rules.weights import delay_adaptive, participation

__all__ = [
    "AVERAGED",
    "Answer",
    "Average",
    "Facts",
    "Finisher",
    "Formula",
    "Larger",
    "Memory",
    "Mix",
    "Move",
    "OnParameters",
    "Product",
    "Publication",
    "Root",
    "Rule",
    "Schedule",
    "Steps",
    "VectorStep",
    "Weight",
    "ace",
    "adam",
    "amsgrad",
    "asyncfeded",
    "average_from_spec",
    "ca2fl",
    "compose",
    "dcasgd",
    "delay_adaptive",
    "delta",
    "ema",
    "fadas",
    "fedasync",
    "fedavg",
    "fedbuff",
    "from_spec",
    "momentum",
    "move",
    "nesterov",
    "participation",
    "poly",
    "rennala",
    "ringmaster",
    "scaled_from",
    "sgd",
    "uses_base",
    "with_average",
]
