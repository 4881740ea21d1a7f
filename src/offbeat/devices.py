"""The simulated devices: `offbeat.simulate(task, device_model=offbeat.devices.pareto(2))`.

Each function returns the text that the setting takes. The distributions suit `down_mbps`, `up_mbps`, `availability` and
`dropout`, too; `factor` multiplies all of their values.
"""

from pathlib import Path

from offbeat.errors import InvalidValue
from offbeat.sim.devices import ALLOWED, distribution


def constant(value: float = 1.0) -> str:
    """Every device alike.

    >>> constant(), constant(2.5)
    ('constant:1', 'constant:2.5')
    """
    return _named("constant", value)


def lognormal(sigma: float, *, factor: float = 1.0) -> str:
    """exp(sigma*z) with z normal, drawn once per device: half of the devices lie below 1.

    >>> lognormal(0.5), lognormal(0.5, factor=10)
    ('lognormal:0.5', '10*lognormal:0.5')
    """
    return _named("lognormal", sigma, factor=factor)


def exponential(mean: float = 1.0) -> str:
    """Exponential; as a device model, drawn anew for every task."""
    return _named("exponential", mean)


def uniform(low: float, high: float) -> str:
    """Between two bounds, drawn once per device.

    >>> uniform(0.5, 1.5)
    'uniform:0.5,1.5'
    """
    return _named("uniform", low, high)


def pareto(shape: float, *, factor: float = 1.0) -> str:
    """u^(-1/shape) with u uniform, drawn once per device: a heavy tail of slow ones."""
    return _named("pareto", shape, factor=factor)


def trace(path: Path | str) -> str:
    """Devices that behave like the phones in a trace file; docs/simulation.md describes its keys."""
    return f"trace:{path}"


def sampled(k: int) -> str:
    """The paper's set-up: the staleness of every update is drawn, and is less than k.

    >>> sampled(16)
    'sampled:16'
    """
    if k < 1:
        raise InvalidValue(f"k is {k} but must be a whole number >= 1")
    return f"sampled:{k}"


def _named(name: str, *numbers: float, factor: float = 1.0) -> str:
    text = f"{name}:{','.join(map(_short, numbers))}"
    text = text if factor == 1 else f"{_short(factor)}*{text}"
    try:
        distribution(text)
    except ValueError as error:
        raise InvalidValue(f"{text} is no distribution: {error}; use {ALLOWED}") from None
    return text


def _short(number: float) -> str:
    return repr(float(number)).removesuffix(".0")
