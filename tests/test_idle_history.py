"""The table of missed steps against the same steps one by one: any hyperparameters, any gap, any size of state."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import ALL

from speedtransfer.idle import History, IdleStep, Replay, Rule, rule_for
from speedtransfer.idle import sums as sums_module
from speedtransfer.idle.device_copy import DeviceCopy
from speedtransfer.idle.rule import Form, Scalars

TENSORS = sums_module.Sums.tensors


class Sums(Rule):
    factors = ("m", "v")
    denominator = "v"


class Floors(Sums):
    floor = True


class Mixes(Rule):
    factors = ("m",)
    partner = "q"


def one_by_one(rule, steps, rows, last):
    """Take the steps after its `last` on every row, in extended precision."""
    rows = {name: values.astype(np.longdouble) for name, values in rows.items()}
    for number, step in enumerate(steps):
        behind = last <= number  # a prefix: `last` is sorted
        part = {name: values[behind] for name, values in rows.items()}
        factors = dict(zip(rule.factors, step.factors, strict=True))
        for name in factors.keys() & part.keys():
            part[name] = part[name] * factors[name]
        if rule.partner is not None:
            (a, b, c, d), p, q = step.mix, part["weight"], part["q"]
            part["weight"], part["q"] = a * p + b * q, c * p + d * q
        else:
            m, x = part["m"], part["v"]
            if rule.floor:
                bottom = part["v"] = np.maximum(x, step.eps)
            else:
                bottom = step.root * np.sqrt(x) + step.eps
            term = step.scale * np.divide(m, bottom, out=np.zeros_like(m), where=m != 0)
            part["weight"] = part["weight"] * step.decay - term
        for name, values in part.items():
            rows[name][behind] = values
    return rows


def record(rule, steps, now=0):
    """Return what rows catch up by after these steps, the first of which is that after `now`."""
    history = Replay(rule, now=now) if rule.taken.coupled else History(rule, now=now)
    for step in steps:
        history.record(step)
    return history


def check(rule, steps, tolerance, seed=0):
    """Catch up rows that were touched last at each step, with state of every size, and compare with `one_by_one`."""
    history = record(live := copy.deepcopy(rule), steps).copy()
    live.take_form(Form(False, None))  # of further steps, which a copy is not told of
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([[0.0], np.logspace(-12, 1, 27)])
    last = np.arange(0, len(steps) + 1, max(1, len(steps) // 60))
    root = np.tile(sizes, (len(last), 1))
    rows = {name: rng.standard_normal(root.shape) for name in ("weight", "m", "q")}
    rows |= {"m": rows["m"] * root, "v": root if rule.floor else root**2}
    used = ("weight", *rule.factors, rule.partner)
    rows = {name: torch.tensor(rows[name].copy(), dtype=rule.dtype) for name in used if name is not None}
    expected = one_by_one(rule, steps, {name: values.numpy() for name, values in rows.items()}, last)
    before = {name: values.double().abs() for name, values in rows.items()}
    history.catch_up(rows, torch.tensor(last, dtype=torch.int32)[:, None])
    for name, values in expected.items():
        ours, want = rows[name].double(), torch.tensor(values.astype(np.float64))
        # Of what was there and of what was added: either is rounded to the dtype.
        size = want.abs() + (before["weight"] + before.get("q", 0) if name in ("weight", "q") else 0)
        wrong = (ours - want).abs() > tolerance * size + torch.finfo(rule.dtype).tiny * 1e3
        line, column = wrong.nonzero()[0] if wrong.any() else (0, 0)
        assert not wrong.any(), (name, int(last[line]), sizes[column], ours[line, column], want[line, column])


def adam_steps(count, first, second, eps=1e-8, decay=0.0):
    made, lr = [], 1e-3
    for t in range(1, count + 1):
        scale, root = lr * (0.6 + 0.4 * math.sin(t / 30)) / (1 - first**t), 1 / math.sqrt(1 - second**t)
        made.append(IdleStep(decay=1 - lr * decay, factors=(first, second), scale=scale, root=root, eps=eps))
    return made


TOLERANCE = {torch.float32: 2e-6, torch.float64: 2e-12}
BETAS = [(0.9, 0.999), (0.95, 0.95), (0.0, 0.999), (0.9, 0.0), (0.98, 0.9999), (0.9, 0.5)]
EPS = [1e-8, 1e-3, 1e-15]


def mixtures(count, lr, momentum, stays):
    return [
        IdleStep(factors=(momentum,), mix=(1 - lr * (t % 5), -10 * lr * 0.9, 0.01, 0.9 if t % 7 else stays))
        for t in range(count)
    ]


ADAM = adam_steps(300, 0.9, 0.999, decay=0.5)
OTHERS = {
    "floors": (Floors, [step._replace(root=1.0) for step in ADAM]),
    "floors that fall faster": (Floors, [step._replace(root=1.0) for step in adam_steps(300, 0.8, 0.7)]),
    "no denominator": (Sums, [*(step._replace(root=0.0, eps=1.0) for step in ADAM[:6]), *ADAM[6:]]),
    # The signs of what was taken alternate: no measure, so rows go step by step.
    "a decay of more than all": (Sums, [step._replace(decay=-0.95) for step in ADAM[:60]]),
    # Moments far below what a number of single precision holds, and a decay that goes on all the time.
    "3,000 steps": (Sums, adam_steps(3_000, 0.9, 0.999, decay=0.1)),
    # Coefficients beyond float32 must not make NaN of zeros.
    **{f"450 steps, {beta}": (Sums, adam_steps(450, 0.9, beta, decay=0.1)) for beta in (0.5, 0.0)},
    "mixtures": (Mixes, mixtures(400, 0.001, 0.99, 0.0)),
    # Products of a line and of the blocks after it are put together as matrices too.
    "mixtures of many blocks": (Mixes, mixtures(1_100, 0.0001, 0.999, 1.0)),
    **{f"betas {b}, eps {e}": (Sums, adam_steps(300, *b, eps=e, decay=0.5)) for b in BETAS for e in EPS},
    # The table grows at 256 lines; a line is final after its horizon.
    **{f"{count} steps": (Sums, adam_steps(count, 0.9, 0.999, decay=0.1)) for count in (1, 257)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_sums_of_terms(name, dtype):
    kind, steps = OTHERS[name]
    check(kind(dtype), steps, 3 * TOLERANCE[dtype] if "many" in name else TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_the_hyperparameters(data):
    """Schedules that jump: each step with betas, eps, learning rate and decay of its own."""
    count, seed = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 2**31))
    jumps, rng, steps = data.draw(st.booleans()), np.random.default_rng(seed), []
    for _ in range(count):
        lr, root, eps = float(rng.choice([0.0, 1e-3, 1.0])), float(rng.uniform(0.5, 30)), 10.0 ** rng.uniform(-12, -1)
        decay, betas = float(1 - lr * rng.choice([0.0, 0.1, 1.0])), tuple(map(float, rng.uniform(0, 0.99, 2)))
        factors = betas if jumps else (0.9, 0.999)
        steps.append(IdleStep(decay=decay, factors=factors, scale=lr, root=root, eps=float(eps)))
    check(Sums(torch.float64), steps, 5e-12, seed)


# --- counts of steps on a device, and what a device gets ------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A number that says it is on a device, and counts how often the host reads it."""

    device = torch.device("cuda")
    reads = 0

    def __float__(self):
        self.reads += 1
        return float(self.as_subclass(torch.Tensor))


