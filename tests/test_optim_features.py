"""Steps in which some features of a `MultiEmbedding` have no gradient: those of ``nn.ModuleList``, which leaves them out."""

import copy

import pytest
import third_party
import torch
from cases import take_step
from optimizer_cases import BASE, COUPLED, FOREACH, FUSED, case_named, some
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError

SIZES, DIM = (20, 1, 30, 7), 3
# Which features have a gradient in each step: one begins late, and in some steps all have one, or none.
STEPS = [(0, 1), (0, 1, 2), (0, 1, 2, 3), (2,), (), (0, 3), (1, 2, 3), (0, 1, 2, 3), (0, 1), (3,), (0, 1, 2, 3), (0, 2)]


def multi(**options):
    torch.manual_seed(2)
    return st.MultiEmbedding(SIZES, DIM, dtype=torch.float64, **options)


def modules(kind=nn.Embedding, **options):
    torch.manual_seed(2)
    return nn.ModuleList([kind(size, DIM, dtype=torch.float64, **options) for size in SIZES])


def ids_of(step, feature):
    generator = torch.Generator().manual_seed(10 * step + feature)
    # A batch may name no row of a feature, whose gradient is zero then, not None.
    count = 0 if step % 5 == 2 and feature == 0 else 4
    return (torch.rand(count, generator=generator) ** 2 * SIZES[feature]).long()


def loss_of(embs, step, features, together=False):
    if together:
        # All are looked up, and the loss takes the rows of some.
        rows = embs([ids_of(step, feature) for feature in range(len(SIZES))])
    else:
        rows = {feature: embs[feature](ids_of(step, feature)) for feature in features}
    return sum(((rows[f] - 0.3).square().sum() + rows[f].sum() * f for f in features), torch.zeros(()).double())


def train(embs, opt, steps, clear=None, **how):
    for step in steps:
        opt.zero_grad() if clear is None else clear(opt, step)
        if STEPS[step]:
            loss_of(embs, step, STEPS[step], **how).backward()
        opt.step()


def rows_of(embs):
    return torch.cat([emb.weight.detach() for emb in embs])


def assert_same(ours, theirs):
    torch.testing.assert_close(rows_of(ours), rows_of(theirs), rtol=0, atol=1e-12)


def check(make, ours, theirs, clear=None, together=False, begin=0):
    train(ours, make(list(ours.parameters())), range(begin, len(STEPS)), clear, together=together)
    train(theirs, make(list(theirs.parameters())), range(begin, len(STEPS)), clear)
    assert_same(ours, theirs)


@pytest.mark.parametrize("case", some([*BASE, *COUPLED]), ids=str)
def test_every_optimizer_with_exact_idle_rows(case):
    check(case.make, multi(idle="exact"), modules(), together=True)


# Fused SGD with momentum raises where some have a buffer and some have none, in torch too.
VARIANTS = [*FOREACH, *(case for case in FUSED if "momentum" not in case.kwargs)]
# State in containers, numbers of Python, state made late, and what a constructor makes.
OTHERS = [third_party.Buffers, third_party.History, third_party.Yogi]


@pytest.mark.parametrize("case", [*some(VARIANTS), *OTHERS], ids=str)
def test_every_implementation_and_other_optimizers_with_lazy_idle_rows(case):
    check(getattr(case, "make", case), multi(idle="lazy"), modules(st.Embedding, idle="lazy"))


CLEARS = {
    "all": None,
    "to zero": lambda opt, step: opt.zero_grad(set_to_none=step % 4 == 0),
    "every second step": lambda opt, step: None if step % 2 else opt.zero_grad(),
}


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("options", [{}, {"cache_rows": 5}, {"layout": "rows"}], ids=str)
def test_other_tables_gradients_of_zero_and_of_the_step_before(clear, options):
    check(case_named("asgd" if clear == "all" else "rprop").make, multi(**options), modules(), CLEARS[clear])


