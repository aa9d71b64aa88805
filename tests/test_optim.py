"""Every optimizer, of torch.optim and of others, trains a table as ``nn.Embedding``, idle rows apart: weights and state."""

import copy
import math

import psutil
import pytest
import torch
from cases import take_step
from lazy_oracle import Twins, exact, start_value, tensors_in
from optimizer_cases import CASES, ONCE, case_named, some
from sweep_optimizers import DIFFERS, FAILS, outcome
from third_party import STYLES, Precise, RowOptimizer
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidTypeError, OptimizerError


# Bit-equal: 16 columns fill whole vector registers, so no kernel treats a row differently for its place in the array.
@pytest.mark.parametrize("case", some(CASES, ONCE), ids=str)
def test_thirty_skewed_steps_equal_the_oracle(case):
    twins = Twins(case.make)
    # From a rate of zero, then down and up.
    rate = twins.schedulers(
        lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(step / 6, 1.0) * (1 - step % 9 / 10))
    )
    twins.train(twins.batches(30), *rate)
    twins.assert_same()
    assert set(twins.opt.state[twins.ours.weight]) == {*case.planes, *case.shared}
    assert set(twins.ours.table.planes) == {"weight", *case.planes}
    never = twins.num_rows - 1
    assert torch.equal(twins.ours.table.torch()[never], twins.start[never])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "adagrad-initial", "nadam-foreach", "adam-fused"])
def test_other_dtypes(name, dtype):
    case = case_named(name)
    eps = {"eps": 1e-4} if "eps" in case.make([nn.Parameter(torch.zeros(1))]).defaults else {}  # 1e-8 is 0 in float16
    # 64 halves fill the registers; scalar tails round once more.
    twins = Twins(lambda params: case.make(params, **eps), dim=64, dtype=dtype)
    twins.train(twins.batches(8))
    twins.assert_same()


def test_gradients_of_some_rows_and_of_none():
    emb = st.Embedding(8, 2, device="cpu")
    for foreach in (None, False, True):
        emb(torch.empty(0, dtype=torch.int64)).sum().backward()
        assert torch.nn.utils.clip_grad_norm_(emb.parameters(), 1.0, norm_type=math.inf, foreach=foreach) == 0
        assert emb.weight.grad.norm(math.inf) == 0
        emb.zero_grad()
    emb(torch.tensor([1, 5])).sum().backward()
    with pytest.raises(ValueError, match="read-only"):
        emb.weight.grad.data.numpy()[1] = 0
    assert emb.weight.grad[1].eq(1).all()


def test_a_gradient_by_hand_stays_that_of_the_caller():
    embs = [st.Embedding(8, 2, device="cpu") for _ in range(2)]
    actives, grad = [emb.activate([1, 5]) for emb in embs], torch.ones(2, 2)
    for factor in (1, 10):
        for active in actives:
            active.add_grad(grad.fill_(factor))
    assert all((emb.weight.grad[[1, 5]] == 11).all() for emb in embs)
    assert torch.nn.utils.clip_grad_norm_([emb.weight for emb in embs], 1.0) == pytest.approx(11 * 8**0.5)
    torch.testing.assert_close(embs[0].weight.grad.norm(), torch.tensor(0.5**0.5))
    assert (grad == 10).all()
    with torch.inference_mode():
        actives[0].add_grad(torch.ones(2, 2))
    with pytest.raises(InvalidTypeError, match=r"must be a tensor of shape \(2, 2\); pass torch.as_tensor"):
        actives[0].add_grad([[1.0, 2.0]] * 2)


def test_a_gradient_by_hand_of_other_ids_than_those_that_were_looked_up():
    """The step reads their rows: those of the lookup are other rows."""
    emb = st.Embedding(10, 2, memory="pageable", idle="lazy")
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    for _ in range(2):
        wanted = emb.table.gather(torch.arange(10))
        wanted[5:7] -= 1
        active = emb.activate(torch.tensor([1, 2]))
        active.ids = torch.tensor([5, 6])
        active.add_grad(torch.ones(2, 2))
        opt.step()
        opt.zero_grad()
        assert torch.equal(emb.table.gather(torch.arange(10)), wanted)


# --- optimizers that nobody here has heard of ---------------------------------------------------------------------------

