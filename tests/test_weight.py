"""`emb.weight` as people use it, on ``torch.nn.Embedding`` and on ours: the same results, the same training after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweeps import cover
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
ALL_RUNS = {
    f"{name}-{name_of(*setting)}": (case, *setting) for name, case in CASES.items() for setting in SETTINGS[case.group]
}


def factors(case: Case, kind: Kind, *rest: Any) -> list[tuple[str, str]]:
    """Return what is to be in a case that always runs; those of many statements are in one of each kind."""
    many = kind.name if len(case.parts) > 1 else ""
    return list(zip("ckdmg", map(str, (f"{case.id} {many}", kind, *rest)), strict=True))


QUICK = cover({name: factors(*run) for name, run in ALL_RUNS.items()}, 1)
# Worlds of torch.nn and of ours that have served a case, and can serve another.
used: dict[str, tuple[World, World]] = {}


def compare(case: Case, kind: Kind, dtype: torch.dtype, moment: str, grad: bool) -> list[tuple[str, Any]]:
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
        return wanted
    seen = ours.run(case, grad, steps)
    assert [name for name, _ in seen] == [name for name, _ in wanted]
    for (what, value), (_, other) in zip(seen, wanted, strict=True):
        assert_equal(value, other, 0.0 if kind.name == "torch" else TOLERANCE[dtype], what)
    if not replaces:
        for world in (expected, ours):
            world.reset()
        used[name] = expected, ours
    return wanted


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kind, *rest = ALL_RUNS[name]
    with monkeypatch.context() as patch:
        if kind.name == "copies":  # as on CUDA, where no tensor is over the memory of the table
            patch.setattr(Handle, "aliased", property(lambda self: False))
        compare(case, kind, *rest)


# Those of a setting one after another: worlds serve one case after the other.
@pytest.mark.parametrize("name", sorted(QUICK, key=lambda name: [*map(str, ALL_RUNS[name][1:]), name]))
def test_as_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "-Add_a_parameter_group-" in name and torch.__version__ < "2.13":
        pytest.skip("Adagrad of torch 2.6 makes no state for a group that is added")
    run(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("group", SETTINGS)
def test_as_torch_in_every_setting(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (case, *_) in ALL_RUNS.items():
        if case.group == group and name not in QUICK:
            try:
                run(name, monkeypatch)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


def torch_twice(case: Case) -> None:
    """The comparison is a fair one: torch alone gives one outcome. And what is called a write changes the rows."""
    kind, *setting = SETTINGS[case.group][0]
    seen = compare(case, dense(kind), *setting)
    if case.group == "write":
        times = ("before", "after the case")
        before, after = ([rows for what, rows in seen if what == f"emb.weight {time}"] for time in times)
        assert not any(map(torch.equal, before, after)), case.id


def test_torch_twice() -> None:
    for case in {case.group: case for case in ALL}.values():
        torch_twice(case)


@pytest.mark.slow
def test_torch_twice_in_every_case() -> None:
    for case in ALL:
        torch_twice(case)
