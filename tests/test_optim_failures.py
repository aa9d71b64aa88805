"""A step that fails leaves the table whole, and the next one is right."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from lazy_oracle import LAZY, LazyOracle, Twins, assert_same
from torch import nn

adam_module = importlib.import_module("torch.optim.adam")


class Failing:
    """Makes the update of Adam write rubbish and raise, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed = False
        real = adam_module.adam

        def adam(params, grads, exp_avgs, exp_avg_sqs, *args, **kwargs):
            if not self.armed:
                return real(params, grads, exp_avgs, exp_avg_sqs, *args, **kwargs)
            self.armed = False
            for tensor in (*params, *exp_avgs, *exp_avg_sqs):
                tensor.fill_(1e6)
            raise KeyboardInterrupt("in the middle of the update")

        monkeypatch.setattr(adam_module, "adam", adam)


@pytest.mark.parametrize("done", [0, 1, 7], ids=["first", "second", "eighth"])
@pytest.mark.parametrize("then", ["retry", "retry every row", "next batch", "checkpoint"])
def test_an_exception_inside_a_step(monkeypatch: pytest.MonkeyPatch, done: int, then: str) -> None:
    failing = Failing(monkeypatch)
    twins = Twins(torch.optim.Adam)
    batches = twins.batches(12)
    twins.train(batches[:done])
    before = twins.ours.table.torch().clone()
    twins.zero_grad()
    everything = torch.arange(twins.num_rows), torch.zeros(twins.num_rows, twins.dim)
    twins.backward(*(everything if "every row" in then else batches[done]))
    failing.armed = True
    with pytest.raises(KeyboardInterrupt):
        twins.opt.step()
    # The parameter is the whole table again, for those too who do not ask the module.
    assert twins.opt.param_groups[0]["params"][0].shape == before.shape
    assert torch.equal(twins.ours.table.torch(), before)
    if then.startswith("retry"):
        twins.step()
        done += 1
    elif then == "checkpoint":
        state = copy.deepcopy(twins.opt.state_dict())
        if done == 0:
            assert state["state"] == {}
        else:
            torch.testing.assert_close(
                state["state"][0], twins.oracle.optimizer.state_dict()["state"][0], rtol=0, atol=0
            )
        twins.opt.load_state_dict(state)
    twins.train(batches[done:])
    twins.assert_same()


def test_two_tables_one_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    embs = [LAZY.Embedding(9, 16), LAZY.Embedding(7, 16)]
    twins = [nn.Embedding.from_pretrained(e.table.torch().clone(), freeze=False) for e in embs]
    opt = torch.optim.Adam([e.weight for e in embs], lr=0.1)
    oracle = LazyOracle(torch.optim.Adam([t.weight for t in twins], lr=0.1), *twins)
    for step in range(4):
        ids = torch.tensor([step, 1])
        opt.zero_grad()
        oracle.zero_grad()
        for a, b in (embs, twins):
            (a(ids) * b(ids)).sum().backward()
        if step == 2:
            failing.armed = True
            with pytest.raises(KeyboardInterrupt):
                opt.step()
        opt.step()
        oracle.step()
    for emb, dense in zip(embs, twins, strict=True):
        assert_same(opt, emb, oracle, dense)
