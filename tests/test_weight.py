"""`emb.weight` as people use it, on ``torch.nn.Embedding`` and on ours: the same results, the same training after it."""

import contextlib
import weakref

import pytest
import torch
from sweeps import cover, few
from weight_cases_training import CASES as ALL
from weight_programs import SETTINGS as PROGRAM_SETTINGS
from weight_programs import STATEMENTS, ProgramWorld, draw, run, shrink
from weight_world import COPIES, EXACT, LAZY, REPLACED, World, assert_equal

from speedtransfer.errors import SpeedtransferError

CASES = {case.id: case for case in ALL}
assert len(CASES) == len(ALL), "two cases have one name"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def name_of(kind, dtype, moment, grad):
    return f"{kind.name}-{str(dtype)[-2:]}-{moment}{'' if grad else '-no_grad'}"


# (kind, dtype, moment, with gradients)
FRESH, REPLACED_TRAINED = (EXACT, torch.float64, "fresh", True), (REPLACED, torch.float32, "trained", True)
TRAINED = [(kind, torch.float64, "trained", True) for kind in (EXACT, LAZY)]
BETWEEN = [(kind, torch.float64, "between", True) for kind in (EXACT, LAZY, COPIES)]
WITHOUT_GRADIENTS = [(EXACT, torch.float64, "trained", False), (REPLACED, torch.float32, "between", False)]
SETTINGS = {
    "read": [*BETWEEN, FRESH, REPLACED_TRAINED, *WITHOUT_GRADIENTS],
    "write": [*BETWEEN, FRESH, REPLACED_TRAINED],
    "grad": [*BETWEEN, (REPLACED, torch.float32, "between", True)],
    "swap": [FRESH, TRAINED[1], REPLACED_TRAINED],
    "train": [*TRAINED, REPLACED_TRAINED],
}
ALL_RUNS = {
    f"{name}-{name_of(*setting)}": (case, *setting) for name, case in CASES.items() for setting in SETTINGS[case.group]
}


def factors(case, kind, *rest):
    """Return what is to be in a case that always runs; those of many statements are in one of each kind."""
    many = kind.name if len(case.parts) > 1 else ""
    return list(zip("ckdmg", map(str, (f"{case.id} {many}", kind, *rest)), strict=True))


QUICK = cover({name: factors(*run) for name, run in ALL_RUNS.items()}, 1)
# Worlds of torch.nn and of ours that have served a case, and can serve another.
used = {}


def compare(case, kind, dtype, moment, grad):
    """Run a case on torch.nn and on ours, and compare all that is seen."""
    replaces = case.group in ("swap", "train")  # modules, optimizers, hooks
    name = name_of(kind, dtype, moment, grad)
    pair = None if replaces else used.pop(name, None)
    steps = 0 if moment == "fresh" and not replaces else 2
    with kind.hidden():
        expected, tried = pair or (World(kind, False, dtype, moment), World(kind, True, dtype, moment))
        wanted = expected.run(case, grad, steps)
        if case.refused or (kind.copies and case.refused_of_copies):
            with pytest.raises((SpeedtransferError, RuntimeError, ValueError)):
                tried.run(case, grad, steps)
            return
        seen = tried.run(case, grad, steps)
        assert [name for name, _ in seen] == [name for name, _ in wanted]
        for (what, value), (_, other) in zip(seen, wanted, strict=True):
            assert_equal(value, other, TOLERANCE[dtype], what)
        if not replaces:
            for world in (expected, tried):
                world.reset()
            used[name] = expected, tried


# Those of a setting one after another: worlds serve one case after the other.
@pytest.mark.parametrize("name", sorted(QUICK, key=lambda name: [*map(str, ALL_RUNS[name][1:]), name]))
def test_as_torch(name):
    if "-Add_a_parameter_group-" in name and torch.__version__ < "2.13":
        pytest.skip("Adagrad of torch 2.6 makes no state for a group that is added")
    compare(*ALL_RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("group", SETTINGS)
def test_as_torch_in_every_setting(group):
    for name, (case, *_) in ALL_RUNS.items():
        if case.group == group and name not in QUICK:
            try:
                compare(*ALL_RUNS[name])
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


# --- random programs, see weight_programs.py --------------------------------------------------------------------------------


FEW, MANY = range(len(PROGRAM_SETTINGS)), range(2000)
PARTS = [FEW[part::4] for part in range(4)]


@pytest.mark.parametrize("seeds", [*PARTS, *(pytest.param(MANY[n::20], marks=pytest.mark.slow) for n in range(20))])
def test_programs(seeds):
    """Show what is left of a program that differs without the statements that do not matter."""
    for seed in seeds:
        count = len(PROGRAM_SETTINGS)
        setting, watch, program = PROGRAM_SETTINGS[seed % count], (seed + seed // count) % 2 == 0, draw(seed)
        outcome = run(program, setting, watch)
        if outcome.kind == "differs":
            program = shrink(program[: outcome.at + 1], setting, watch, "differs")
            outcome = run(program, setting, watch)
            pytest.fail(f"seed {seed}, {setting}, watch={watch}:\n" + "\n".join(program) + f"\n-> {outcome.text}")


@pytest.mark.parametrize(
    ("setting", "every"),
    [(PROGRAM_SETTINGS[0], 3), *(pytest.param(it, 1, marks=pytest.mark.slow) for it in PROGRAM_SETTINGS)],
    ids=str,
)
def test_every_statement(setting, every):
    """Each statement, or some, once after training, and training after it."""
    for statement in STATEMENTS[::every]:
        program = ["step(1)", "backward(loss(2))", statement.replace("{k}", "3"), "backward(loss(4))", "opt.step()"]
        program += ["step(1)"]
        outcome = run(program, setting, watch=False)
        assert outcome.kind != "differs", (statement, outcome.at, outcome.text)


def test_programs_that_differ_are_told():
    """The comparison sees a step that one of the two does not take, and shortens the program to what shows it."""
    missed = "opt.step() if type(emb) is nn.Embedding else None"
    program = ["backward(loss(1))", "out = emb(draw(2))", missed, "emb.weight.sum()"]
    assert run(program, PROGRAM_SETTINGS[0], True).kind == "differs"
    assert shrink(program, PROGRAM_SETTINGS[0], True, "differs") == ["backward(loss(1))", missed]


@pytest.mark.parametrize("every", few([3, 1], 3))
def test_tables_are_freed_at_once(every, no_gc):
    """No cycle keeps a table until the next garbage collection, whatever was done with it."""
    kept = []
    for number, statement in enumerate(STATEMENTS[::every]):
        if "create_graph" in statement:  # a cycle of torch
            continue
        world = ProgramWorld(PROGRAM_SETTINGS[0], True)
        for code in ("step(1)", "backward(loss(2))", statement, *["step(3)"] * (number % 2)):
            with contextlib.suppress(Exception):
                world.run_statement(code.replace("{k}", "1"), 0)
        table = weakref.ref(world.names["emb"].table)
        for names in (world.names, world._names, world._values):
            names.clear()
        if table() is not None:
            kept.append(statement)
    assert not kept
