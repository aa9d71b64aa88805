"""``emb.weight`` on a CUDA device: the whole table, wherever its rows live, reads and writes as that of ``nn.Embedding``."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_weight import CASES, compare
from weight_world import EXACT, LAZY

from gpu.tools import hold
from gpu.weight_pairs import DIM, ROWS, check_rows, pair, stored, tolerance  # noqa: F401 - fixtures

# torch warns once a process that it does not check what sparse tensors hold.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
# Statements with NumPy, which has no view of a device, sparse tensors, and a state dict, which has rows where they are stored.
OTHERS = re.compile(
    r"numpy\(|np\.|dlpack|graph|to_sparse|opt.state\[emb|[^n]emb\.state_dict\(\)\[|state_dict\(\)\.items"
)
PARTS = {name: [part for part in case.parts if not OTHERS.search(f" {part}")] for name, case in CASES.items()}
KINDS = [
    replace(
        kind,
        name=f"{kind} {memory}",
        table={**kind.table, "device": "cuda", "memory": memory},
        copies=memory != "device",
    )
    for kind, memory in ((EXACT, "pinned"), (LAZY, "device"), (EXACT, "pageable"))
]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", [name for name, parts in PARTS.items() if parts])
def test_as_torch(kind, name):
    """What people do with it on the host, with all tensors on the device."""
    case = replace(CASES[name], code="\n".join(PARTS[name]))
    moment = "trained" if case.group in ("swap", "train") else "between"
    compare(case, kind, torch.float64, moment, True)


# Rows in every form, and tensors of the host beside those of the device.
READS = {
    "norms of rows": lambda w: torch.linalg.norm(w, dim=1),
    "a row": lambda w: w[3],
    "every other column": lambda w: w[:, ::2],
    "rows by an index there": lambda w: w[torch.tensor([4, 0, -1, 4], device=w.device)],
    "rows by an index of the host": lambda w: w[torch.tensor([4, 0, -1])],
    "all scores": lambda w: torch.ones(3, DIM, device=w.device) @ w.T,
    "embedding_bag": lambda w: F.embedding_bag(torch.tensor([[1, 2], [2, 2]], device=w.device), w, mode="sum"),
    "double": lambda w: w.double(),
}


@pytest.mark.parametrize("name", READS)
def test_reads(pair, name):
    found, expected = (READS[name](module.weight) for module in pair)
    assert (found.device, found.dtype, found.shape) == (expected.device, expected.dtype, expected.shape)
    assert found.requires_grad == expected.requires_grad
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-5)


def test_what_it_tells_of_itself(pair, device):
    weight, other = (module.weight for module in pair)
    for ask in ("device", "shape", "dtype", "is_cuda", "is_leaf", "requires_grad", "nbytes"):
        assert getattr(weight, ask) == getattr(other, ask), ask
    assert weight.to(device) is weight
    assert weight.cuda() is weight
    assert weight.cpu().device.type == "cpu"


WRITES = {
    "data.mul_": lambda w: w.data.mul_(0.5),
    "a row of data": lambda w: w.data.__setitem__(7, 0.25),
    "a part of a row of data": lambda w: w.data[3][2:4].fill_(0.5),
    "rows of data by an index": lambda w: w.data.__setitem__(
        torch.tensor([1, 4], device=w.device), torch.ones(2, DIM, device=w.device)
    ),
    "a slice of data from the host": lambda w: w.data[2:5].copy_(torch.ones(3, DIM)),
    "data from the host": lambda w: w.data.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM) / 400),
    "data of itself": lambda w: setattr(w, "data", w.data * 2),
    "without gradients": lambda w: torch.no_grad()(w.mul_)(0.9),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(pair, device, name):
    for module in pair:
        WRITES[name](module.weight)
    check_rows(*pair)
    emb, dense = pair
    ids = torch.arange(ROWS, device=device)
    torch.testing.assert_close(emb(ids), dense(ids), rtol=1e-5, atol=tolerance(emb))


def test_a_read_waits_for_a_step_that_is_on_its_way(pair, device):
    emb, _ = pair
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in pair]
    side, ids = torch.cuda.Stream(), torch.tensor([1, 4, 4], device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        hold(side, 20)
        for module, optimizer in zip(pair, optimizers, strict=True):
            module(ids).sum().backward()
            optimizer.step()
        found, expected = (module.weight.detach().clone() for module in pair)
    side.synchronize()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(emb, 1.0))


def test_a_write_is_seen_on_another_stream_once_waited_for(pair, device):
    emb, _ = pair
    side = torch.cuda.Stream()
    ids = torch.arange(ROWS, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        hold(side, 20)
        emb.weight.data.fill_(0.5)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(emb(ids), torch.full((ROWS, DIM), 0.5, device=device), rtol=0, atol=1e-3)
