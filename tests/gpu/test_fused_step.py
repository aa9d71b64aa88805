"""Steps by one kernel on a CUDA device: what the optimizer would have done, where the planes are."""

import pytest
import torch
from cases import take_step
from lazy_oracle import skewed_batches, squared_loss
from torch import nn
from torch.optim import SGD, Adam, AdamW

import speedtransfer as st
from gpu.tools import fakegpu, hold, synchronizing
from speedtransfer.optim import fused_step, stepping
from speedtransfer.optim.fused_step import SWITCH
from speedtransfer.optim.plane_view import PlaneView

NUM_ROWS, DIM = 41, 16
OPTIMIZERS = {
    "sgd": lambda params: SGD(params, 0.01, weight_decay=0.03),
    "sgd-momentum": lambda params: SGD(params, 0.01, momentum=0.9, dampening=0.4),
    "adam": lambda params: Adam(params, 0.01, weight_decay=0.1, maximize=True),
    "adam-fused": lambda params: Adam(params, 0.01, fused=True),
    "sgd-fused": lambda params: SGD(params, 0.01, momentum=0.9, fused=True),
    "adamw-amsgrad": lambda params: AdamW(params, 0.01, betas=(0.3, 0.99), amsgrad=True),
}
# Sums in another order, and products that are rounded before they are added.
TOLERANCE = 2e-6


@pytest.fixture
def fused(monkeypatch):
    """Switch the fused way on, and list the steps that took it."""
    made = []
    make_step = stepping.make_step

    def counted(*args):
        made.append(args)
        make_step(*args)

    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(stepping, "make_step", counted)
    return made


def train(memory, device, make, dim=DIM, engine=None, step=None, idle="lazy", **options):
    torch.manual_seed(3)
    emb = st.Embedding(NUM_ROWS, dim, memory=memory, device=device, idle=idle, **options)
    if engine:
        emb.table.engine = engine
    torch.manual_seed(4)
    linear = nn.Linear(dim, dim, device=device)
    optimizer = make([*emb.parameters(), *linear.parameters()])
    for ids, target in skewed_batches(NUM_ROWS, dim, 12):
        optimizer.zero_grad()
        squared_loss(linear(emb(ids.to(device))), target.to(device)).backward()
        (step or optimizer.step)(*([optimizer] if step else []))
    state = optimizer.state.get(emb.weight, {})
    state = {name: value.decode() if isinstance(value, PlaneView) else value for name, value in state.items()}
    found = {"weight": emb.table.torch(), "grad": emb.weight.grad.to_dense(), "linear": linear.weight.detach(), **state}
    return {name: value.cpu().clone() for name, value in found.items()}


@pytest.mark.parametrize(
    ("memory", "dim", "layout", "idle", "cached"),
    [
        ("pinned", 16, "planes", "lazy", {}),
        ("pinned", 7, "rows", "exact", {}),
        ("device", 16, "planes", "exact", {}),
        ("pinned", 16, "planes", "lazy", {"cache_rows": 9}),
        ("pinned", 7, "rows", "exact", {"cache_rows": NUM_ROWS, "cache_counts": torch.ones(NUM_ROWS)}),
    ],
)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_training_as_the_ordinary_way(make, memory, dim, layout, idle, cached, device, fused, monkeypatch):
    found = train(memory, device, make, dim, padding_idx=0, layout=layout, idle=idle, **cached)
    # The first step makes the state.
    assert len(fused) == 11
    monkeypatch.setenv(SWITCH, "0")
    expected = train(memory, device, make, dim, padding_idx=0, idle=idle, **cached)
    assert len(fused) == 11
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.skipif(fakegpu is not None, reason="the emulator rounds as torch does on the CPU")
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_the_bits_of_torch(kind, foreach, device, fused, monkeypatch):
    def make(params):
        return kind(params, 0.01, weight_decay=0.1, foreach=foreach)

    monkeypatch.delenv(SWITCH)
    found = train("pinned", device, make)
    assert len(fused) == 11
    monkeypatch.setenv(SWITCH, "0")
    expected = train("pinned", device, make)
    assert len(fused) == 11
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_streams_and_no_wait(device, fused):
    """The kernel comes after what has queued the gradient, and before the next gather, on whatever stream that is."""
    emb = st.Embedding(NUM_ROWS, DIM, memory="pinned", device=device, idle="lazy")
    optimizer = SGD(emb.parameters(), 1.0)
    ids = torch.arange(NUM_ROWS, device=device)

    def step():
        take_step(optimizer, emb(ids).sum())

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = emb.table.torch().clone()
    side = torch.cuda.Stream()
    hold(side)
    with torch.cuda.stream(side), synchronizing("error"):
        step()
        step()
    after = emb.table.gather(ids)
    torch.testing.assert_close(after.cpu(), before - 2)
    assert len(fused) == 4


def test_the_kernel_is_compared_under_a_default_device(device):
    """Counts of steps that torch makes on the device, which steps by the kernel do not read, say nothing of the kernel."""
    with torch.device(device):
        assert fused_step._check(device)
