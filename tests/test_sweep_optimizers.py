"""The sweep over other packages' optimizers tells what works from what does not, on classes of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sweep_optimizers
import torch
from refused_styles import Lamb
from sweep_optimizers import DIFFERS, FAILS, REFUSED, RESULTS, WORKS, main, outcome
from third_party import History, Lion, Proximal, RowOptimizer


class CountsLate(RowOptimizer):
    """Row by row for as long as any trial is; then each row is moved by what all have."""

    def update(self, p, g, state, group) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(g if state["step"] < 28 else g * p.norm(), alpha=group["lr"] / 10)


class Overflows(RowOptimizer):
    def update(self, p, g, state, group) -> None:
        p.mul_(1e30).sub_(g)


class Still(RowOptimizer):
    def __init__(self, params) -> None:
        super().__init__(params, lr=0.0)

    def update(self, p, g, state, group) -> None:
        p.sub_(g, alpha=group["lr"])


CASES = {
    Lion: (WORKS, ""),
    History: (WORKS, ""),
    Proximal: (WORKS, ""),
    torch.optim.Adam: (WORKS, ""),
    Lamb: (REFUSED, "not row by row: the update of a row depends on the other rows"),
    torch.optim.LBFGS: (REFUSED, "it evaluates the loss several times"),
    Overflows: (FAILS, "its weights become infinite or NaN"),
    Still: (FAILS, "it moves no weight"),
    CountsLate: (DIFFERS, "weights"),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_outcomes(kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_optimizers, "STEPS", 50)
    found, (result, detail) = outcome("ours", kind), CASES[kind]
    assert found.result == result, found
    assert detail in found.detail


@pytest.mark.parametrize(("kind", "status"), [(Lion, 0), (CountsLate, 1)])
def test_the_command(kind: type[RowOptimizer], status: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    written = RESULTS.read_bytes()
    monkeypatch.setattr(sweep_optimizers, "STEPS", 50)
    monkeypatch.setattr("sweep_optimizers.PACKAGES", {"ours": "third_party"})
    monkeypatch.setattr(f"third_party.{kind.__name__}", kind, raising=False)
    monkeypatch.setattr("sys.argv", ["sweep", kind.__name__])
    assert main() == status
    assert (
        f"{1 - status} works, 0 refused, 0 fails on nn.Embedding too, {status} DIFFERS, of 1" in capsys.readouterr().out
    )
    assert RESULTS.read_bytes() == written  # a part of the classes is no sweep


def test_the_documented_sweep_is_whole() -> None:
    sweep = json.loads(Path(RESULTS).read_text(encoding="utf-8"))
    assert sweep["versions"].keys() == {one["package"] for one in sweep["outcomes"]}
    assert sum(one["result"] == WORKS for one in sweep["outcomes"]) > 50
