"""How state machines of Hypothesis run, which make any sequence of calls."""

import pytest
from hypothesis import HealthCheck, settings


def run_machine(machine, **options):
    """Run a machine, the same sequences each time unless the options, those of ``settings``, say otherwise."""
    always = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
    case = machine.TestCase
    case.settings = settings(**{**always, **options})
    case().runTest()


def short_and_long(short, long):
    """Give a test the options of a short run, and those of a long one, which is slow and of other sequences each time."""
    marks = [pytest.mark.slow, pytest.mark.timeout(1800)]
    runs = [short, pytest.param(long | {"derandomize": False}, marks=marks)]
    return pytest.mark.parametrize("options", runs, ids=["short", "long"])
