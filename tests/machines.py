"""How state machines of Hypothesis run, which make any sequence of calls."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine


def run_machine(machine: type[RuleBasedStateMachine], **options: Any) -> None:
    """Run a machine, the same sequences each time unless the options, those of ``settings``, say otherwise."""
    always = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
    case = machine.TestCase
    case.settings = settings(**{**always, **options})
    case().runTest()
