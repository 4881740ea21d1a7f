"""The mixing rules: `offbeat.simulate(task, rule=offbeat.rules.fedbuff(10))`."""

from offbeat.core.rules import Facts, Mix, Rule, delta, fedasync, fedavg, fedbuff, scaled_from

__all__ = ["Facts", "Mix", "Rule", "delta", "fedasync", "fedavg", "fedbuff", "scaled_from"]
