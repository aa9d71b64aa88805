"""``summary``: the tables of a model, what they take and who trains them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import speedtransfer
from speedtransfer.errors import InvalidTypeError

IDS = torch.tensor([1, 2, 3])


@pytest.fixture
def model() -> nn.ModuleDict:
    made = nn.ModuleDict({"users": speedtransfer.Embedding(50, 4, idle="exact")})
    made["bags"] = nn.Sequential(speedtransfer.EmbeddingBag(20, 4, idle="lazy", storage_dtype=torch.bfloat16))
    made["again"] = made["users"]
    made["head"] = nn.Linear(4, 2)
    return made


def test_text_and_fields(model: nn.ModuleDict, tmp_path) -> None:
    found = speedtransfer.summary(model)
    users, bags = found.tables
    assert (users.rows, users.dim, users.dtype, users.idle) == (50, 4, torch.float32, "exact")
    assert (bags.names, bags.dtype, bags.idle) == (("bags.0",), torch.bfloat16, "lazy")
    assert (users.planes, users.num_bytes, bags.num_bytes) == (("weight",), 50 * 4 * 4, 20 * 4 * 2)
    assert (found.num_bytes, found.other_parameters, found.other_bytes) == (800 + 160, 10, 40)
    model["file"] = speedtransfer.Embedding(10, 2, memory="mmap", path=tmp_path / "rows.npy")
    text = str(speedtransfer.summary(model, torch.optim.SGD(model["users"].parameters())))
    title, _, *rows, total = text.splitlines()
    assert title.split() == ["table", "rows", "dim", "dtype", "idle", "memory", "planes", "size", "optimizer"]
    assert rows[0].startswith("users, again  50    4    float32   exact  ")
    assert rows[0].endswith("800 bytes  SGD group 0")
    assert "rows.npy" in rows[2]
    assert total == "3 tables, 1.04 kB; 10 other parameters, 40 bytes"
    assert str(speedtransfer.summary(nn.Linear(2, 2))) == "0 tables, 0 bytes; 6 other parameters, 24 bytes"
    assert speedtransfer.summary(speedtransfer.Embedding(3, 2)).tables[0].names == ("Embedding",)


def test_owners(model: nn.ModuleDict) -> None:
    users, bags = model["users"], model["bags"][0]
    groups = [{"params": model["head"].parameters()}, {"params": [users.weight], "lr": 0.1}]
    opt = torch.optim.AdamW(groups)
    of_users, of_bags = speedtransfer.summary(model, opt).tables
    assert of_users.optimizer == "AdamW group 1"
    assert of_bags.optimizer == "no optimizer has this table"
    bags.weight.requires_grad_(False)
    sgd = torch.optim.SGD([users.weight])
    of_users, of_bags = speedtransfer.summary(model, [opt, sgd]).tables
    assert of_users.optimizer == "AdamW group 1 and SGD group 0"
    assert of_bags.optimizer == "frozen"


def test_without_an_optimizer_the_last_one_is_named(model: nn.ModuleDict) -> None:
    opt = torch.optim.AdamW(model.parameters())
    model["users"](IDS).sum().backward()
    opt.step()
    users, bags = speedtransfer.summary(model).tables
    assert (users.optimizer, bags.optimizer) == ("AdamW group 0", "")
    assert set(users.planes) > {"weight", "exp_avg", "exp_avg_sq"}
    assert users.num_bytes == model["users"].table.nbytes


class _Plain(torch.optim.Optimizer):
    """One that nobody knows, with state for each row."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            param.sub_(mean.lerp_(param.grad, 0.1))


@pytest.mark.filterwarnings("ignore:it is not known what _Plain does")
@pytest.mark.parametrize(
    ("optimizer", "sparse", "idle"),
    [
        (torch.optim.AdamW, False, "exact"),
        (torch.optim.SGD, False, "exact"),
        (torch.optim.SGD, True, "exact"),
        (torch.optim.SparseAdam, True, "lazy"),
        (_Plain, False, "lazy"),
    ],
)
def test_idle_rows_are_those_in_force(optimizer, sparse, idle) -> None:
    emb = speedtransfer.Embedding(50, 4, sparse=sparse)
    opt = optimizer(emb.parameters())
    assert speedtransfer.summary(emb, opt).tables[0].idle == "auto"
    emb(IDS).sum().backward()
    opt.step()
    before = emb.weight.detach().clone()
    assert speedtransfer.summary(emb, opt).tables[0].idle == idle
    opt.zero_grad()
    emb(IDS + 10).sum().backward()
    opt.step()
    moved = (emb.weight.detach() != before).any(1)[IDS]
    assert moved.all() == moved.any() == (optimizer is torch.optim.AdamW)


def test_it_reads_no_row(model: nn.ModuleDict) -> None:
    opt = torch.optim.AdamW(model.parameters())
    for ids in (IDS, IDS + 10):
        opt.zero_grad()
        model["users"](ids).sum().backward()
        opt.step()
    table = model["users"].table
    before, version = table.stats(), table.version
    str(speedtransfer.summary(model, opt))
    assert (table.stats(), table.version) == (before, version)


@pytest.mark.parametrize("opt", ["adam", 3, [1]])
def test_what_is_no_optimizer(opt) -> None:
    with pytest.raises(InvalidTypeError, match="no optimizer"):
        speedtransfer.summary(nn.Linear(2, 2), opt)
