"""idle="exact" against dense training by torch itself, by every optimizer; and what idle="auto", the default, chooses."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import take_step
from lazy_oracle import exact, skewed_batches, squared_loss
from optimizer_cases import ALL, COUPLED, OptimizerCase, case_named, warmup_and_cosine
from sweeps import few
from third_party import RowOptimizer
from torch.utils.flop_counter import FlopCounterMode

import speedtransfer as st
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import find_handle


def rows_of(module):
    return find_handle(module.weight).rows


@pytest.mark.sweep
@pytest.mark.parametrize("steps", few([60, 400], 60))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [*ALL, *COUPLED], ids=str)
def test_equals_dense_training_with_reads_in_between(case, dtype, steps):
    pair = exact(case, dtype)
    schedulers, everything = pair.schedulers(warmup_and_cosine), torch.arange(60)
    for number, batch in enumerate(pair.batches(steps)):
        pair.train([batch], *schedulers)
        if number in (20, 21):
            with torch.set_grad_enabled(number == 21):
                ours, dense = (module.train(number == 21)(everything).detach() for module in pair.modules)
            torch.testing.assert_close(ours, dense, rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-9)
        if number % 83 == 30:  # rows are brought up to date in the table too; the rest stays behind
            assert torch.equal(pair.ours.table[[58, 3]], pair.ours(torch.tensor([58, 3])))
            caught_up = rows_of(pair.ours).caught_up(everything) or {}
            for plane, values in caught_up.items():  # one by one, as a save in the background reads them
                assert torch.equal(rows_of(pair.ours).caught_up(everything, plane)[plane], values)
    pair.assert_same(None if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Adam", {"betas": (0.0, 0.9)}),
        ("Adam", {"betas": (0.0, 0.9), "amsgrad": True}),
        ("Adamax", {"betas": (0.0, 0.0)}),
    ],
    ids=str,
)
def test_averages_that_keep_nothing_forget_a_large_gradient(kind, options):
    states = []
    for make in (st.Embedding, torch.nn.Embedding):
        emb = make(3, 4, dtype=torch.float64)
        torch.nn.init.ones_(emb.weight)
        opt = getattr(torch.optim, kind)(emb.parameters(), lr=0.1, weight_decay=0.1, **options)
        for row, scale in ((0, 1e30), (1, 1.0)):
            opt.zero_grad()
            take_step(opt, emb(torch.tensor([row])).sum() * scale)
        states.append({name: plane.clone() for name, plane in opt.state_dict()["state"][0].items()})
    torch.testing.assert_close(*states, rtol=1e-12, atol=0)


# --- how a loop may go --------------------------------------------------------------------------------------------------


def test_views_of_the_table_and_its_files_are_whole(tmp_path):
    def saved(table):
        table.save(tmp_path / "table.npy")
        return torch.from_numpy(np.load(tmp_path / "table.npy"))

    def flushed(table):
        table.flush()
        return torch.from_numpy(np.load(tmp_path / "rows.npy"))

    pair = exact(case_named("adamw"), memory="mmap", path=tmp_path / "rows.npy")
    pair.train(pair.batches(30))
    for view in (st.Table.torch, lambda table: torch.from_numpy(table.numpy()), torch.from_dlpack, saved, flushed):
        torch.testing.assert_close(view(pair.ours.table), pair.dense.weight.detach(), rtol=0, atol=2e-5)
        pair.train(pair.batches(5, seed=1))


@pytest.mark.parametrize(("case", "is_beside"), [("adamw", True), ("adagrad", False)])
def test_last_steps_are_in_the_records_of_the_state(case, is_beside):
    """A row of a file is then on one page less. Where steps may leave idle rows alone they are made when one does not."""
    pair = exact(case_named(case), layout="rows")
    pair.train(pair.batches(3))
    table = pair.ours.table
    records = {table.stored(name).untyped_storage().data_ptr() for name in table.planes if name != "weight"}
    assert len(records) == 1
    assert ("idle.last_step" in table.planes) is is_beside
    rows_of(pair.ours).begin_anew()
    assert table.planes == ("weight",)


@pytest.mark.parametrize("foreach", [True, False])
def test_steps_under_a_dispatch_mode(foreach):
    """Below one, lists of tensors change without a trace: the number of steps is read, not foretold."""
    pair = exact(OptimizerCase("adamw", torch.optim.AdamW, {"lr": 0.1, "foreach": foreach}))
    with FlopCounterMode(display=False):
        pair.train(pair.batches(40))
    pair.assert_same()


@pytest.mark.parametrize(
    ("case", "limit", "most"),
    [
        *((case_named(name), "_MAX_STEPS", 16) for name in ("adamw", "sgd-momentum-weight-decay")),
        (case_named("adam-coupled"), "_MAX_REPLAYED", 16),
        # A slow momentum, of whose steps many are open.
        (OptimizerCase("slow", torch.optim.Adam, {"lr": 0.05, "betas": (0.99, 0.999)}), "_MAX_OPEN", 30),
    ],
    ids=str,
)
def test_what_is_remembered_stays_short(case, limit, most, monkeypatch):
    monkeypatch.setattr(f"speedtransfer.idle.lag.{limit}", most)
    pair = exact(case)
    pair.train(pair.batches(130), *pair.schedulers(warmup_and_cosine))
    assert rows_of(pair.ours).lag._history.length < most
    pair.assert_same()


# --- what outlives what -------------------------------------------------------------------------------------------------


def left(**options):
    """Return an embedding most of whose rows have missed steps, and its optimizer."""
    torch.manual_seed(0)
    emb = st.Embedding(12, 4, idle="exact", **options)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1, weight_decay=0.2)
    for step in range(5):
        take_step(opt, emb(torch.tensor([step, 2 * step])).sum())
    return emb, opt


@pytest.mark.parametrize("optimizer_too", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"storage_dtype": torch.int8}, {"state_dtype": torch.uint8}, {"memory": "device"}], ids=str
)
def test_the_rows_of_a_table_that_is_left(options, optimizer_too):
    (emb, opt), whole = left(**options), left(**options)[0].table.torch().clone()
    table = emb.table
    del emb
    if not optimizer_too:
        del opt
    if options.get("storage_dtype") is None:
        assert torch.equal(table[[3, 7]], whole[[3, 7]])
        table[[5]] = torch.ones(1, 4)
        whole[5] = 1
    assert torch.equal(table.torch(), whole)
    assert torch.equal(table.torch(), whole), "the steps are applied once"


# --- idle="auto" --------------------------------------------------------------------------------------------------------


class OfSomebody(torch.optim.SGD):
    """What it does to idle rows nobody has said."""


def train(module, optimizer, steps=3):
    for ids, target in skewed_batches(12, module.embedding_dim, steps):
        take_step(optimizer, squared_loss(module(ids), target))


def test_an_unknown_optimizer_is_lazy_with_one_warning():
    modules = [st.Embedding(12, 5) for _ in range(3)]
    optimizer = OfSomebody([m.weight for m in modules], lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ids, target in skewed_batches(12, 5, 6):
            take_step(optimizer, sum(squared_loss(module(ids), target) for module in modules))
    (warning,) = caught  # for three tables and six steps
    assert "OfSomebody" in str(warning.message)
    assert "idle='lazy'" in str(warning.message)
    assert Path(warning.filename) == Path(__file__).with_name("cases.py")  # where the step was made
    for module in modules:
        assert module.idle == "auto"
        assert rows_of(module).lag is None


def test_one_table_and_two_optimizers_in_turn():
    """A table is exact with the one and lazy with the other, and has no plane where idle rows stay as they are."""
    module = st.Embedding(12, 5)
    for kind, planes in ((torch.optim.SGD, 0), (torch.optim.AdamW, 1), (torch.optim.Adagrad, 0)):
        train(module, kind(module.parameters(), lr=0.1))
        assert ("idle.last_step" in module.table.planes) == planes
    with pytest.warns(UserWarning, match="OfSomebody"):
        train(module, OfSomebody(module.parameters(), lr=0.1, momentum=0.9))
    assert rows_of(module).lag is None


class Signs(RowOptimizer):
    """Not known, and leaves rows without a gradient alone unless there is decay."""

    def __init__(self, params):
        super().__init__(params, 0.1, weight_decay=0.0, pull="none", bounds=(0.0, 0.0))
        self.pulls = False

    def update(self, p, g, state, group):
        pulls = self.pulls or group["pull"] != "none" or group["bounds"][1]
        decay = group["weight_decay"] + 0.1 * bool(pulls)
        p.mul_(1 - group["lr"] * decay).sub_(g.sign(), alpha=group["lr"])


SWITCHES = {
    "number": lambda opt: opt.param_groups[0].update(weight_decay=0.1),
    "pair": lambda opt: opt.param_groups[0].update(bounds=(0.0, 1.0)),
    "word": lambda opt: opt.param_groups[0].update(pull="all"),
    "attribute": lambda opt: setattr(opt, "pulls", True),
}


@pytest.mark.parametrize("idle", ["auto", "exact"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_an_unknown_optimizer_that_leaves_idle_rows_alone_needs_no_rule(switch, idle):
    pair = exact(OptimizerCase("signs", Signs), idle=idle)
    pair.train(pair.batches(6))
    pair.assert_same(0.0)
    SWITCHES[switch](pair.opt)  # from now on it does not
    pair.ours(torch.arange(5)).square().sum().backward()
    if idle == "auto":
        with pytest.warns(UserWarning, match="not known what Signs does"):
            pair.opt.step()
    else:
        with pytest.raises(OptimizerError, match="does not know what Signs does"):
            pair.opt.step()
