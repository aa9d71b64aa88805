"""The probe: what an optimizer keeps for a row, what it starts from, whether its update is row by row; refusals by name."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupt import Interrupt
from lazy_oracle import Twins
from optimizer_cases import BASE, FUSED, REFUSED, OptimizerCase, case_named, some
from refused_styles import REFUSED_STYLES
from third_party import RowOptimizer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import PlaneSpec, find_handle, probe_optimizer


def probe(
    make: Callable[..., Any], dim: int = 3, dtype: torch.dtype = torch.float32, lr: Any = None
) -> dict[str, PlaneSpec]:
    param = nn.Parameter(torch.ones(4, dim, dtype=dtype))
    opt = make([param])
    if lr is not None:
        opt.param_groups[0]["lr"] = lr
    made = len(opt.state)
    found = probe_optimizer(opt, opt.param_groups[0], param)
    assert torch.equal(param, torch.ones_like(param))
    assert len(opt.state) == made
    return found


STARTS = {("adagrad-initial", "sum"): 0.3, ("rprop", "step_size"): 0.03, ("asgd", "ax"): None}


@pytest.mark.parametrize("case", BASE, ids=str)
def test_planes_and_their_starts(case: OptimizerCase) -> None:
    specs = probe(case.make)
    assert set(specs) == set(case.planes)
    for name, spec in specs.items():
        assert (spec.tail, spec.dtype) == ((3,), torch.float32)
        start = STARTS.get((case.name, name), 0.0)
        assert spec.initial == (None if start is None else pytest.approx(start, rel=1e-6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_dtypes_and_widths(dtype: torch.dtype, dim: int) -> None:
    for name in ("adamw", "sgd-momentum", "rprop", "adagrad"):
        assert {(spec.tail, spec.dtype) for spec in probe(case_named(name).make, dim, dtype).values()} == {
            ((dim,), dtype)
        }
    # Steps too small for the precision of the table are no reason to refuse.
    if dtype.itemsize == 2:
        adadelta = probe(lambda params: torch.optim.Adadelta(params, lr=1e-3, eps=1e-4), dim, dtype)
        assert set(adadelta) == {"square_avg", "acc_delta"}


@pytest.mark.parametrize("case", some([*BASE, *FUSED]), ids=str)
def test_a_learning_rate_of_zero_hides_nothing(case: OptimizerCase) -> None:
    assert set(probe(case.make, lr=0.0)) == set(case.planes)


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adamw-fused", "rmsprop", "nadam"])
def test_a_learning_rate_in_a_tensor(name: str) -> None:
    case = case_named(name)
    for rate in (0.05, 0.0):
        lr = torch.tensor(rate)
        assert set(probe(lambda params, lr=lr: case.make(params, lr=lr))) == set(case.planes)
        assert lr == rate


def test_hyperparameters_of_the_group_count() -> None:
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    opt = torch.optim.Adam([{"params": params[:1], "amsgrad": True}, {"params": params[1:]}])
    names = [set(probe_optimizer(opt, g, p)) for g, p in zip(opt.param_groups, params, strict=True)]
    assert names == [{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"exp_avg", "exp_avg_sq"}]


def test_starts() -> None:
    """Zero where that does as well, as zero pages take no memory; from the rate and hyperparameters of the first step."""
    adamax = probe(lambda params: torch.optim.Adamax(params, eps=1e-3))
    assert adamax["exp_inf"].initial == 0  # which it leaves on a row without gradient
    adagrad = probe(lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5), lr=0.0)
    assert adagrad["sum"].initial == 0.5  # a schedule may start from a rate of zero
    assert probe(torch.optim.Rprop, lr=0.0)["step_size"].initial == 0  # lifted to its smallest at the first touch


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_cannot_work_here_say_so(flag: str) -> None:
    """`capturable` needs a GPU and `differentiable` a parameter inside autograd: torch refuses both for a dense leaf."""
    for module, error in ((nn.Embedding(9, 4), Exception), (speedtransfer.Embedding(9, 4), OptimizerError)):
        opt = torch.optim.Adam(module.parameters(), **{flag: True})
        module(torch.tensor([1])).sum().backward()
        with pytest.raises(error, match=r"capturable|leaf Variable"):
            opt.step()


def test_handles_are_found_by_parameter_and_die_with_it(no_gc: None) -> None:
    emb = speedtransfer.Embedding(4, 2)
    weight = emb.weight
    assert find_handle(nn.Parameter(torch.zeros(4, 2))) is None
    table = weakref.ref(emb.table)
    del emb
    assert find_handle(weight).table is table()  # as torch's parameter outlives its module
    del weight
    assert table() is None, "no cycle keeps it until the next collection"


def test_trials_do_not_fire_the_hooks_of_others() -> None:
    speedtransfer.Embedding(4, 3)  # from now on steps are guarded
    seen: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    probe(torch.optim.AdamW)
    hook.remove()
    assert seen == []


def test_a_trial_leaves_everything_alone_also_random_numbers_that_the_optimizer_draws() -> None:
    class Draws(torch.optim.SGD):
        def step(self, closure=None):
            torch.rand(3)
            return super().step(closure)

    state = torch.get_rng_state()
    assert set(probe(lambda params: Draws(params, lr=0.1, momentum=0.9))) == {"momentum_buffer"}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adamw"])  # others read scalars that they make there
def test_a_default_device_that_is_not_that_of_the_rows(name: str, sparse: bool) -> None:
    """As torch.set_default_device("cuda") with tables on the host; "meta" holds no values at all."""
    if name != "sgd-momentum" and torch.__version__ < "2.13":
        pytest.skip("torch's own optimizers count their steps on the default device")
    param = nn.Parameter(torch.ones(4, 3))
    opt = case_named(name).make([param], foreach=False)
    expected = probe_optimizer(opt, opt.param_groups[0], param, sparse)
    with torch.device("meta"):
        assert probe_optimizer(opt, opt.param_groups[0], param, sparse) == expected


@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_training_under_another_default_device(idle: str, tmp_path) -> None:
    case, weights = case_named("sgd-momentum-weight-decay"), []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        emb = speedtransfer.Embedding(9, 4, idle=idle, storage_dtype=torch.bfloat16, state_dtype=torch.uint8)
        opt = case.make(emb.parameters(), foreach=False)
        for ids in (torch.tensor([1, 2]), torch.tensor([2, 3])):
            emb(ids).sum().backward()
            with torch.device(device):
                opt.step()
            opt.zero_grad()
        with torch.device(device):
            speedtransfer.save_checkpoint(tmp_path / device, emb, opt)
            emb.table.zero_()
            speedtransfer.load_checkpoint(tmp_path / device, emb, opt)
        weights.append(emb.table.torch().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("at", [1, 301, 601])
def test_a_lack_of_memory_is_no_verdict(at: int) -> None:
    """It comes out of the step, and the next one tries the optimizer anew."""

    class Mine(torch.optim.AdamW):
        pass

    emb = speedtransfer.Embedding(9, 4, idle="lazy")
    optimizer = Mine(emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    assert Interrupt(at, MemoryError, "by_rows").during(optimizer.step)
    optimizer.step()


# --- what would train rows otherwise than dense torch is refused: by name, with the reason, and in time -----------------


@pytest.mark.parametrize("kind", [case.kind for case, _ in REFUSED if case.name in ("adafactor", "muon")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-2])
def test_dependence_between_rows_shows_at_any_learning_rate_and_precision(kind, dtype, lr) -> None:
    with pytest.raises(OptimizerError, match="not row by row"):
        probe(kind, 16, dtype, lr)


def test_an_optimizer_around_another_is_refused_before_any_trial() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, params):
            self.base = torch.optim.SGD([dense, *params], lr=1.0)
            super().__init__(self.base.param_groups, {})

        def step(self, closure=None):
            self.base.step()

    dense = nn.Parameter(torch.zeros(3))
    dense.grad = torch.ones(3)
    with pytest.raises(OptimizerError, match="Around wraps SGD"):
        probe(Around)
    assert not dense.any()


WIDTHS, SCALES = (16, 6, 5, 2), (1e-3, 1.0, 30.0)


@pytest.mark.parametrize("kind", REFUSED_STYLES, ids=lambda kind: kind.__name__)
def test_refused_at_the_first_step(kind: type[RowOptimizer]) -> None:
    number = list(REFUSED_STYLES).index(kind)
    check_refused(kind, WIDTHS[number % 4], SCALES[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED_STYLES, ids=lambda kind: kind.__name__)
def test_refused_at_any_width_and_scale(kind: type[RowOptimizer]) -> None:
    for dim, scale in itertools.product(WIDTHS, SCALES):
        check_refused(kind, dim, scale)


def check_refused(kind: type[RowOptimizer], dim: int, scale: float) -> None:
    emb = speedtransfer.Embedding(9, dim)
    before = emb.table.torch().clone()
    opt = kind(emb.parameters())
    (scale * emb(torch.tensor([1, 2])).square()).sum().backward()
    with pytest.raises(OptimizerError, match=REFUSED_STYLES[kind]) as caught:
        opt.step()
    message = str(caught.value)
    assert message.startswith(kind.__name__)
    assert "use " in message
    assert "\n" not in message
    assert torch.equal(emb.table.torch(), before)
    assert emb.table.planes == ("weight",)
    assert not opt.state


class Late(RowOptimizer):
    """Averages from a step on that no trial reaches."""

    def update(self, p, g, state, group) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(g, alpha=group["lr"])
        if state["step"] > 40:
            state.setdefault("average", p.clone()).lerp_(p, 0.1)


class Widens(RowOptimizer):
    """Computes its state in double precision from its 41st step on."""

    def update(self, p, g, state, group) -> None:
        state["step"] = state.get("step", 0) + 1
        m = state.get("m", torch.zeros_like(p))
        state["m"] = m.lerp(g.to(m.dtype), 0.1) if state["step"] <= 40 else m.double()
        p.sub_(state["m"].to(p.dtype), alpha=group["lr"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Late, "Late made state 'average' that it did not make in a trial of 24 steps"),
        (Widens, r"state 'm' became \(\d+, 16\) torch.float64 for \d+ rows but its plane"),
    ],
)
def test_state_that_changes_later_than_any_trial_is_refused_when_it_does(kind: Any, message: str) -> None:
    twins = Twins(kind)
    batches = twins.batches(41)
    twins.train(batches[:40])
    twins.assert_same()
    before = twins.ours.table.torch().clone()
    for _ in range(2):  # and again: the row of the step is not lost in silence
        with pytest.raises(OptimizerError, match=message):
            twins.train(batches[40:])
        assert torch.equal(twins.ours.table.torch(), before)


class Global(RowOptimizer):
    """Walks over its parameters by an attribute, and takes the model, so that a trial must copy it."""

    def __init__(self, model: nn.Module) -> None:
        self.everything = list(model.parameters())
        super().__init__(model.parameters())

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.everything:
                if p.grad is not None:
                    p.sub_(p.grad)


def test_a_trial_cannot_move_the_parameters_of_the_model() -> None:
    model = nn.ModuleList([speedtransfer.Embedding(9, 4), nn.Linear(4, 1)])
    opt = Global(model)
    before = [p.detach().clone() for p in model[1].parameters()]
    model[1](model[0](torch.tensor([1, 2]))).sum().backward()
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(OptimizerError, match="a trial moved no row"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model[1].parameters(), before, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


class Everywhere(RowOptimizer):
    """Steps its own parameters, and those of the model that it was made with, each once."""

    def __init__(self, model: nn.ModuleList) -> None:
        self.everything = list(model.parameters())
        super().__init__([{"params": part.parameters(), "decay": 0.1 * number} for number, part in enumerate(model)])

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        for p in {id(p): p for p in (*params, *self.everything)}.values():
            if p.grad is not None:
                p.sub_(p.grad)


def test_a_trial_cannot_move_a_table_whose_step_has_begun():
    """The second table has other hyperparameters, and is tried when the first is lent to the optimizer."""
    model = nn.ModuleList(speedtransfer.Embedding(9, 4, idle="lazy") for _ in range(2))
    opt, before = Everywhere(model), [emb.table.torch().clone() for emb in model]
    sum(emb(torch.tensor([1, 2])).sum() for emb in model).backward()
    opt.step()
    for emb, rows in zip(model, before, strict=True):
        rows[1:3] -= 1
        assert torch.equal(emb.table.torch(), rows)


def test_the_first_step_of_a_kind_takes_the_rows_that_the_lookup_has_read():
    """A trial hides the gradient, and the rows with it: read again, those that `max_norm` has written would be rounded."""

    def trained(**unlike_others: Any) -> torch.Tensor:
        torch.manual_seed(0)
        emb = speedtransfer.Embedding(20, 8, max_norm=1.0, storage_dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(emb.parameters(), lr=0.1, **unlike_others)
        emb(torch.arange(10)).square().sum().backward()
        optimizer.step()
        return emb.table.torch().clone()

    # The second is not tried again.
    assert torch.equal(trained(betas=(0.731, 0.8)), trained(betas=(0.731, 0.8)))
