"""Exact idle rows on a CUDA device: as dense training there, the same from every memory, without a wait for the device."""

import math

import pytest
import torch
from lazy_oracle import skewed_batches, squared_loss
from optimizer_cases import ALL, COUPLED, OptimizerCase, case_named
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer as st
from gpu.tools import embedding_in, synchronizing

MEMORIES = ["pinned", "pageable", "mmap", "device"]
NAMES = [
    "adamw",
    "adamw-fused",
    "adam-amsgrad",
    "nadam-decoupled",
    "radam",
    "sgd-momentum-weight-decay",
    "rmsprop-momentum",
]
ROWS, DIM = 60, 16


def train(module, make, device, steps=120, dtype=torch.float32):
    optimizer = make(module.parameters())
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / steps))
    for ids, target in skewed_batches(ROWS, DIM, steps, size=8, dtype=dtype):
        optimizer.zero_grad()
        squared_loss(module(ids.to(device)), target.to(device)).backward()
        optimizer.step()
        schedule.step()
    return module.state_dict()["weight"].cpu().clone(), optimizer.state_dict()["state"].get(0, {})


def ours(memory, device, folder, **options):
    return embedding_in(memory, folder, device, ROWS, DIM, **{"idle": "exact", **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_memory_equals_dense_training(name, dtype, device, tmp_path):
    make = case_named(name).make
    torch.manual_seed(3)
    dense = nn.Embedding(ROWS, DIM, dtype=dtype).to(device)
    start = dense.weight.detach().cpu().clone()
    expected, state = train(dense, make, device, dtype=dtype)
    moved = float((expected - start).abs().max())
    results = [train(ours(memory, device, tmp_path, dtype=dtype), make, device, dtype=dtype) for memory in MEMORIES]
    for weight, _ in results:
        assert torch.equal(weight, results[0][0])
    # Capturable and fused kernels work out their corrections in float32.
    torch.testing.assert_close(
        results[0][0], expected, rtol=0, atol=(1e-10 if dtype == torch.float64 else 5e-5) * moved
    )
    for key, value in results[0][1].items():
        if isinstance(value, torch.Tensor) and value.dim():
            scale = float(state[key].abs().max())
            torch.testing.assert_close(value.cpu(), state[key].cpu(), rtol=0, atol=5e-5 * scale)


def test_the_cpu_agrees(device, tmp_path):
    make = case_named("adamw").make
    here, there = (train(ours("pageable", where, tmp_path), make, where) for where in ("cpu", device))
    torch.testing.assert_close(there[0], here[0], rtol=0, atol=5e-5)


def test_rows_and_history_follow_to_another_device(device, tmp_path):
    found = []
    for other in ("cpu", device):
        module = ours("pageable", "cpu", tmp_path)
        optimizer = case_named("adamw").make(module.parameters())
        for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, 60, size=8)):
            if number == 30:
                module.to(other)
            where = module.weight.device
            optimizer.zero_grad()
            squared_loss(module(ids.to(where)), target.to(where)).backward()
            optimizer.step()
        found.append(module.table.torch())
    torch.testing.assert_close(*found, rtol=0, atol=5e-5)


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_rows_looked_at_by_ids_on_the_host(memory, device, tmp_path, monkeypatch):
    """They catch up on the device, and the record of their steps is written from there: engines take no other rows."""
    emb = ours(memory, device, tmp_path)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.05)
    for ids, target in skewed_batches(ROWS, DIM, 5, size=8):
        optimizer.zero_grad()
        squared_loss(emb(ids.to(device)), target.to(device)).backward()
        optimizer.step()
    engine, written = emb.table._engine, []
    scatter = engine.scatter
    monkeypatch.setattr(
        engine, "scatter", lambda planes, ids, rows, *more: (written.extend(rows), scatter(planes, ids, rows, *more))
    )
    first, second = (emb.table.gather(range(ROWS)).clone() for _ in range(2))
    assert {rows.device for rows in written} == {device}
    assert torch.equal(first, second)
    assert torch.equal(second.cpu(), emb.table.torch().cpu())


def without_kernels(monkeypatch):
    for module in ("missed", "replay"):
        monkeypatch.setattr(f"speedtransfer.idle.{module}.is_trusted", lambda *_: False)


