"""The probe: what an optimizer keeps for a row, what it starts from, and whether its update is row by row."""

from __future__ import annotations

import weakref

import pytest
import torch
from interrupt import Interrupt
from optimizer_cases import BASE, FUSED, REFUSED, OptimizerCase, case_named, some
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import PlaneSpec, find_handle, probe_optimizer


def spec_of(case: OptimizerCase, dim: int = 3, dtype: torch.dtype = torch.float32, **overrides) -> dict[str, PlaneSpec]:
    param = nn.Parameter(torch.ones(4, dim, dtype=dtype))
    opt = case.make([param], **overrides)
    return probe_optimizer(opt, opt.param_groups[0], param)


STARTS = {
    ("adagrad-initial", "sum"): 0.3,
    ("rprop", "step_size"): 0.03,
    ("asgd", "ax"): None,
}


@pytest.mark.parametrize("case", BASE, ids=str)
def test_planes_and_their_starts(case: OptimizerCase) -> None:
    specs = spec_of(case)
    assert set(specs) == set(case.planes)
    for name, spec in specs.items():
        assert spec.tail == (3,)
        assert spec.dtype == torch.float32
        start = STARTS.get((case.name, name), 0.0)
        assert spec.initial == (None if start is None else pytest.approx(start, rel=1e-6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_dtypes_and_widths(dtype: torch.dtype, dim: int) -> None:
    for name in ("adamw", "sgd-momentum", "rprop", "adagrad"):
        specs = spec_of(case_named(name), dim, dtype)
        assert {spec.tail for spec in specs.values()} == {(dim,)}
        assert {spec.dtype for spec in specs.values()} == {dtype}


@pytest.mark.parametrize("case", some([*BASE, *FUSED]), ids=str)
def test_a_learning_rate_of_zero_hides_nothing(case: OptimizerCase) -> None:
    param = nn.Parameter(torch.ones(4, 3))
    opt = case.make([param])
    opt.param_groups[0]["lr"] = 0.0
    assert set(probe_optimizer(opt, opt.param_groups[0], param)) == set(case.planes)


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adamw-fused", "rmsprop", "nadam"])
def test_a_learning_rate_in_a_tensor(name: str) -> None:
    case = case_named(name)
    lr = torch.tensor(0.05)
    assert set(spec_of(case, lr=lr)) == set(case.planes)
    assert set(spec_of(case, lr=torch.tensor(0.0))) == set(case.planes)
    assert lr == 0.05


def test_hyperparameters_of_the_group_count() -> None:
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    opt = torch.optim.Adam([{"params": params[:1], "amsgrad": True}, {"params": params[1:]}])
    names = [set(probe_optimizer(opt, g, p)) for g, p in zip(opt.param_groups, params, strict=True)]
    assert names == [{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"exp_avg", "exp_avg_sq"}]


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_cannot_work_here_say_so(flag: str) -> None:
    """`capturable` needs a GPU and `differentiable` a parameter inside autograd: torch refuses both for a dense leaf."""
    dense = nn.Embedding(9, 4)
    emb = speedtransfer.Embedding(9, 4)
    for module, error in ((dense, Exception), (emb, OptimizerError)):
        opt = torch.optim.Adam(module.parameters(), **{flag: True})
        module(torch.tensor([1])).sum().backward()
        with pytest.raises(error, match=r"capturable|leaf Variable"):
            opt.step()


def test_handles_are_found_by_parameter_and_die_with_it(no_gc: None) -> None:
    emb = speedtransfer.Embedding(4, 2)
    weight = emb.weight
    assert find_handle(weight) is not None
    assert find_handle(nn.Parameter(torch.zeros(4, 2))) is None
    table = weakref.ref(emb.table)
    del emb
    assert find_handle(weight).table is table()  # as torch's parameter outlives its module
    del weight
    assert table() is None, "no cycle keeps it until the next collection"


def test_trials_do_not_fire_the_hooks_of_others() -> None:
    speedtransfer.Embedding(4, 3)  # from now on steps are guarded
    seen = []
    hook = register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    param = torch.nn.Parameter(torch.empty(0, 3))
    opt = torch.optim.AdamW([param])
    probe_optimizer(opt, opt.param_groups[0], param)
    hook.remove()
    assert seen == []


@pytest.mark.parametrize("kind", [case.kind for case in REFUSED if case.name in ("adafactor", "muon")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-2])
def test_dependence_between_rows_shows_at_any_learning_rate_and_precision(kind, dtype, lr) -> None:
    param = torch.nn.Parameter(torch.empty(0, 16, dtype=dtype))
    opt = kind([param], lr=1e-2)
    opt.param_groups[0]["lr"] = lr
    with pytest.raises(OptimizerError, match="not row by row"):
        probe_optimizer(opt, opt.param_groups[0], param)


def test_an_optimizer_around_another_is_refused_before_any_trial() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, base):
            self.base = base
            super().__init__(base.param_groups, {})

        def step(self, closure=None):
            self.base.step()

    dense = torch.nn.Parameter(torch.zeros(3))
    dense.grad = torch.ones(3)
    param = torch.nn.Parameter(torch.empty(0, 3))
    opt = Around(torch.optim.SGD([dense, param], lr=1.0))
    with pytest.raises(OptimizerError, match="Around wraps SGD"):
        probe_optimizer(opt, opt.param_groups[0], param)
    assert not dense.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_too_small_for_the_precision_of_the_table_are_no_reason_to_refuse(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.empty(0, 16, dtype=dtype))
    opt = torch.optim.Adadelta([param], lr=1e-3, eps=1e-4)
    assert set(probe_optimizer(opt, opt.param_groups[0], param)) == {"square_avg", "acc_delta"}


def test_a_trial_leaves_everything_alone_also_random_numbers_that_the_optimizer_draws() -> None:
    class Draws(torch.optim.SGD):
        def step(self, closure=None):
            torch.rand(3)
            return super().step(closure)

    param = nn.Parameter(torch.ones(4, 3))
    opt = Draws([param], lr=0.1, momentum=0.9)
    state = torch.get_rng_state()
    assert set(probe_optimizer(opt, opt.param_groups[0], param)) == {"momentum_buffer"}
    assert torch.equal(torch.get_rng_state(), state)
    assert not opt.state
    assert torch.equal(param, torch.ones(4, 3))


def test_starts() -> None:
    """Zero where that does as well, as zero pages take no memory; from the rate and hyperparameters of the first step."""
    param = nn.Parameter(torch.empty(0, 3))

    def start(kind: type[torch.optim.Optimizer], name: str, lr: float | None = None, **options: float) -> object:
        opt = kind([param], **options)
        opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"] if lr is None else lr
        return probe_optimizer(opt, opt.param_groups[0], param)[name].initial

    assert start(torch.optim.Adamax, "exp_inf", eps=1e-3) == 0  # which it leaves on a row without gradient
    assert start(torch.optim.Adagrad, "sum", initial_accumulator_value=0.5) == 0.5
    assert start(torch.optim.Rprop, "step_size", lr=0.0) == 0  # lifted to its smallest at the first touch


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
