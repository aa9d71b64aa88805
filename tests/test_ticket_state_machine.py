"""Any sequence of calls on a module whose rows are read ahead gives, to the bit, what it gives on a twin without."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from ticket_machine import TicketMachine, held_fetch

from speedtransfer.rows import Rows

MODERATE = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def run(profile, monkeypatch):
    monkeypatch.setattr(Rows, "fetch", held_fetch)
    case = TicketMachine.TestCase
    case.settings = profile
    case().runTest()


def test_any_sequence_of_calls(monkeypatch):
    run(MODERATE, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_calls(monkeypatch):
    run(settings(MODERATE, max_examples=500, stateful_step_count=20, derandomize=False), monkeypatch)