def test_clipping_hyperparameters_and_uses_of_whole_weights():
    def trained(embs):
        opt = torch.optim.AdamW([{"params": nn.Linear(2, 2).parameters()}, {"params": embs.parameters()}], lr=0.1)
        scheduler, norms = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8), []
        for step, features in enumerate(STEPS):
            opt.zero_grad()
            loss = loss_of(embs, step, features) + (embs[1].weight.square().sum() if step % 3 == 2 else 0)
            loss = loss + (sum(param.abs().sum() for param in embs.parameters()) if step == 4 else 0)
            if loss.requires_grad:
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(embs.parameters(), 0.5))
            opt.param_groups[1]["weight_decay"] = 0.1 if step < 6 else 0.0
            opt.step()
            scheduler.step()
        assert len(opt.param_groups[1]["params"]) == len(list(embs.parameters()))
        return [*norms, rows_of(embs)]

    torch.testing.assert_close(trained(multi()), trained(modules()), rtol=0, atol=1e-12)


def test_the_gradient_of_a_feature():
    ours, theirs = multi(), modules()
    for embs in (ours, theirs):
        assert embs[0].weight.grad is None
        loss_of(embs, 1, (0, 2)).backward()
        assert embs[1].weight.grad is None
        embs[2].weight.grad.mul_(2)
        assert nn.utils.clip_grad_norm_(embs[2].parameters(), 0.3) > 0.3
    for one, other in zip(ours, theirs, strict=True):
        assert (one.weight.grad is None) == (other.weight.grad is None)
        if one.weight.grad is not None:
            torch.testing.assert_close(one.weight.grad.to_dense(), other.weight.grad, rtol=0, atol=1e-12)
            assert one.weight.grad.shape == one.weight.shape
    for add in (Tensor.add_, Tensor.__iadd__):
        with pytest.raises(InvalidValueError, match=r"weight.grad.to_dense\(\)"):
            add(ours[0].weight.grad, 1)
    with pytest.raises(InvalidTypeError, match="assigned a gradient of its own"):
        ours[0].weight.grad = torch.zeros(SIZES[0], DIM).double()
    opts = [torch.optim.AdamW(embs.parameters(), lr=0.1) for embs in (ours, theirs)]
    for embs, opt in zip((ours, theirs), opts, strict=True):
        embs[0].zero_grad()
        opt.step()
    assert_same(ours, theirs)
    ours[2].zero_grad()
    assert ours.weight.grad is None


def test_the_gradients_of_features_are_converted_with_the_weight():
    ours, theirs = multi(), modules()
    for embs in (ours, theirs):
        loss_of(embs, 1, (0, 2)).backward()
        embs.float()
        assert [emb.weight.grad is None for emb in embs] == [False, True, False, True]
        torch.optim.SGD(embs.parameters(), lr=0.5).step()
    assert_same(ours, theirs)


def test_features_that_have_stepped_together_go_apart():
    check(case_named("nadam").make, ours := multi(), modules(), begin=2)
    # What is remembered of steps takes no more memory than the table.
    assert sum(lag.table_bytes for lag in ours._handle.rows.lag._lags) <= ours.table.nbytes


def test_a_gradient_made_dense_is_of_the_features_written_to():
    emb = multi()
    before, opt = rows_of(emb), torch.optim.SGD(emb.parameters(), lr=1.0, weight_decay=0.5)
    emb[0](torch.tensor([1])).sum().backward()
    emb.weight.grad[-1] = 1.0
    opt.step()
    assert [bool(part.any()) for part in (rows_of(emb) != before).split(SIZES)] == [True, False, False, True]


@pytest.mark.parametrize("idle", ["exact", "lazy"])
def test_a_feature_begins_with_the_hyperparameters_of_its_first_step(idle):
    def trained(embs):
        optimizer = torch.optim.Rprop(embs.parameters(), lr=0.1)
        for number, (feature, ids) in enumerate([(0, [0, 1]), (2, [0, 1]), (2, [2]), (2, [2]), (0, [2])]):
            optimizer.param_groups[0]["lr"] = 0.05 if number else 0.1
            take_step(optimizer, embs[feature](torch.tensor(ids)).square().sum())
        return [embs[feature].weight.detach() for feature in range(4)]

    # Rprop leaves rows without a gradient as they are.
    torch.testing.assert_close(trained(multi(idle=idle)), trained(modules()), rtol=0, atol=1e-12)