def on_device(number):
    made = number.as_subclass(OnDevice)
    assert made._version == number._version
    return made


def count_of(scalars, count, changes=1):
    return scalars.read("step", count, changes, lambda count: count + 1)


def test_counts_of_steps_are_read_when_they_must_be():
    """A count is one more after a step; what else has happened to it is noticed."""
    count, scalars = on_device(torch.tensor(3.0)), Scalars()
    assert count_of(scalars, count) == 3
    for expected in (4, 5):
        count += 1
        assert count_of(scalars, count) == expected
    assert count.reads == 1
    assert count_of(scalars, count) == 5
    count += 1
    count -= 1  # a step that GradScaler takes back
    assert count_of(scalars, count) == 5
    assert count.reads == 3
    count += 1
    count -= 0  # one that it lets happen
    assert count_of(scalars, count, changes=2) == 6
    assert count.reads == 3
    assert count_of(scalars, on_device(torch.tensor(90.0))) == 90  # a state that was loaded
    assert count_of(scalars, 7) == 7
    count += 1
    assert count_of(copy.deepcopy(scalars), count) == count_of(scalars, count) == 7
    with torch.inference_mode():
        assert count_of(scalars, torch.tensor(2.0)) == 2


@pytest.mark.parametrize("case", [case for case in ALL if case.kind in (torch.optim.ASGD, torch.optim.NAdam)], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
def test_what_steps_make_of_numbers_is_known_without_reading(case, foreach):
    """Of torch's own optimizers: the numbers that they keep are those that the host computes."""
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = case.make([param], foreach=foreach)
    (group,), read = optimizer.param_groups, []
    rule, plain = (rule_for(optimizer, group, torch.float32) for _ in range(2))
    there = {}
    for _ in range(30):
        param.grad = torch.ones_like(param)
        state = optimizer.state[param]
        before = rule.before(there), plain.before(state)
        optimizer.step()
        there = there or {name: on_device(value) for name, value in state.items()}
        steps = rule.step(group, there, before[0]), plain.step(group, state, before[1])
        for ours, right in zip(*steps, strict=True):
            assert ours == pytest.approx(right, rel=1e-6, abs=1e-9)
        read.append(sum(value.reads for value in there.values()))
    assert len(there) > 1
    assert read[0] == read[-1] > 0, "once, when they are new"


@pytest.mark.parametrize("kind", [Sums, Mixes])
def test_what_a_device_gets_is_what_the_host_has(kind, monkeypatch):
    """The lines that have changed are sent when rows are read; here the "device" is a second copy on the CPU."""
    monkeypatch.setattr("speedtransfer.idle.device_copy._pinned", lambda values: torch.from_numpy(values.copy()))

    def mirrored(self, device):
        copied = self._device_copies.setdefault((device, 0), DeviceCopy())
        return copied.tensors(device, self.table, self.blocks, self.count, self._final)

    history, rng = History(kind(torch.float32)), np.random.default_rng(0)
    steps = adam_steps(2_000, 0.9, 0.999, decay=0.1) if kind is Sums else mixtures(2_000, 0.001, 0.99, 0.9)
    for number, step in enumerate(steps):
        history.record(step)
        if number == 1_400:
            history.sweep()
        if rng.random() < 0.1:
            index, found = torch.arange(history.length + 1), []
            for _ in range(2):
                found.append([history.sums.lines(index), *(history.sums.steps_after(index, 0) if kind is Sums else ())])
                monkeypatch.setattr(sums_module.Sums, "tensors", mirrored)
            monkeypatch.setattr(sums_module.Sums, "tensors", TENSORS)
            assert all(map(torch.equal, *found))


# --- sums that several histories share ----------------------------------------------------------------------------------


def check_lines(history, rule, steps):
    """Compare the lines of `steps` with those of a history that shares nothing."""
    sums, index = sums_module.Sums(rule), torch.arange(len(steps) + 1)
    for step in steps:
        sums.take(step)
    assert history.length == len(steps)
    np.testing.assert_array_equal(history.sums.lines(index).numpy(), sums.lines(index).numpy())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shared_sums_equal_those_of_one_history_alone(data):
    """Histories that miss steps, make others, are read in between, swept and dropped: each has the sums of its own steps.

    Two are of other rules, whose sums of the same steps are others.
    """
    kinds = adam_steps(3, 0.9, 0.99, decay=0.1)
    rules = [*[Sums(torch.float32)] * 3, Floors(torch.float32), Sums(torch.float64)]
    histories = [History(rule) for rule in rules]
    steps = [[] for _ in histories]
    for _ in range(data.draw(st.integers(1, 12))):
        common = data.draw(st.sampled_from(kinds))
        for number in data.draw(st.permutations(range(len(rules)))):
            action = data.draw(st.sampled_from(["make", "make", "make", "other", "miss", "sweep", "read", "drop"]))
            history = histories[number]
            if action in ("make", "other"):
                step = common if action == "make" else data.draw(st.sampled_from(kinds))
                history.record(step)
                steps[number].append(step)
            elif action == "sweep":
                history.sweep()
                steps[number] = []
            elif action == "drop":
                histories[number], steps[number] = History(rules[number]), []
            elif action == "read":
                check_lines(history, rules[number], steps[number])
    for history, rule, own in zip(histories, rules, steps, strict=True):
        check_lines(history, rule, own)
