"""What holds for all tests: none of them fails because the machine is busy."""

from importlib.util import find_spec

if find_spec("hypothesis"):  # the environment of Flower's tests has none
    from hypothesis import HealthCheck, settings

    settings.register_profile("offbeat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("offbeat")