def test_a_gradient_that_was_kept_is_that_of_its_feature():
    def seen(kind):
        embs, shown = kind(), []
        ids, more = torch.tensor([1, 2]), torch.tensor([2, 5])
        (embs[0](ids).square().sum() + embs[2](ids).square().sum()).backward()
        one, other = embs[0].weight.grad, embs[2].weight.grad.detach()
        (embs[0](more).square().sum() + embs[2](more).square().sum()).backward()
        for change in (
            lambda: (one.mul_(2), other.mul_(3)),
            lambda: setattr(embs[2].weight, "grad", None),
            lambda: embs[0](ids).sum().backward(),
            lambda: embs[0].weight.grad.zero_(),
            lambda: embs[0](more).sum().backward(),
            lambda: embs[0].zero_grad(),
            lambda: embs[0](ids).sum().backward(),
        ):
            change()
            shown += [grad.to_dense().clone() for grad in (one, other, embs[0].weight.grad) if grad is not None]
        return shown

    for ours, theirs in zip(seen(multi), seen(modules), strict=True):
        torch.testing.assert_close(ours, theirs)
    embs = multi()
    embs[0](torch.tensor([1])).sum().backward()
    assert embs[0].weight.grad is embs[0].weight.grad


class KeepsParameters(torch.optim.Optimizer):
    """Goes by a list of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.kept = {"all": [param for group in self.param_groups for param in group["params"]]}

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.kept["all"]:
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.defaults["lr"])


def test_an_optimizer_that_goes_by_parameters_of_its_own():
    ours = multi(idle="lazy")
    opt = KeepsParameters(ours.parameters())
    take_step(opt, loss_of(ours, 3, (0, 1, 2, 3)))
    before = rows_of(ours)
    loss_of(ours, 4, (1,)).backward()
    with pytest.raises(OptimizerError, match=r"KeepsParameters keeps weight outside of its param_groups \(in \.kept\)"):
        opt.step()
    assert torch.equal(rows_of(ours), before)


def test_gradients_of_a_worker_are_those_of_the_features_that_it_used():
    """Also one without a row of its feature (step 2 names none of feature 0), assigned over another."""
    found = []
    for make in (multi, modules):
        embs, worker = make(), make()
        opt = torch.optim.AdamW(embs.parameters(), lr=0.1, weight_decay=1.0)
        for step, feature in ((0, 1), (2, 0), (4, 3)):
            worker.zero_grad()
            loss_of(worker, step, (feature,)).backward()
            for param, other in zip(embs.parameters(), worker.parameters(), strict=True):
                param.grad = None if other.grad is None else (Tensor.clone, copy.deepcopy)[step // 4](other.grad)
            opt.step()
        found.append(embs)
    assert_same(*found)


def test_refused():
    emb = multi()
    opt = torch.optim.Adam(emb.parameters())
    train(emb, opt, range(3))
    state = opt.state_dict()
    other = st.MultiEmbedding({"a": 20, "b": 1, "c": 37}, DIM, dtype=torch.float64)
    opt = torch.optim.Adam(other.parameters())
    opt.load_state_dict(state)
    loss_of(list(other.values()), 1, (0, 1)).backward()
    before = other.weight.detach().clone()
    with pytest.raises(OptimizerError, match=r"those named \['a', 'b', 'c'\]; load the state that was saved"):
        opt.step()
    assert torch.equal(other.weight, before)
    plain = st.Embedding(sum(SIZES), DIM, dtype=torch.float64)
    with pytest.raises(OptimizerError, match="a MultiEmbedding of the same features"):
        torch.optim.Adam(plain.parameters()).load_state_dict(state)
    with pytest.raises(InvalidValueError, match="assign the weight of a MultiEmbedding of the same features"):
        other.weight = emb.weight
