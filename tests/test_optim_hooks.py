"""Code that looks at the weight at any moment of a step sees all rows, as in torch, and changes nothing about the training."""

from collections.abc import Callable

import pytest
import torch
from lazy_oracle import Twins, exact
from optimizer_cases import case_named
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Act = Callable[[], object]


def of_all_optimizers(module, opt, act):
    registers = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    return [register(lambda stepping, *_: act() if stepping is opt else None) for register in registers]


def output(module, opt, act):
    return [module.register_forward_hook(lambda module, args, out: (out.register_hook(lambda grad: act()), None)[1])]


# By name: what has `act` called at a moment of each step, and returns handles of hooks.
MOMENTS = {
    "before step": lambda module, opt, act: [opt.register_step_pre_hook(lambda *_: act())],
    "after step": lambda module, opt, act: [opt.register_step_post_hook(lambda *_: act())],
    "all optimizers": of_all_optimizers,
    # Where ours are already.
    "late": lambda module, opt, act: [MOMENTS[f"{when} step"](module, opt, act)[0] for when in ("before", "after")],
    "gradient": lambda module, opt, act: [module.weight.register_hook(lambda grad: act())],
    "accumulated": lambda module, opt, act: [module.weight.register_post_accumulate_grad_hook(lambda param: act())],
    "output": output,
}


def trained(moment, idle, optimizer, do):
    """Train twins that `do` something at a moment; return them, what was noted of each, and the rows of each step of ours."""
    pair, noted, stepped, handles = exact(case_named(optimizer), torch.float64, idle=idle), ([], []), [], []
    batches = pair.batches(9)
    pair.train(batches[:1] if moment == "late" else [])
    for module, opt, notes in zip(pair.modules, pair.optimizers, noted, strict=True):
        handles += MOMENTS[moment](module, opt, lambda module=module, opt=opt, notes=notes: do(module, opt, notes))
    (weight,) = pair.ours.parameters()
    # Torch calls it at the end of the step proper.
    pair.opt._optimizer_step_code = lambda: stepped.append(len(weight))
    pair.train(batches[1:])
    for handle in handles:
        handle.remove()
    return pair, noted, stepped


def look(module, opt, notes):
    for weight in (module.weight, opt.param_groups[0]["params"][0]):
        assert weight.shape == (60, 8)
        notes.append(weight.detach().norm())
    notes.append(module.weight.pow(2).sum().detach())


@pytest.mark.sweep("moment", "idle", strength=2)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adagrad"])
@pytest.mark.parametrize("idle", ["exact", "lazy"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_look_at_the_weight_changes_nothing(moment, idle, optimizer):
    """Neither numbers nor that steps are made with the rows of the batches alone; what is seen is that of torch."""
    pair, noted, stepped = trained(moment, idle, optimizer, look)
    never, _, plain = trained(moment, idle, optimizer, lambda *_: None)
    assert stepped == plain
    assert max(stepped) < 60
    torch.testing.assert_close(pair.ours.weight, never.ours.weight, rtol=1e-12, atol=1e-12)
    if idle == "exact":
        pair.assert_same(1e-9)
        torch.testing.assert_close(*noted)


# --- optimizers that call the step of the class they are made of ------------------------------------------------------


class Decaying(torch.optim.SGD):
    """Changes the weights before and after the step of its base."""

    def step(self, closure=None):
        self._multiply(0.9)
        loss = super().step(closure)
        self._multiply(1.05)
        return loss

    @torch.no_grad()
    def _multiply(self, factor):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(factor)


@pytest.fixture
def decaying():
    # From now on torch calls hooks for the inner step too.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return Twins(lambda params: Decaying(params, lr=0.05, momentum=0.9))


@pytest.mark.parametrize("where", ["pre", "post"])
def test_a_look_in_a_step_within_a_step(decaying, where):
    emb, seen = decaying.ours, list[bool]()
    register = getattr(decaying.opt, f"register_step_{where}_hook")
    register(lambda *_: seen.append(torch.equal(emb.weight, emb.table.torch())))
    decaying.train(decaying.batches(1))
    assert seen == [True, True]
    ids = decaying.batches(1)[0][0].unique()
    assert torch.equal(emb.weight[ids], decaying.dense.weight[ids])


def test_a_step_within_a_step_that_fails(decaying, monkeypatch):
    batches = decaying.batches(6)
    decaying.train(batches[:3])
    before, multiply = decaying.ours.table.torch().clone(), Decaying._multiply
    decaying.zero_grad()
    decaying.backward(*batches[3])
    with monkeypatch.context() as patched:
        # After the inner step.
        patched.setattr(Decaying, "_multiply", lambda opt, factor: multiply(opt, factor) if factor < 1 else [].pop())
        with pytest.raises(IndexError):
            decaying.opt.step()
    assert torch.equal(decaying.ours.table.torch(), before)
    decaying.train(batches[3:])
    decaying.assert_same()
