"""Optimizer state: who owns it, what happens when the owner changes, and what hooks of others see of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from forked import run_script
from lazy_oracle import Twins, squared_loss
from optimizer_cases import REFUSED, OptimizerCase, case_named
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import OptimizerError


@pytest.mark.parametrize("name", ["sgd", "adam-fused", "nadam", "adagrad-initial", "rprop", "asgd"])
def test_a_new_optimizer_starts_fresh_and_replaces_the_old(name: str) -> None:
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
    with pytest.raises(OptimizerError, match=r"row state is gone: a new \w+ took it over"):
        old.step()
    assert torch.equal(twins.ours.table.torch(), before)
    twins.step()  # the new one goes on
    twins.assert_same()


@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=str)
def test_refused_optimizers_say_why_and_harm_nothing(case: OptimizerCase, reason: str) -> None:
    twins = Twins(case_named("adamw").make)
    batches = twins.batches(6)
    twins.train(batches[:3])
    before = twins.ours.table.torch().clone()
    refused = case.make([twins.ours.weight])
    twins.zero_grad()
    ids, target = batches[3]

    def closure() -> Tensor:
        loss = squared_loss(twins.ours(ids), target)
        loss.backward()
        return loss

    with pytest.raises(OptimizerError, match=reason) as caught:
        refused.step(closure)
    assert str(caught.value).startswith(case.kind.__name__)
    assert "use " in str(caught.value)  # the remedy
    assert torch.equal(twins.ours.table.torch(), before)
    twins.train(batches[3:])  # the optimizer that trained the table still can
    twins.assert_same()


def test_dtype_changed_after_training_asks_for_a_new_optimizer() -> None:
    twins = Twins(case_named("adamw").make)
    batches = twins.batches(6)
    twins.train(batches[:3])
    twins.ours.double()
    twins.dense.double()
    ids, target = batches[3]
    squared_loss(twins.ours(ids), target.double()).backward()
    with pytest.raises(OptimizerError, match=r"the table became torch\.float64"):
        twins.opt.step()
    twins.use(*twins.modules)
    twins.train([(ids, target.double()) for ids, target in batches[3:]])
    twins.assert_same()


def pair(**options: Any) -> tuple[Any, Any]:
    dense = nn.Embedding(13, 4)
    return dense, st.Embedding.from_pretrained(dense.weight.detach().clone(), freeze=False, **options)


@pytest.mark.parametrize("table", [{}, {"cache_rows": 3}], ids=str)
@pytest.mark.parametrize("how", ["one mapping", "one entry", "a copy of the entry"])
@pytest.mark.parametrize("idle", ["exact", "lazy"])
def test_state_handed_to_another_optimizer(table: dict, how: str, idle: str) -> None:
    dense, ours = pair(idle=idle, **table)
    for emb in (dense, ours):
        old, new = (torch.optim.AdamW(emb.parameters(), lr=lr) for lr in (0.1, 0.05))
        for opt in (old, new):
            for k in range(4):
                # As "lazy" has it, no row is idle.
                ids = torch.arange(13) if idle == "lazy" else torch.tensor([k, k + 3, 12])
                opt.zero_grad()
                emb(ids).pow(2).sum().backward()
                opt.step()
            if how == "one mapping":
                new.state = old.state
            else:
                (param,) = emb.parameters()
                new.state[param] = old.state[param] if how == "one entry" else dict(old.state[param])
    torch.testing.assert_close(ours.weight.detach(), dense.weight.detach())


def test_a_placeholder_of_state_that_was_replaced_shows_nothing() -> None:
    emb = st.Embedding(13, 4, cache_rows=3)
    old, new = (torch.optim.AdamW(emb.parameters(), lr=lr) for lr in (0.1, 0.05))
    emb(torch.tensor([1])).sum().backward()
    old.step()
    kept = dict(old.state[emb.weight])
    with pytest.raises(AttributeError, match=r"placeholder for state 'exp_avg', .* no 'clone'; optimizer.state_dict"):
        kept["exp_avg"].clone()
    new.step()
    # There is another plane of this name now.
    new.state[emb.weight].update(kept)
    with pytest.raises(OptimizerError, match="another optimizer has it, and state 'exp_avg' with it"):
        new.step()


# --- hooks of others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [{}, {"cache_rows": 3}], ids=str)
@pytest.mark.parametrize("early", [True, False])
def test_hooks_of_others_see_whole_planes_in_state_dicts(table: dict, early: bool) -> None:
    dense, ours = pair(idle="exact", **table)
    seen: list[list[Tensor]] = []
    for emb in (dense, ours):
        opt, shown = torch.optim.AdamW(emb.parameters(), lr=0.1), list[Tensor]()
        seen.append(shown)

        def steps(emb: nn.Module = emb, opt: torch.optim.Optimizer = opt) -> None:
            for k in range(3):
                opt.zero_grad()
                emb(torch.tensor([k, k + 3, 12])).pow(2).sum().backward()
                opt.step()

        def show(_: object, state_dict: dict, shown: list = shown) -> None:
            shown.append(state_dict["state"][0]["exp_avg"].clone())

        def halve(_: object, state_dict: dict) -> dict:
            halved = {name: value * 0.5 if value.dim() else value for name, value in state_dict["state"][0].items()}
            return {**state_dict, "state": {0: halved}}

        def double(opt: torch.optim.Optimizer) -> None:
            for state in opt.state.values():
                state["exp_avg_sq"].mul_(2)

        for when in (True, False):
            if when == early:
                opt.register_state_dict_post_hook(show)
                opt.register_load_state_dict_pre_hook(halve)
                opt.register_load_state_dict_post_hook(double)
            steps()
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        steps()
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(ours.weight.detach(), dense.weight.detach())


AFTER_A_STEP = """
import resource, sys, torch, speedtransfer as st
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
for rows in (100, 400_000):
    emb = st.Embedding(rows, 64)
    opt = torch.optim.Adam(emb.parameters())
    for ids in (torch.arange(64), torch.arange(3)):
        emb(ids).sum().backward()
        opt.step()
        opt.zero_grad()
    before = peak()
    state = opt.state_dict()["state"][0]
assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (rows, 64)
print((peak() - before) / emb.table.torch().nbytes)
"""


def test_a_state_dict_after_a_step_takes_no_memory_for_rows_without_state() -> None:
    """They are zero, and caught up: written again they would take that of a table for each plane."""
    ran = run_script(AFTER_A_STEP)
    assert float(ran.stdout) < 0.7, ran.stdout + ran.stderr