WITH_KERNELS = [pytest.param(case, True, id=str(case)) for case in (*ALL, *COUPLED)]
WITH_TORCH = [pytest.param(case, False, id=f"{case}-torch") for case in (ALL[5], ALL[7], ALL[12], COUPLED[0])]


@pytest.mark.parametrize(("case", "trusted"), WITH_KERNELS + WITH_TORCH)
def test_every_optimizer_as_on_the_cpu(case, trusted, device, tmp_path, monkeypatch):
    """Batches repeat ids, so that rows of padding follow the unique ones."""
    if not trusted:
        without_kernels(monkeypatch)
    found = []
    for where, memory in (("cpu", "pageable"), (device, "pinned")):
        module = ours(memory, where, tmp_path)
        start = module.weight.detach().cpu().clone()
        found.append(train(module, case.make, where, steps=25))
    moved = float((found[0][0] - start).abs().max())
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-4 * moved)
    for key, value in found[0][1].items():
        if isinstance(value, torch.Tensor) and value.dim():
            torch.testing.assert_close(found[1][1][key].cpu(), value, rtol=0, atol=1e-4 * float(value.abs().max()))


FUSED = [
    OptimizerCase("adamw", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    OptimizerCase("amsgrad", torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    OptimizerCase("adam-coupled", torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    OptimizerCase("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("trusted", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("memory", ["pinned", "device"])
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_steps_that_a_scaler_skips_on_the_device(case, memory, trusted, device, tmp_path, monkeypatch):
    """A row may be read before the host knows of them; a full batch may step the rows in place."""
    if not trusted:
        without_kernels(monkeypatch)
    torch.manual_seed(3)
    modules = ours(memory, device, tmp_path), nn.Embedding(ROWS, DIM).to(device)
    with torch.no_grad():
        modules[1].weight.copy_(modules[0].table.torch())
    optimizers = [case.make(module.parameters(), fused=True) for module in modules]
    scalers = [torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=5) for _ in modules]
    everything = torch.arange(ROWS, device=device)
    # Of torch's SGD a first step that is skipped leaves a momentum that nobody has set.
    skipped = {0 if case.kind is not torch.optim.SGD else 1, 3, 4, 21, 22, 23, 39}
    for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, 40, size=8)):
        ids, target = ids.to(device), target.to(device)
        if number % 11 == 10:
            ids, target = everything, target.new_zeros(ROWS, DIM)
        for module, optimizer, scaler in zip(modules, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = squared_loss(module(ids), target) * (math.inf if number in skipped else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if number % 7 == 2:
            with torch.no_grad():
                one, other = (module(everything) for module in modules)
            torch.testing.assert_close(one, other, rtol=0, atol=2e-4)
        if number == 30:
            modules[0].table.torch()  # writes rows that have caught up
    ours_here = modules[0].cpu().table.torch()  # the CPU cannot ask the device about the last step
    torch.testing.assert_close(ours_here, modules[1].weight.detach().cpu(), rtol=0, atol=2e-4)


FORMS = {
    "adamw": (torch.optim.AdamW, {"foreach": True}, {}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}, {}),
    "adamw-capturable": (torch.optim.AdamW, {"capturable": True}, {}),
    "adam-coupled": (torch.optim.Adam, {"weight_decay": 0.1}, {}),
    "adamax": (torch.optim.Adamax, {}, {}),
    "nadam-capturable": (torch.optim.NAdam, {"capturable": True}, {}),
    "asgd-capturable": (torch.optim.ASGD, {"capturable": True}, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}, {}),
    "half": (torch.optim.AdamW, {}, {"dtype": torch.bfloat16}),
    "double": (torch.optim.Adam, {"weight_decay": 0.1}, {"dtype": torch.float64}),
    "bfloat16": (torch.optim.AdamW, {}, {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}),
    "int8": (torch.optim.AdamW, {"fused": True}, {"storage_dtype": torch.int8, "state_dtype": torch.uint8}),
    "float8": (torch.optim.AdamW, {}, {"storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8}),
}


# With others than fused ones GradScaler itself waits.
SCALED = [(name, True) for name, (_, kwargs, _) in FORMS.items() if "fused" in kwargs]


@pytest.mark.parametrize(("name", "scaled"), [*((name, False) for name in FORMS), *SCALED])
def test_the_host_does_not_wait(name, scaled, device, tmp_path):
    kind, kwargs, options = FORMS[name]
    module = ours("pinned", device, tmp_path, **options)
    optimizer = kind(module.parameters(), lr=0.01, **kwargs)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled, init_scale=4.0)
    batches = [torch.randint(ROWS, (20,), device=device) for _ in range(6)]
    for number, ids in enumerate(batches):
        with synchronizing("error" if number > 3 else "default"):
            optimizer.zero_grad()
            scaler.scale(module(ids).float().square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()


def train_once(module, optimizer, ids):
    optimizer.zero_grad()
    module(ids).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "adam-weight-decay"])
def test_an_evaluation_in_inference_mode_comes_first(name, device, tmp_path):
    """What it has sent to the device is of use in training."""
    module = ours("pinned", device, tmp_path)
    optimizer = case_named(name).make(module.parameters())
    ids = torch.arange(8, device=device)
    for _ in range(3):
        train_once(module, optimizer, ids)
        with torch.inference_mode():
            assert module(ids + 20).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"idle": "lazy", "storage_dtype": torch.bfloat16}], ids=["exact", "bfloat16"])
