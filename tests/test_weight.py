"""`emb.weight` as people use it, on ``torch.nn.Embedding`` and on ours: the same results, the same training after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lazy_oracle import one_thread  # noqa: F401
from weight_cases import Case
from weight_cases_training import CASES as ALL
from weight_world import COPIES, EXACT, LAZY, REPLACED, Kind, World, assert_equal, dense

from speedtransfer.errors import SpeedtransferError
from speedtransfer.optim import Handle

CASES = {case.id: case for case in ALL}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def name_of(kind: Kind, dtype: torch.dtype, moment: str, grad: bool) -> str:
    return f"{kind.name}-{str(dtype)[-2:]}-{moment}{'' if grad else '-no_grad'}"


# (kind, dtype, moment, with gradients)
FRESH = (EXACT, torch.float64, "fresh", True)
TRAINED = [(EXACT, torch.float64, "trained", True), (LAZY, torch.float64, "trained", True)]
REPLACED_TRAINED = (REPLACED, torch.float32, "trained", True)
BETWEEN = [(EXACT, torch.float64, "between", True), (LAZY, torch.float64, "between", True)]
OF_COPIES = (COPIES, torch.float64, "between", True)
WITHOUT_GRADIENTS = [(EXACT, torch.float64, "trained", False), (REPLACED, torch.float32, "between", False)]
SETTINGS = {
    "read": [*BETWEEN, FRESH, REPLACED_TRAINED, OF_COPIES, *WITHOUT_GRADIENTS],
    "write": [*BETWEEN, FRESH, REPLACED_TRAINED, OF_COPIES],
    "grad": [*BETWEEN, (REPLACED, torch.float32, "between", True), OF_COPIES],
    "swap": [FRESH, TRAINED[1], REPLACED_TRAINED],
    "train": [*TRAINED, REPLACED_TRAINED],
}
RUNS = [
    pytest.param(case, *setting, id=f"{name}-{name_of(*setting)}")
    for name, case in CASES.items()
    for setting in SETTINGS[case.group]
]
# Worlds of torch.nn and of ours that have served a case, and can serve another.
used: dict[str, tuple[World, World]] = {}


def compare(case: Case, kind: Kind, dtype: torch.dtype, moment: str, grad: bool) -> dict[str, Any]:
    """Run a case on both and return what is seen with torch.nn."""
    replaces = case.group in ("swap", "train")  # modules, optimizers, hooks
    name = f"{kind.name} {name_of(kind, dtype, moment, grad)}"
    pair = None if replaces else used.pop(name, None)
    expected, ours = pair or (World(dense(kind), dtype, moment), World(kind, dtype, moment))
    steps = 0 if moment == "fresh" and not replaces else 2
    wanted = expected.run(case, grad, steps)
    if kind.name != "torch" and (case.refused or (kind.name == "copies" and case.refused_of_copies)):
        with pytest.raises((SpeedtransferError, RuntimeError, ValueError)):
            ours.run(case, grad, steps)
        return dict(wanted)
    seen = ours.run(case, grad, steps)
    assert [name for name, _ in seen] == [name for name, _ in wanted]
    for (what, value), (_, other) in zip(seen, wanted, strict=True):
        assert_equal(value, other, 0.0 if kind.name == "torch" else TOLERANCE[dtype], what)
    if not replaces:
        for world in (expected, ours):
            world.reset()
        used[name] = expected, ours
    return dict(wanted)


@pytest.mark.sweep("case", "kind", "dtype", "moment", "grad")
@pytest.mark.parametrize(("case", "kind", "dtype", "moment", "grad"), RUNS)
def test_as_torch(case: Case, kind: Kind, dtype: torch.dtype, moment: str, grad: bool, monkeypatch) -> None:
    if kind.name == "copies":  # as on CUDA, where no tensor is over the memory of the table
        monkeypatch.setattr(Handle, "aliased", property(lambda self: False))
    compare(case, kind, dtype, moment, grad)


# One case of each group always: this is of torch alone.
OF_EACH_GROUP = {case.group: name for name, case in CASES.items()}.values()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OF_EACH_GROUP else pytest.mark.slow) for name in CASES]
)
def test_torch_twice(name: str) -> None:
    """The comparison is a fair one: torch alone gives one outcome. And what is called a write changes the rows."""
    case = CASES[name]
    kind, *setting = SETTINGS[case.group][0]
    seen = compare(case, dense(kind), *setting)
    if case.group == "write":
        assert not torch.equal(seen["emb.weight before"], seen["emb.weight after the case"])
