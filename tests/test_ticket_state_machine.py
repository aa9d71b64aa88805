"""Any sequence of calls on a module whose rows are read ahead gives, to the bit, what it gives on a twin without."""

from __future__ import annotations

import pytest
from hypothesis import settings
from ticket_machine import MODERATE, TicketMachine, run_machine


def test_any_sequence_of_calls(monkeypatch):
    run_machine(TicketMachine, MODERATE, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_calls(monkeypatch):
    run_machine(TicketMachine, settings(MODERATE, max_examples=500, derandomize=False), monkeypatch)