def test_what_a_graph_would_leave_out_is_refused(options, device, tmp_path, monkeypatch):
    """The count of steps, on which idle rows and random bits depend, is the host's."""
    module = ours("pinned", device, tmp_path, **options)
    optimizer = torch.optim.AdamW(module.parameters(), capturable=True)
    ids = torch.arange(8, device=device)
    for _ in range(2):
        train_once(module, optimizer, ids)
    before = module.table.torch()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(st.errors.DeviceError, match="cannot be captured in a CUDA graph"):
            train_once(module, optimizer, ids + 1)
    assert torch.equal(module.table.torch(), before)


def _pair(device, make):
    """Return a dense module and a table of the same weights, each with its optimizer."""
    dense, table = nn.Embedding(6, 2).to(device), st.Embedding(6, 2, device=device, memory="pinned", idle="exact")
    with torch.no_grad():
        dense.weight.copy_(table.weight)
    return [(module, make(module.parameters())) for module in (dense, table)]


def _check_equal(pair):
    (dense, _), (table, _) = pair
    torch.testing.assert_close(table.weight.detach().cpu(), dense.weight.detach().cpu(), rtol=1e-5, atol=1e-5)


def test_a_learning_rate_written_through_its_data_is_seen(device):
    def make(params):
        return torch.optim.Adam(params, lr=torch.tensor(0.1, device=device), capturable=True)

    pair = _pair(device, make)
    for number, ids in enumerate(([0, 1], [2, 3], [4], [5])):
        for module, optimizer in pair:
            if number == 2:
                optimizer.param_groups[0]["lr"].data.mul_(10)
            optimizer.zero_grad()
            module(torch.tensor(ids, device=device)).square().sum().backward()
            optimizer.step()
    _check_equal(pair)


@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_a_step_that_may_have_been_skipped_is_not_lost_when_its_wait_is_interrupted(device, monkeypatch, default):
    from speedtransfer.idle.unsure import Unsure

    pair = _pair(device, lambda params: torch.optim.Adam(params, lr=0.1, fused=True))
    scalers = [torch.amp.GradScaler("cuda", init_scale=4.0) for _ in pair]

    def step(ids):
        for (module, optimizer), scaler in zip(pair, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(module(torch.tensor(ids, device=device)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    def interrupted(self):
        raise KeyboardInterrupt

    with torch.device(default):
        for ids in ([0, 1], [2, 3], [4]):
            step(ids)
        with monkeypatch.context() as patch:
            patch.setattr(Unsure, "was_made", interrupted)
            patch.setattr(Unsure, "is_known", lambda self: False)
            with pytest.raises(KeyboardInterrupt):
                pair[1][1].state_dict()
        for ids in ([0], [1], [5]):
            step(ids)
    _check_equal(pair)
