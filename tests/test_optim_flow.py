"""The ways a training loop can go between two steps: accumulation, skipped and empty steps, closures, writes."""

from __future__ import annotations

import pytest
import torch
from lazy_oracle import (
    Twins,
    assert_same_state,
    assert_same_weights,
    one_thread,  # noqa: F401 - a fixture
    pairs,
    squared_loss,
    twins,  # noqa: F401 - a fixture
)
from optimizer_cases import case_named
from torch import nn

import speedtransfer


def test_several_forwards_before_one_backward(twins: Twins) -> None:
    for batches in pairs(twins):
        twins.zero_grad()
        for module in (twins.ours, twins.dense):
            sum(squared_loss(module(ids), target) for ids, target in batches).backward()
        twins.step()
    twins.assert_same(1e-6)  # the dense gradient is summed in another order


def test_several_backwards_before_one_step(twins: Twins) -> None:
    for batches in pairs(twins):
        twins.zero_grad()
        for ids, target in batches:
            twins.backward(ids, target)
        twins.step()
    twins.assert_same(1e-6)


def test_accumulation_of_the_same_rows(twins: Twins) -> None:
    for ids, target in twins.batches(6):
        twins.zero_grad()
        twins.backward(ids, target)
        twins.backward(ids.flip(0), target)
        twins.step()
    twins.assert_same(1e-6)


def test_gradients_do_not_depend_on_the_order_of_batches() -> None:
    emb = speedtransfer.Embedding(9, 4)
    for ids in ([1, 1, 5], [0, 5], [8], [1]):
        emb(torch.tensor(ids)).sum().backward()
    assert emb.weight.grad.ids.tolist() == [0, 1, 5, 8]
    assert emb.weight.grad[:, 0].tolist() == [1.0, 3.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 1.0]


# --- zero_grad, step --------------------------------------------------------------------------------------------------


def test_zero_grad_to_zero(twins: Twins) -> None:
    for ids, target in twins.batches(12):
        twins.zero_grad(set_to_none=False)
        twins.backward(ids, target)
        twins.step()
    twins.assert_same()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_discarded_before_the_step(twins: Twins, set_to_none: bool) -> None:
    for discarded, kept, _ in pairs(twins):
        twins.zero_grad()
        twins.backward(*discarded)
        twins.zero_grad(set_to_none=set_to_none)
        twins.backward(*kept)
        assert len(twins.ours.weight.grad.ids) == kept[0].unique().numel()
        twins.step()
    twins.assert_same()


def test_a_gradient_discarded_and_then_a_step() -> None:
    twins = Twins(case_named("adamw").make)
    twins.train(twins.batches(4))
    twins.zero_grad()
    twins.backward(*twins.batches(1)[0])
    twins.zero_grad()
    twins.step()
    twins.assert_same()


def test_a_step_without_backward_changes_nothing(twins: Twins) -> None:
    twins.step()
    batches = twins.batches(6)
    twins.train(batches[:3])
    before = twins.ours.table.torch().clone()
    twins.zero_grad()
    twins.step()
    assert torch.equal(twins.ours.table.torch(), before)
    twins.train(batches[3:])
    twins.assert_same()


def test_the_gradient_stays_until_somebody_clears_it(twins: Twins) -> None:
    ids, target = twins.batches(1)[0]
    for _ in range(2):
        twins.zero_grad()
        twins.backward(ids, target)
        twins.step()
        assert twins.ours.weight.shape == twins.ours.weight.grad.shape == (twins.num_rows, twins.dim)
        assert torch.equal(twins.ours.weight.grad, twins.dense.weight.grad)
        twins.step()  # with the same gradient once more
        twins.assert_same()
    twins.backward(ids, target)  # adds to it
    torch.testing.assert_close(twins.ours.weight.grad.to_dense(), twins.dense.weight.grad)
    twins.zero_grad()
    assert twins.ours.weight.grad is None


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure(twins: Twins, keyword: bool) -> None:
    losses = []
    for ids, target in twins.batches(8):

        def closure(module: nn.Module, zero_grad, ids=ids, target=target) -> torch.Tensor:
            zero_grad()
            loss = squared_loss(module(ids), target)
            loss.backward()
            return loss

        def ours(closure=closure):
            return closure(twins.ours, twins.opt.zero_grad)

        def dense(closure=closure):
            return closure(twins.dense, twins.oracle.zero_grad)

        loss = twins.opt.step(closure=ours) if keyword else twins.opt.step(ours)
        losses.append((loss, twins.oracle.step(lambda dense=dense: twins.oracle.optimizer.step(dense))))
    twins.assert_same()
    assert all(torch.equal(a, b) for a, b in losses)


