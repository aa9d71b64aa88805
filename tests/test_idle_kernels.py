"""How rows catch up by numba, by torch and by the CUDA kernels, run on the CPU: the same, for every rule, dtype and launch."""

import importlib.util
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from cases import FLOAT_DTYPES
from cpu_kernels import cpu_kernels
from optimizer_cases import ALL, COUPLED, KINDS, case_named, some
from test_idle_history import record
from torch import Tensor

from speedtransfer.idle import Replay, cuda_catch_up, rule_for
from speedtransfer.idle.replay import PLANES

# How far apart may be what is rounded once here and at every operation there.
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAUNCHES = [(1, 1), (2, 32), (3, 7)]


def trained(case, dtype, count, dim):
    """Return the rule of an optimizer, what `count` of its steps do to idle rows, and rows as it leaves them."""
    torch.manual_seed(dim)
    param = torch.nn.Parameter(torch.randn(50, dim).to(dtype))
    optimizer = case.make([param])
    if dtype == torch.float16 and "eps" in optimizer.defaults:
        optimizer.param_groups[0]["eps"] = 1e-3  # that of torch is zero in such a number, and divides
    (group,) = optimizer.param_groups
    rule, steps = rule_for(optimizer, group, dtype), []
    for _ in range(count):
        least = -1 if dtype == torch.float16 else -9  # whose squares must not vanish
        param.grad = torch.randn(50, dim).to(dtype) * 10.0 ** torch.randint(least, 1, (50, 1)).to(dtype)
        before = rule.before(optimizer.state[param])
        optimizer.step()
        rule.take_form(rule.form(group, optimizer.state[param]))
        steps.append(rule.made(group, optimizer.state[param], before))
    state = {name: value for name, value in optimizer.state[param].items() if isinstance(value, Tensor) and value.dim()}
    return rule, steps, {"weight": param.detach(), **state}


def copied(rows):
    return {name: values.clone() for name, values in rows.items()}


def launch(rule, history, rows, last, unsure=None, shape=(2, 32)):
    backwards = shape == LAUNCHES[1]
    if isinstance(history, Replay):
        planes = [rows.get(name) for name in ("weight", *PLANES[history.kind])]
        dtype = torch.float64 if rows["weight"].dtype == torch.float64 else torch.float32
        numbers = torch.from_numpy(history._numbers).to(dtype)
        packed = cuda_catch_up.pack_replayed(history.kind, planes, numbers, last, history.base, history.now, unsure)
        cpu_kernels().launch("replay_steps", *shape, packed, backwards=backwards)
    else:
        packed = cuda_catch_up.pack_missed(rule, history.sums, rows, last, history.base, unsure)
        cpu_kernels().launch("take_missed", *shape, packed, backwards=backwards)


def caught_up(rule, steps, rows, compiled):
    """Return a history, the last step of each row, and what these rows become by numba and by torch in the place of it."""
    history, expected, by_torch = record(rule, steps, 30), copied(rows), copied(rows)
    last = torch.randint(30, 101, (50, 1), dtype=torch.int32)
    last[:3] = torch.tensor([[100], [30], [99]])
    history.catch_up(expected, last)
    with mock.patch(f"speedtransfer.idle.{compiled}", return_value=False):
        history.catch_up(by_torch, last)
    return history, last, expected, by_torch


def step_by_step(rule, history, rows, last):
    """Return which rows have a value that goes step by step: on the CPU then all values of the row do."""
    if rule.taken.coupled or rule.denominator is None:
        return np.zeros(len(last), dtype=bool)
    valid_from = history.sums.missed(last.flatten().long() - history.base, rows["weight"].dtype).valid_from
    x, m = rows[rule.denominator], rows[rule.factors[0]]
    return (((x if rule.floor else x.sqrt()) < valid_from) & (m != 0)).any(dim=1).numpy()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", [*some(ALL, [*KINDS, "adamax-plain", "radam", "adadelta"]), *COUPLED], ids=str)
def test_missed_steps(case, dtype):
    """By sums, and one by one where the decay is coupled."""
    dim, compiled = 7, "missed._take_compiled"
    if case in COUPLED:
        dim, compiled = {torch.float32: 65, torch.float64: 16}.get(dtype, 5), "replay.Replay._catch_up_compiled"
    rule, steps, rows = trained(case, dtype, 70, dim)
    if case not in COUPLED and (rule.taken.coupled or None in steps):
        pytest.skip("no sums: see the coupled ones")
    history, last, expected, by_torch = caught_up(rule, steps, rows, compiled)
    close = 10 * CLOSE[dtype] if rule.taken.coupled else CLOSE[dtype]
    torch.testing.assert_close(by_torch, expected, rtol=close * rule.taken.coupled, atol=close * rule.taken.coupled)
    exact = dtype.itemsize >= 4 and (not rule.taken.coupled or importlib.util.find_spec("numba") is not None)
    same = ~step_by_step(rule, history, rows, last)
    for shape in LAUNCHES:
        found = copied(rows)
        launch(rule, history, found, last, shape=shape)
        torch.testing.assert_close(found, expected, rtol=close, atol=close)
        for name, values in expected.items():
            for caught in (found, by_torch):
                assert torch.equal(caught[name][0], rows[name][0]), "this row has missed nothing"
            if exact:
                # Of state all rows.
                some_rows = same if name == "weight" else slice(None)
                assert torch.equal(found[name][some_rows], values[some_rows]), name


@pytest.mark.parametrize("case", [ALL[10], COUPLED[0]], ids=str)
def test_rows_that_exist_in_no_table(case):
    """They are zeros that were never touched, at the end of a batch that was padded."""
    rule, steps, rows = trained(case, torch.float32, 5, dim=4)
    history = record(rule, steps, 9)
    rows = {name: torch.zeros(6, 4) for name in rows}
    for last in ([0] * 6, [-1, -(2**31), 8, 14, 15, 2**31 - 1]):
        found, steps_of_rows = copied(rows), torch.tensor(last, dtype=torch.int32)[:, None]
        launch(rule, history, found, steps_of_rows)
        for values in found.values():
            assert not values.any()
    torch_only = {name: values.t().contiguous().t() for name, values in rows.items()}
    history.catch_up(torch_only, torch.zeros(6, 1, dtype=torch.int32))
    assert not any(values.any() for values in torch_only.values())


UNSURE = [case_named(name) for name in ("sgd-momentum-weight-decay", "adamw", "adamax")] + [COUPLED[0]]


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("case", UNSURE, ids=str)
def test_a_step_of_which_only_the_device_knows_whether_it_was_made(case, made):
    dtype = torch.float32
    rule, steps, rows = trained(case, dtype, 40, dim=3)
    before, after = record(rule, steps[:-1], 30), record(rule, steps, 30)
    last = torch.randint(30, 70 + made, (50, 1), dtype=torch.int32)
    last[:2] = torch.tensor([[69], [69 + made]])
    expected, found = copied(rows), copied(rows)
    (after if made else before).catch_up(expected, last)
    if isinstance(before, Replay):
        before._note(steps[-1])
        before.now += 1  # the unsure step is the last of those that it is given
    unsure = SimpleNamespace(step=steps[-1], skipped=torch.tensor([int(not made)], dtype=torch.int32))
    launch(rule, before, found, last, unsure)
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
