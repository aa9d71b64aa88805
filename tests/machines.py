"""How state machines of Hypothesis run, which make any sequence of calls."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine


def run_machine(machine: type[RuleBasedStateMachine], **options: Any) -> None:
    """Run a machine, the same sequences each time unless the options, those of ``settings``, say otherwise."""
    always = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
    case = machine.TestCase
    case.settings = settings(**{**always, **options})
    case().runTest()


def short_and_long(short: dict[str, Any], long: dict[str, Any]) -> Any:
    """Give a test the options of a short run, and those of a long one, which is slow and of other sequences each time."""
    marks = [pytest.mark.slow, pytest.mark.timeout(1800)]
    runs = [short, pytest.param(long | {"derandomize": False}, marks=marks)]
    return pytest.mark.parametrize("options", runs, ids=["short", "long"])