# What a row starts from in these is not zero. (The oracle finds averages of weights by their name.)
STARTS = {("yogi", "m"): 1e-3, ("yogi", "v"): 1e-3, ("counts", "level"): 7, ("skips zeros", "sum"): 0.5}


@pytest.fixture(params=STYLES)
def style(request, monkeypatch):
    def start(key, group, weight):
        value = STARTS.get((request.param, key))
        return start_value(key, group, weight) if value is None else value

    monkeypatch.setattr("lazy_oracle.start_value", start)
    return request.param


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [16, 6, 1])
def test_trains_as_the_oracle(style, dim):
    kind, planes = STYLES[style]
    twins = Twins(kind, dim=dim)
    schedulers = [lr_scheduler.StepLR(opt, 4, 0.8) for opt in twins.optimizers if "lr" in opt.defaults]
    twins.train(twins.batches(20), *schedulers)
    twins.assert_same(1e-6)
    assert set(twins.ours.table.planes) == {"weight", *planes}


def test_rows_as_many_as_columns(style):
    """Shared state as long as the active rows, and planes as wide as the table is long, are told apart."""
    twins = Twins(STYLES[style][0], num_rows=6, dim=6)
    for rows in ([0, 1, 2], [0, 1, 2, 3, 4, 5], [2], [1, 2, 3, 4, 5], [0, 4, 5]):
        twins.train([(torch.tensor(rows), torch.ones(len(rows), 6))])
    twins.assert_same(1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["state dicts", "checkpoint"])
def test_training_goes_on(style, how, tmp_path):
    twins, other = (Twins(STYLES[style][0], dim=8) for _ in range(2))
    batches = twins.batches(20)
    twins.train(batches[:9])
    whole = copy.deepcopy(tensors_in(twins.opt.state_dict()["state"]))
    if how == "checkpoint":
        st.save_checkpoint(tmp_path, twins.ours, twins.opt)
        st.load_checkpoint(tmp_path, other.ours, other.opt)
    else:
        other.ours.load_state_dict(twins.ours.state_dict())
        other.opt.load_state_dict(copy.deepcopy(twins.opt.state_dict()))
    torch.testing.assert_close(tensors_in(other.opt.state_dict()["state"]), whole, rtol=0, atol=0)
    other.dense, other.dense_opt, other.oracle = twins.dense, twins.dense_opt, twins.oracle
    other.train(batches[9:])
    other.assert_same(1e-6)


def test_state_that_does_not_fit_into_memory_is_refused_at_the_first_step(tmp_path, monkeypatch):
    """Each plane would."""
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(5 * 100 * 8 * 2))
    for options in ({}, {"memory": "mmap", "path": tmp_path}):
        emb = st.Embedding(100, 8, device="cpu", **options)
        opt, before = torch.optim.AdamW(emb.parameters()), emb.weight.detach().clone()
        emb(torch.tensor([1])).sum().backward()
        if options:
            opt.step()
            continue
        with pytest.raises(
            HostMemoryError, match=r"'exp_avg', 'exp_avg_sq' of 100 rows ask for 6\.4 kB beside the 3\.2 kB"
        ):
            opt.step()
        assert torch.equal(emb.weight.detach(), before)
        take_step(torch.optim.SGD(emb.parameters()), emb(torch.tensor([1])).sum())


def test_state_is_over_the_table():
    """Containers stay what they are between steps; bools live in bytes."""
    twins = Twins(STYLES["buffers"][0])
    twins.train(twins.batches(2))
    state = twins.opt.state[twins.ours.weight]
    buffers, more, before = state["buffers"], state["more"], copy.deepcopy(tensors_in(state))
    assert buffers[0].data_ptr() == twins.ours.table.plane("buffers.0").data_ptr()
    # Also those of a step that fails.
    twins.opt._optimizer_step_code = lambda: [].pop()
    with pytest.raises(IndexError):
        twins.train(twins.batches(1))
    del twins.opt._optimizer_step_code
    after = tensors_in(state)
    assert all(torch.equal(before[name], after[name]) for name in ("buffers.0", "pair.0", "more.sum"))
    twins.train(twins.batches(2))
    assert (state["buffers"], state["more"]) == (buffers, more)
    twins = Twins(STYLES["counts"][0])
    twins.train(twins.batches(6))
    seen, plane = twins.opt.state[twins.ours.weight]["seen"], twins.ours.table.plane("seen")
    assert (seen.dtype, plane.dtype) == (torch.bool, torch.uint8)
    assert seen.data_ptr() == plane.data_ptr()


