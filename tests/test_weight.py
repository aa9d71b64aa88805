"""`emb.weight` as people use it, on ``torch.nn.Embedding`` and on ours: the same results, the same training after it."""

from __future__ import annotations

import functools

import pytest
import torch
from lazy_oracle import one_thread  # noqa: F401
from weight_cases import WRITE, Case
from weight_cases_training import CASES as ALL
from weight_world import EXACT, LAZY, REPLACED, Kind, World, assert_equal, dense

from speedtransfer.errors import SpeedtransferError

CASES = {case.id: case for case in ALL}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

# (kind, dtype, moment, with gradients): every group in float64 with each kind; float32 where numbers are all that may differ.
EVERYWHERE = [
    (EXACT, torch.float64, "fresh", True),
    (EXACT, torch.float64, "trained", True),
    (LAZY, torch.float64, "trained", True),
    (REPLACED, torch.float32, "trained", True),
]
BETWEEN = [
    (EXACT, torch.float64, "between", True),
    (LAZY, torch.float64, "between", True),
    (REPLACED, torch.float32, "between", True),
]
WITHOUT_GRADIENTS = [(EXACT, torch.float64, "trained", False), (LAZY, torch.float32, "between", False)]
SETTINGS = {
    "read": EVERYWHERE + BETWEEN + WITHOUT_GRADIENTS,
    "write": EVERYWHERE + BETWEEN,
    "grad": BETWEEN,
    "swap": EVERYWHERE,
    "train": EVERYWHERE,
}
RUNS = [
    pytest.param(
        case,
        *setting,
        id=f"{name}-{setting[0].name}-{str(setting[1])[-2:]}-{setting[2]}{'' if setting[3] else '-no_grad'}",
    )
    for name, case in CASES.items()
    for setting in SETTINGS[case.group]
]


@functools.cache
def outcome(case: Case, optimizer: str, dtype: torch.dtype, moment: str, grad: bool) -> list:
    """Return what is seen with torch.nn: the same for every kind with that optimizer."""
    kind = next(dense(kind) for kind in (EXACT, LAZY) if kind.optimizer.__name__ == optimizer)
    return run(kind, case, dtype, moment, grad)


def run(kind: Kind, case: Case, dtype: torch.dtype, moment: str, grad: bool) -> list:
    world = World(kind, dtype, moment)
    world.run(case, grad)
    return world.seen


def assert_same(seen: list, expected: list, tolerance: float) -> None:
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (name, value), (_, wanted) in zip(seen, expected, strict=True):
        assert_equal(value, wanted, tolerance, name)


@pytest.mark.parametrize(("case", "kind", "dtype", "moment", "grad"), RUNS)
def test_as_torch(case: Case, kind: Kind, dtype: torch.dtype, moment: str, grad: bool) -> None:
    expected = outcome(case, kind.optimizer.__name__, dtype, moment, grad)
    if case.differs:
        with pytest.raises(SpeedtransferError):
            run(kind, case, dtype, moment, grad)
    else:
        assert_same(run(kind, case, dtype, moment, grad), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_the_comparison_is_fair(name: str) -> None:
    """Torch alone, twice, gives one outcome."""
    case = CASES[name]
    setting = SETTINGS[case.group][0]
    expected = outcome(case, setting[0].optimizer.__name__, *setting[1:])
    assert_same(run(dense(setting[0]), case, *setting[1:]), expected, 0.0)


@functools.cache
def untouched(moment: str) -> list:
    return outcome(Case("write", "", "pass"), "AdamW", torch.float64, moment, True)


@pytest.mark.parametrize("case", WRITE, ids=lambda case: case.id)
def test_a_write_changes_rows(case: Case) -> None:
    """A write that changed nothing would prove nothing."""
    seen = dict(outcome(case, "AdamW", torch.float64, "trained", True))
    before = dict(untouched("trained"))["emb.weight after the case"]
    assert not torch.equal(seen["emb.weight after the case"], before)