def test_a_hand_on_the_gradient(twins: Twins) -> None:
    """Code between backward and step may scale a gradient, replace it, or set it to zero."""
    for step, (ids, target) in enumerate(twins.batches(9)):
        twins.zero_grad()
        twins.backward(ids, target)
        for module in (twins.ours, twins.dense):
            if step % 3 == 0:
                module.weight.grad.mul_(0.5)
            elif step % 3 == 1:
                module.weight.grad = module.weight.grad * 2
            else:
                module.weight.grad.zero_()
        twins.step()
    twins.assert_same()


def test_an_empty_batch_takes_part_in_the_step(twins: Twins) -> None:
    batches = twins.batches(4)
    twins.train(batches[:2])
    twins.train([(torch.empty(0, dtype=torch.int64), torch.empty(0, twins.dim))])
    twins.train(batches[2:])
    twins.assert_same()


def test_an_empty_batch_first(twins: Twins) -> None:
    twins.train([(torch.empty(0, dtype=torch.int64), torch.empty(0, twins.dim))])
    twins.train(twins.batches(4))
    twins.assert_same()


# --- writes meanwhile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_rows_written_meanwhile_are_not_undone(twins: Twins, when: str) -> None:
    for ids, target in twins.batches(6):
        twins.zero_grad()
        losses = [squared_loss(m(ids), target) for m in (twins.ours, twins.dense)]
        if when == "before step":
            for loss in losses:
                loss.backward()
        row = int(ids[0, 0])
        twins.ours.table[[row, 40]] = torch.ones(2, twins.dim)
        twins.dense.weight.data[[row, 40]] = 1.0
        if when == "before backward":
            for loss in losses:
                loss.backward()
        twins.step()
    twins.assert_same()


def test_the_whole_table_loaded_before_the_step(twins: Twins) -> None:
    ids, target = twins.batches(1)[0]
    twins.backward(ids, target)
    new = torch.randn(twins.num_rows, twins.dim)
    twins.ours.load_state_dict({"weight": new})
    twins.dense.load_state_dict({"weight": new})
    twins.step()
    twins.assert_same()


def test_gradients_written_by_hand_equal_autograd(twins: Twins) -> None:
    for ids, target in twins.batches(8):
        twins.zero_grad()
        squared_loss(twins.dense(ids), target).backward()
        active = twins.ours.activate(ids)
        with torch.no_grad():
            grad = torch.zeros_like(active.rows)
            rows = active.rows[active.inverse]
            flat = ((rows - target) * 0.25 * 2).view(-1, twins.dim)
            active.add_grad(grad.index_add_(0, active.inverse.flatten(), flat))
        twins.step()
    assert_same_weights(twins.ours, twins.dense, 1e-6)
    assert_same_state(twins.opt, twins.ours, twins.oracle.optimizer, twins.dense, 1e-6)


def test_a_gradient_by_hand_of_other_ids_than_those_that_were_looked_up() -> None:
    """The step reads their rows: those of the lookup are other rows."""
    emb = speedtransfer.Embedding(10, 2, memory="pageable", idle="lazy")
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


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_optimizers_without_tables_are_left_alone() -> None:
    alive = speedtransfer.Embedding(3, 2)
    linear = nn.Linear(3, 2)
    reference = nn.Linear(3, 2)
    reference.load_state_dict(linear.state_dict())
    for module in (linear, reference):
        opt = torch.optim.Muon([module.weight], lr=0.1)  # refused for tables; none of our business here
        module(torch.ones(1, 3)).sum().backward()
        opt.step()
        assert module.weight.grad is not None
        assert set(opt.state[module.weight]) == {"momentum_buffer"}
    assert torch.equal(linear.weight, reference.weight)
    assert alive.table.planes == ("weight",)