# --- state: who owns it, what happens when the owner changes, what others see of it -----------------------------------------


@pytest.mark.parametrize("name", ["sgd-momentum", "adam-fused", "adagrad-initial", "rprop"])
def test_a_new_optimizer_starts_fresh_and_replaces_the_old(name):
    twins = Twins(case_named(name).make)
    batches = twins.batches(16)
    twins.train(batches[:8])
    old, old_oracle = twins.opt, twins.oracle
    twins.use(*twins.modules)
    old_oracle.modules = ()
    twins.train(batches[8:])
    twins.assert_same()
    twins.zero_grad()
    twins.backward(*batches[0])
    before = twins.ours.table.torch().clone()
    for use in (old.step, old.state_dict):
        with pytest.raises(OptimizerError, match=r"row state is gone: a new \w+ took it over"):
            use()
    assert torch.equal(twins.ours.table.torch(), before)
    with pytest.raises(OptimizerError, match="evaluates the loss several times"):
        torch.optim.LBFGS([twins.ours.weight]).step(lambda: None)
    twins.step()  # the new one goes on
    twins.assert_same()


@pytest.mark.parametrize("idle", ["exact", "lazy"])
def test_optimizers_that_keep_nothing_train_a_table_by_turns(idle):
    weights = []
    for emb in (st.Embedding(5, 2, idle=idle, dtype=torch.float64), nn.Embedding(5, 2, dtype=torch.float64)):
        nn.init.ones_(emb.weight)
        decay = 0.1 * (idle == "exact")
        turns = [torch.optim.SGD(emb.parameters(), lr=rate, weight_decay=decay) for rate in (0.1, 0.3)]
        for number in range(5):
            opt = turns[number % 2]
            take_step(opt, emb(torch.tensor([number % 3])).square().sum())
            assert opt.state_dict()["state"].keys() <= {0}
        weights.append(emb.weight.detach().clone())
    torch.testing.assert_close(*weights)


def test_state_that_was_dropped_is_loaded_again():
    weights = []
    for emb in (st.Embedding(5, 2), nn.Embedding(5, 2)):
        nn.init.ones_(emb.weight)
        opt = torch.optim.Adam(emb.parameters(), lr=0.1)
        saved = None
        for number in range(4):
            if number:
                opt.zero_grad()
                opt.load_state_dict(saved)
            take_step(opt, emb(torch.tensor([number % 3])).square().sum())
            saved = copy.deepcopy(opt.state_dict())
            emb.double() if number == 1 else None
            if number == 1 and isinstance(emb, st.Embedding):
                emb(torch.tensor([1])).sum().backward()
                for use in (opt.step, opt.state_dict):
                    with pytest.raises(OptimizerError, match=r"the table became torch.float64; .* load its state"):
                        use()
        weights.append(emb.weight.detach().clone())
    torch.testing.assert_close(*weights)


def test_state_begins_by_the_hyperparameters_after_a_first_step_that_failed():
    states = []
    for emb in (st.Embedding(4, 2), nn.Embedding(4, 2)):
        opt = torch.optim.Rprop(emb.parameters(), lr=0.02)
        emb(torch.tensor([1])).sum().backward()
        with pytest.raises(ZeroDivisionError):
            opt.step(lambda: 1 / 0)
        opt.param_groups[0]["lr"] = 0.002
        opt.step()
        states.append(opt.state_dict()["state"][0]["step_size"].clone())
    torch.testing.assert_close(*states)


WRITES = {
    "add_": lambda param, values: param.detach().add_(values),
    "data.add_": lambda param, values: param.data.add_(values),
    "data": lambda param, values: setattr(param, "data", param.data + values),
    "numpy": lambda param, values: param.detach().numpy().__iadd__(values.numpy()),
}


