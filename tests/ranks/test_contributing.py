"""The kinds of id space and owner that CONTRIBUTING.md adds: each trains as ``torch.nn.Embedding`` does."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import take_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from examples.compressed_exchange import BlockMomentumAverager, OneBitState, one_bit_hook
from ranks.pair import Pair, ids, rows_of, squares, table, told
from ranks.run import on
from speedtransfer.errors import InvalidTypeError, RowIndexError

PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
LISTED, AVERAGED = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
IDS = torch.tensor([40, 7, 1 << 40, 100, 3, -5])
BATCHES = [torch.tensor([[7, 3], [7, -5]]), torch.tensor([[1 << 40, 7], [40, 40]]), torch.tensor([[3, 3], [100, 7]])]


def module_of(name, source):
    """Return a block of the page as a module, which pickles find."""
    made = sys.modules.get(name) or types.ModuleType(name)
    if name not in sys.modules:
        sys.modules[name] = made
        exec(compile(source, name, "exec"), made.__dict__)
    return made


def number(ids):
    return (ids.unsqueeze(-1) == IDS).int().argmax(-1)


# --- listed ids -----------------------------------------------------------------------------------------------------------


def pair(kind, padding=None, **options):
    """Return a module that looks listed ids up, and one of torch by row numbers."""
    row = None if padding is None else int(number(torch.tensor(padding)))
    made = module_of("listed_ids", LISTED).listed(getattr(st, kind)(len(IDS), 4, **options), IDS, padding)
    torch_kind = getattr(nn, kind)(len(IDS), 4, padding_idx=row)
    torch.manual_seed(3)
    torch_kind.reset_parameters()
    torch.manual_seed(3)
    made.reset_parameters()
    return made, torch_kind


def train(module, wanted):
    opts = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, wanted)]
    for batch in BATCHES:
        ours, theirs = module(batch), wanted(number(batch))
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        for loss, opt in zip((ours, theirs), opts, strict=True):
            take_step(opt, loss.square().sum())
    assert torch.allclose(module.table.gather(torch.arange(len(IDS))), wanted.weight.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "padding", "options"),
    [("Embedding", None, {}), ("Embedding", 3, {"memory": "mmap"}), ("EmbeddingBag", 3, {"idle": "exact"})],
)
def test_listed_ids_train_as_torch(kind, padding, options, tmp_path):
    place = {"path": tmp_path / "rows.safetensors"} if "memory" in options else {}
    train(*pair(kind, padding, **options, **place))


def test_what_takes_ids_for_row_numbers_is_refused():
    module, _ = pair("Embedding")
    batch, swapped = BATCHES[0], {"weight": torch.zeros(len(IDS), 4)}
    for refused in (
        lambda: F.embedding(batch, module.weight),
        lambda: module.weight[batch],
        lambda: torch.func.functional_call(module, swapped, (batch,)),
        lambda: torch.func.vmap(module)(batch),
        lambda: st.to_dense(module),
        lambda: module.to("meta"),
        lambda: module(st.tables.unique_rows(number(batch).flatten())),
    ):
        with pytest.raises(InvalidTypeError, match=r"listed ids|not row numbers"):
            refused()
    with pytest.raises(RowIndexError, match="id 8 is not in the list"):
        module(torch.tensor([7, 8]))


@on(2)
def test_listed_ids_that_processes_share_out():
    module = module_of("listed_ids", LISTED).listed(table("sharded", len(IDS), 4), IDS, 3)
    wanted = nn.Embedding(len(IDS), 4, padding_idx=int(number(torch.tensor(3))), dtype=torch.float64)
    wanted.weight.data.copy_(rows_of(module))
    by_ids = lambda each, ids: squares(each, ids if each is module else number(ids))  # noqa: E731
    pair = Pair(module, wanted, loss=by_ids, batch=lambda step, rank: BATCHES[(step + rank) % 3])
    assert pair.train(0, 1, 2) < 1e-12
    said = told(lambda: module(torch.tensor([3, 8 if dist.get_rank() else 7])))
    words = [
        "ProcessGroupError: rank 1 refused its ids",
        "RowIndexError: id 8 is not in the list; add it, or leave it out",
    ]
    assert said.startswith(words[dist.get_rank()])


# --- averaged copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "period"), [(8, 3), (4, 1)])
@on(2)
def test_averaged_copies(steps, period):
    """As copies of torch, which train apart and are averaged."""
    torch.manual_seed(dist.get_rank())
    module = st.Embedding(50, 4, dtype=torch.float64)
    module = module_of("averaged_copies", AVERAGED).averaged(module, dist.group.WORLD, period)
    torch.manual_seed(0)
    own = nn.Embedding(50, 4, dtype=torch.float64)
    opts = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, own)]
    for step in range(steps):
        for each, opt in zip((module, own), opts, strict=True):
            take_step(opt, squares(each, ids(step)))
        if (step + 1) % period == 0:
            dist.all_reduce(own.weight.data)
            own.weight.data /= 2
    torch.testing.assert_close(module.weight.detach(), own.weight.detach(), rtol=0, atol=1e-10)


# --- examples/compressed_exchange.py: what is not sent is kept; block momentum beside its formula ---------------------


class Pulls(nn.Module):
    """Parameters of several shapes, whose gradients are what it is called with."""

    SHAPES = [(3, 5), (9,), (2, 3, 4), (), (0,), (3, 5), (16, 2)]

    def __init__(self, dtype):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in self.SHAPES)

    def forward(self, grads):
        return sum((weight * grad).sum() for weight, grad in zip(self.weights, grads, strict=True))


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
@on(3)
def test_what_one_bit_does_not_send_it_keeps(dtype, margin):
    draws = [torch.Generator().manual_seed(100 * step + dist.get_rank()) for step in range(6)]
    steps = [[torch.randn(shape, generator=draw).to(dtype) for shape in Pulls.SHAPES] for draw in draws]
    # In several buckets, which are others after the first step.
    state, ddp = OneBitState(start_step=2), DistributedDataParallel(Pulls(dtype), bucket_cap_mb=1e-4)
    ddp.register_comm_hook(state, one_bit_hook)
    received, worst, most = [], 0.0, 0.0
    for grads in steps:
        ddp.zero_grad()
        ddp(grads).backward()
        received.append([weight.grad.clone() for weight in ddp.module.weights])
    for place, weight in enumerate(ddp.module.weights):
        if weight.numel():
            kept = state.errors[id(weight)].view(weight.shape)
            given = sum(grads[place].double() for grads in steps) - kept
            dist.all_reduce(given)
            came = sum(grads[place].double() for grads in received)
            worst = max(worst, (came - given / dist.get_world_size()).abs().max().item())
            most = max(most, kept.abs().max().item())
    assert worst < margin
    assert 0.5 < most < 10


# --- block momentum -------------------------------------------------------------------------------------------------------

PERIOD, WARMUP = 2, 1


def expected(momentum, steps):
    """A value of the model after each average, where rank r adds (r + 1) times the number of the step."""
    found = []
    model = move = since = 0.0
    for step in range(steps):
        since += (step + 1) * (dist.get_world_size() + 1) / 2
        if step >= WARMUP and (step - WARMUP) % PERIOD == 0:
            move = momentum * move + since if found else 0.0
            model += move if found else since
            since = 0.0
            found.append(model)
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@on(3)
def test_moves_by_the_formula(momentum):
    weight, table = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)), st.Embedding(3, 2)
    table.table.torch().fill_(dist.get_rank())
    averager = BlockMomentumAverager(PERIOD, WARMUP, momentum)
    found = []
    for step in range(8):
        with torch.no_grad():
            weight += (step + 1) * (dist.get_rank() + 1)
        averager.average_parameters([weight, table.weight] if step % 2 else [{"params": [weight, table.weight]}])
        if step % 2:
            found.append(weight[0, 0].item())
    assert found == pytest.approx(expected(momentum, 8))
    # A table has averages of its own.
    assert table.table.torch().eq(dist.get_rank()).all()
