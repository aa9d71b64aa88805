"""idle="exact" against dense training by torch itself: every way that a training loop may go."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from exact_pair import COUPLED, Exact, warmup_and_cosine
from lazy_oracle import skewed_batches, squared_loss
from optimizer_cases import OptimizerCase, case_named
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import speedtransfer
from speedtransfer import Table
from speedtransfer.optim import find_handle
from speedtransfer.rows import Rows

# --- how a loop may go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_tables_of_one_optimizer(weight_decay: float) -> None:
    """Of two groups, some without a gradient in some steps: tables that make the same steps share what is known of them."""
    modules = []
    for kind in (nn.Embedding, lambda *shape: speedtransfer.Embedding(*shape, idle="exact")):
        torch.manual_seed(0)
        modules.append(nn.ModuleList(kind(30, 4) for _ in range(6)))
    optimizers = [
        torch.optim.AdamW(
            [{"params": own[:4].parameters()}, {"params": own[4:].parameters(), "lr": 0.002}],
            lr=0.02,
            weight_decay=weight_decay,
        )
        for own in modules
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        ids = torch.randint(0, 30, (6, 5), generator=generator)
        missing = (2,) if step % 7 == 3 else (1, 3, 5) if step == 40 else ()
        for own, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            used = [table(ids[number]) for number, table in enumerate(own) if number not in missing]
            sum(rows.square().sum() for rows in used).backward()
            optimizer.step()
            if step == 25:
                own[0](torch.arange(30))
        if step == 30:
            modules[1][1].table.torch()
    for dense, ours in zip(*modules, strict=True):
        torch.testing.assert_close(ours.table.torch(), dense.weight.detach(), rtol=0, atol=1e-5)


def test_reading_changes_nothing() -> None:
    """Forward without a step leaves the table as it is stored, so that results do not depend on evaluation."""
    pair, other = Exact(case_named("adamw")), Exact(case_named("adamw"))
    for batch in pair.batches(40):
        pair.train([batch])
        other.train([batch])
        other.ours.eval()(torch.arange(60))
        other.ours.train()(torch.arange(60))
    assert torch.equal(pair.ours.table.torch(), other.ours.table.torch())


def test_a_view_of_the_table_and_its_file_are_whole(tmp_path: Any) -> None:
    def saved(table: Table) -> torch.Tensor:
        table.save(tmp_path / "table.npy")
        return Table.load(tmp_path / "table.npy").torch()

    pair = Exact(case_named("adamw"))
    pair.train(pair.batches(30))
    for view in (Table.torch, lambda table: torch.from_numpy(table.numpy()), torch.from_dlpack, saved):
        torch.testing.assert_close(view(pair.ours.table), pair.dense.weight.detach(), rtol=0, atol=2e-5)
        pair.train(pair.batches(5, seed=1))


@pytest.mark.parametrize("memory", ["device", "mmap"])
@pytest.mark.parametrize("case", [case_named("adamw"), COUPLED[0]], ids=str)
def test_memories_agree_bit_for_bit(case: OptimizerCase, memory: str, tmp_path: Any) -> None:
    options = {"path": tmp_path / "table.safetensors"} if memory == "mmap" else {}
    pair, plain = Exact(case, memory=memory, **options), Exact(case, memory="pageable")
    for one in (pair, plain):
        one.train(one.batches(60))
    assert torch.equal(pair.ours.table.torch(), plain.ours.table.torch())


# --- the history --------------------------------------------------------------------------------------------------------


# --- state dicts, copies, other optimizers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-weight-decay"])
def test_a_new_optimizer_takes_over(name: str) -> None:
    pair = Exact(case_named(name))
    pair.train(pair.batches(20))
    pair.opt, pair.dense_opt = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in pair.modules)
    pair.train(pair.batches(20, seed=1))
    pair.assert_same()


def test_a_failed_step_is_no_step() -> None:
    pair = Exact(case_named("adam"))
    pair.train(pair.batches(20))
    pair.backward(*pair.batches(1, seed=5)[0])
    for optimizer in pair.optimizers:
        good = optimizer.param_groups[0]["betas"]
        optimizer.param_groups[0]["betas"] = ("bad", 0.9)  # torch notices after it has counted the step
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = good
    pair.train(pair.batches(20, seed=1))
    pair.assert_same()


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_copies_with_their_optimizer(clone: Any, optimizer_first: bool) -> None:
    pair = Exact(case_named("adamw"))
    pair.train(pair.batches(40))
    if optimizer_first:
        pair.opt, pair.ours = clone((pair.opt, pair.ours))
    else:
        pair.ours, pair.opt = clone((pair.ours, pair.opt))
    pair.train(pair.batches(40, seed=1))
    pair.assert_same()


def test_half_precision_rows_that_nothing_touched() -> None:
    embedding = speedtransfer.Embedding(6, 8, dtype=torch.float16, idle="exact")
    optimizer = torch.optim.AdamW(embedding.parameters(), lr=0.05, eps=1e-3)
    embedding(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    assert embedding.table.torch().isfinite().all()


def test_a_write_that_fails_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Exact(case_named("sgd-momentum"))
    pair.train(pair.batches(20))
    pair.zero_grad()
    pair.backward(*pair.batches(1, seed=5)[0])
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "write", lambda *args: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            pair.opt.step()
    pair.step()
    pair.train(pair.batches(20, seed=1))
    pair.assert_same()


@pytest.mark.parametrize("foreach", [True, False])
def test_steps_under_a_dispatch_mode(foreach: bool) -> None:
    """Below one, lists of tensors change without a trace: the number of steps is read, not foretold."""
    batches = skewed_batches(40, 8, 40, size=8)

    def train(make: type[nn.Module]) -> Any:
        torch.manual_seed(1)
        module: Any = make(40, 8)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=foreach)
        for ids, target in batches:
            with FlopCounterMode(display=False):
                optimizer.zero_grad()
                squared_loss(module(ids), target).backward()
                optimizer.step()
        return module.state_dict()["weight"]

    torch.testing.assert_close(train(speedtransfer.Embedding), train(nn.Embedding), rtol=0, atol=1e-5)


# --- the history --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "limit", "most"),
    [
        *((case_named(name), "_MAX_STEPS", 16) for name in ("adamw", "sgd-momentum-weight-decay", "nadam")),
        *((case, "_MAX_REPLAYED", 16) for case in COUPLED if case.name in ("adam-coupled", "rmsprop-coupled-momentum")),
        # A slow momentum, of whose steps many are open.
        (OptimizerCase("slow", torch.optim.Adam, {"lr": 0.05, "betas": (0.99, 0.999)}), "_MAX_OPEN", 30),
    ],
    ids=str,
)
def test_what_is_remembered_stays_short(
    case: OptimizerCase, limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"speedtransfer.idle.lag.{limit}", most)
    pair = Exact(case)
    pair.train(pair.batches(130), *pair.schedulers(warmup_and_cosine))
    assert find_handle(pair.ours.weight).rows.lag._history.length < most
    pair.assert_same()


def test_an_optimizer_without_state_lets_rows_miss_steps(monkeypatch):
    whole = []
    catch_up = Rows.catch_up
    monkeypatch.setattr(
        Rows, "catch_up", lambda self, ids=None: (whole.append(1) if ids is None else 0, catch_up(self, ids))
    )
    emb = speedtransfer.Embedding(100, 4)
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1, weight_decay=0.01)
    for number in range(10):
        optimizer.zero_grad()
        emb(torch.tensor([number])).sum().backward()
        optimizer.step()
    assert not whole


def test_the_history_of_a_small_table_is_small() -> None:
    """All rows are caught up at less cost than that of remembering what they have missed."""
    emb = speedtransfer.Embedding(20, 4, idle="exact")
    dense = torch.nn.Embedding(20, 4, _weight=emb.weight.detach().clone())
    opts = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (emb, dense)]
    for number in range(400):
        for module, opt in zip((emb, dense), opts, strict=True):
            opt.zero_grad()
            module(torch.tensor([number % 3, 5])).square().sum().backward()
            opt.step()
    history = emb._handle.rows.lag._history
    assert history.length < 300
    assert history.sums.table.nbytes < 100_000
    torch.testing.assert_close(emb.weight.detach(), dense.weight.detach(), rtol=1e-4, atol=1e-5)