class LooksAhead(torch.optim.SGD):
    """Evaluate the loss where the last gradient leads, as sharpness-aware ones do, and step from where it was."""

    write = ""

    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        before = [param.detach().clone() for param in params]
        if closure is not None:
            for param in params:
                WRITES[self.write](param, param.grad)
            closure()
            for param, values in zip(params, before, strict=True):
                param.data.copy_(values)
        super().step()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("features", [False, True])
def test_rows_changed_before_the_closure_are_seen(write, features, monkeypatch):
    monkeypatch.setattr(LooksAhead, "write", write)
    emb = st.MultiEmbedding([10, 5], 3) if features else st.Embedding(10, 3)
    # With a gradient of one feature, each has a parameter of its own in the step.
    rows = emb[0] if features else emb
    opt = LooksAhead(emb.parameters(), lr=0.1)
    rows(torch.tensor([1, 2])).sum().backward()
    opt.step()
    before = emb.weight.detach().clone()
    with pytest.raises(OptimizerError, match="changed the active rows of weight before it called its closure"):
        opt.step(lambda: rows(torch.tensor([2, 3])).sum().backward())
    assert torch.equal(emb.weight, before)


def test_a_table_that_an_optimizer_has_twice():
    emb = st.Embedding(10, 3)
    with pytest.warns(UserWarning, match="duplicate"):
        opt = torch.optim.SGD([emb.weight, emb.weight], lr=0.1)
    take_step(torch.optim.SGD(emb.parameters(), lr=0.1), emb(torch.tensor([1])).sum())
    before = emb.weight.detach().clone()
    with pytest.raises(OptimizerError, match="has weight twice among its parameters"):
        opt.step()
    assert torch.equal(emb.weight, before)


def _halve(_, given):
    halved = {name: value * 0.5 if value.dim() else value for name, value in given["state"][0].items()}
    return {**given, "state": {0: halved}}


@pytest.mark.parametrize("table", [{}, {"cache_rows": 3}], ids=str)
@pytest.mark.parametrize("early", [True, False])
def test_hooks_of_others_see_whole_planes_in_state_dicts(table, early):
    pair, seen = exact(case_named("adamw"), **table), ([], [])
    pair.train([] if early else pair.batches(3))
    for opt, shown in zip(pair.optimizers, seen, strict=True):
        opt.register_state_dict_post_hook(
            lambda _, made, shown=shown: shown.append(made["state"][0]["exp_avg"].clone())
        )
        opt.register_load_state_dict_pre_hook(_halve)
        opt.register_load_state_dict_post_hook(lambda opt: [it["exp_avg_sq"].mul_(2) for it in opt.state.values()])
    pair.train(pair.batches(3, seed=1))
    for opt in pair.optimizers:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    pair.train(pair.batches(3, seed=2))
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(pair.ours.weight.detach(), pair.dense.weight.detach())


def test_a_state_dict_after_a_step_takes_no_memory_for_rows_without_state():
    """They are zero, and caught up: written again they would take that of a table for each plane."""
    rss = lambda: psutil.Process().memory_info().rss  # noqa: E731
    emb = st.Embedding(400_000, 64)
    opt = torch.optim.Adam(emb.parameters())
    for ids in (torch.arange(64), torch.arange(3)):
        take_step(opt, emb(ids).sum())
    before = rss()
    state = opt.state_dict()["state"][0]
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (400_000, 64)
    assert rss() - before < 0.7 * emb.table.torch().nbytes


# --- the sweep over the optimizers of other packages ------------------------------------------------------------------------


class CountsLate(RowOptimizer):
    """Row by row for as long as any trial is; then each row is moved by what all have."""

    def update(self, p, g, state, group):
        state["step"] = state.get("step", 0) + 1
        p.sub_(g if state["step"] < 28 else g * p.norm(), alpha=group["lr"] / 10)


class Overflows(RowOptimizer):
    def update(self, p, g, state, group):
        p.mul_(1e30).sub_(g)


@pytest.mark.parametrize(("kind", "result"), [(Precise, "works"), (Overflows, FAILS), (CountsLate, DIFFERS)])
def test_the_sweep_tells_what_differs(kind, result, monkeypatch):
    monkeypatch.setattr("sweep_optimizers.STEPS", 50)
    assert outcome("ours", kind).result == result
