"""A `MultiEmbedding` of several processes: the numbers of one process with the batches of all, with a vocabulary too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from ranks.small import rows_of, told

SIZES, PADDING = {"a": 40, "b": 1, "c": 30}, {"a": -1, "b": None, "c": 2}
# Which features each rank gives a gradient in each step.
STEPS = [("ab", "ab"), ("a", "c"), ("", "b"), ("abc", "a"), ("c", "c"), ("a", "ab"), ("b", "b"), ("abc", "abc")]
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1),
}


def multi(kind: str = "one", has_ids: bool = False, **options: Any) -> st.MultiEmbedding:
    if kind in ("sharded", "shared"):
        options["process_group"] = dist.group.WORLD
    if kind == "shared":
        options["memory"] = "shared"
    if has_ids:
        options |= {"vocabulary": st.Vocabulary(seed=3, max_capacity=1000), "padding_idx": PADDING}
    torch.manual_seed(4)
    return st.MultiEmbedding(SIZES, 4, **{"dtype": torch.float64, **options})


def ids_of(step: int, rank: int, has_ids: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    if not has_ids:
        return {name: torch.randint(0, size, (5,), generator=draw) for name, size in SIZES.items()}
    ids = {name: torch.randint(-2, 6 + 2 * step, (3 + rank, 2), generator=draw) for name in SIZES}
    # In a vocabulary of one process as in the order of ranks.
    return {name: part * (1 << 50) if name == "b" else part for name, part in ids.items()}


class Net(nn.Module):
    """All look all features up; the loss is of some, and of none in some processes."""

    def __init__(self, emb: st.MultiEmbedding) -> None:
        super().__init__()
        self.emb, self.scale = emb, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, step: int, rank: int) -> Tensor:
        rows = self.emb(ids_of(step, rank, self.emb.vocabulary is not None))
        losses = [((rows[f] - 0.3).square() * torch.arange(4)).sum() for f in STEPS[step][rank]]
        return sum(losses, 0 * self.scale)


def train(emb: Any, opt: Any, steps: range, is_alone: bool, ddp: bool = False) -> None:
    net = Net(emb)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
        model = DistributedDataParallel(net) if ddp else net
    for step in steps:
        opt.zero_grad()
        ((net(step, 0) + net(step, 1)) / 2 if is_alone else model(step, dist.get_rank())).backward()
        opt.step()


def read(emb: st.MultiEmbedding, has_ids: bool) -> Tensor:
    """What all ids read."""
    emb.eval()
    with torch.no_grad():
        rows = [emb(ids_of(step, rank, has_ids)) for step in range(len(STEPS) + 1) for rank in range(2)]
    emb.train()
    return torch.cat([part.reshape(-1, 4) for found in rows for part in found.values()])


def known(emb: st.MultiEmbedding, is_alone: bool) -> Tensor:
    parts = [emb.vocabulary.ids()] * dist.get_world_size()
    if not is_alone:
        dist.all_gather_object(parts, parts[0])
    return torch.cat(parts).unique()


def compared(kind: str, has_ids: bool, ddp: bool, optimizer: str, idle: str) -> float:
    found = []
    # That of replicas, in DistributedDataParallel, is one too.
    for owned in (kind, "one"):
        is_alone, emb = len(found) == 1, multi(owned, has_ids, idle=idle)
        train(emb, OPTIMIZERS[optimizer](emb.parameters()), range(len(STEPS)), is_alone, ddp and not is_alone)
        found.append((read(emb, has_ids), known(emb, is_alone) if has_ids else torch.zeros(0)))
    assert torch.equal(found[0][1], found[1][1])
    return float((found[0][0] - found[1][0]).abs().max())


@pytest.mark.parametrize(
    ("kind", "has_ids", "ddp", "optimizer", "idle"),
    [
        ("sharded", False, False, "adamw", "exact"),
        ("sharded", False, True, "sgd", "lazy"),
        ("shared", False, False, "adamw", "exact"),
        ("shared", False, False, "sgd", "lazy"),
        ("one", False, True, "adamw", "exact"),
        ("one", False, True, "sgd", "lazy"),
        ("sharded", True, False, "adamw", "exact"),
        ("sharded", True, False, "sgd", "lazy"),
        ("sharded", True, True, "adamw", "lazy"),
    ],
)
def test_training(two, kind, has_ids, ddp, optimizer, idle):
    assert max(two(compared, kind, has_ids, ddp, optimizer, idle)) < 1e-12


def resumed(path: str) -> float:
    """Saved by all, and gone on with by all and by one."""
    ends = {}
    for kind in ("sharded", "one", "loaded by one"):
        is_alone, emb = kind != "sharded", multi(kind, True, idle="exact")
        opt = torch.optim.AdamW(emb.parameters(), lr=0.05)
        if kind == "loaded by one":
            st.load_checkpoint(path, emb, opt)
        else:
            train(emb, opt, range(5), is_alone)
        if kind == "sharded":
            st.save_checkpoint(path, emb, opt)
            emb = multi(kind, True, idle="exact")
            opt = torch.optim.AdamW(emb.parameters(), lr=0.05)
            st.load_checkpoint(path, emb, opt)
        train(emb, opt, range(5, len(STEPS)), is_alone)
        ends[kind] = read(emb, True)
    return max(float((end - ends["one"]).abs().max()) for end in ends.values())


def test_a_checkpoint(two, tmp_path):
    assert max(two(resumed, str(tmp_path / "saved"))) < 1e-12


def wrong(has_ids: bool) -> tuple[list[str], float]:
    """One process looks an id up that there cannot be: all raise, and go on."""
    emb = multi("sharded", has_ids)
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    bad = (1 << 62) if dist.get_rank() else 0
    ids = {name: torch.tensor([0, 0]) for name in SIZES}
    uses = {
        "module": lambda: emb({**ids, "b": torch.tensor([0, bad])}),
        "feature": lambda: emb["b"](torch.tensor([bad])),
        "columns": lambda: emb(torch.tensor([[1, bad, 2]])),
        "activate": lambda: emb.activate([torch.tensor([1]), torch.tensor([bad]), torch.tensor([1])]),
        "evaluation": torch.no_grad()(lambda: emb(torch.tensor([[1, bad, 2]]))),
        "ids of no feature": lambda: emb({"z" if bad else "b": torch.tensor([0])}),
    }
    said = [told(use) for use in uses.values()]
    sum(rows.sum() for rows in emb(ids).values()).backward()
    opt.step()
    return said, float(emb["a"](torch.tensor([0])).detach().sum())


@pytest.mark.parametrize("has_ids", [False, True])
def test_an_id_that_cannot_be_is_told_to_all(two, has_ids):
    (others, first), (own, second) = two(wrong, has_ids)
    assert first == second
    assert all("rank 1" in said for said in others), others
    assert all(str(1 << 62) in said for said in own[:-1]), own
    assert "not a feature" in own[-1]


# --- all rows -------------------------------------------------------------------------------------------------------------


def trained(kind: str, **options: Any) -> st.MultiEmbedding:
    emb = multi(kind, **options)
    # Rows that miss steps catch up in all processes together, where they share memory.
    opt = torch.optim.Adam(emb.parameters(), lr=0.1)
    for step in range(3):
        sum(rows.sum() for rows in emb(ids_of(step, 0)).values()).backward()
        opt.step()
        opt.zero_grad()
    return emb


def all_rows(kind: str, dtype: torch.dtype | None) -> None:
    options = {"storage_dtype": dtype, "dtype": torch.float32}
    shared = nn.ModuleDict({"emb": trained(kind, **options), "bag": nn.Linear(2, 2)})
    tied = nn.ModuleDict({"emb": shared["emb"], "also": shared["emb"]})
    # In both: a shared table takes part in every backward.
    one = trained("one", **options)
    ours, also = st.full_state_dict(shared), st.full_state_dict(tied)
    if dist.get_rank():
        assert ours == also == {}
        return
    plain = nn.ModuleDict({"emb": multi(**options), "bag": nn.Linear(2, 2)})
    assert list(ours) == list(plain.state_dict())
    assert ours["emb.a.weight"].dtype == plain.state_dict()["emb.a.weight"].dtype
    plain.load_state_dict(ours)
    assert all(torch.equal(also[f"also.{name}.weight"], ours[f"emb.{name}.weight"]) for name in SIZES)
    # Not those from before the training, and in their places.
    close = {"rtol": 0, "atol": 1e-6 if dtype is None else 0.02}
    for name in SIZES:
        torch.testing.assert_close(plain["emb"][name].weight, one[name].weight, **close)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
def test_full_state_dict(two, kind, dtype):
    two(all_rows, kind, dtype)


def few_rows() -> Tensor:
    torch.manual_seed(4)
    # The last rank has no rows of one chunk.
    emb = st.Embedding(1, 3, process_group=dist.group.WORLD, storage_dtype=torch.bfloat16)
    return st.full_state_dict(emb).get("weight", torch.zeros(0))


def test_full_state_dict_of_fewer_rows_than_ranks(two):
    torch.manual_seed(4)
    wanted = st.Embedding(1, 3, storage_dtype=torch.bfloat16).state_dict()["weight"]
    first, second = two(few_rows)
    assert torch.equal(first, wanted)
    assert not len(second)


WRITTEN = {
    "normal_": lambda emb: nn.init.normal_(emb["c"].weight, std=0.1),
    "xavier_uniform_": lambda emb: nn.init.xavier_uniform_(emb["a"].weight),
    "mul_": lambda emb: emb["c"].weight.data.mul_(2),
    "mul_ of the first": lambda emb: emb["a"].weight.data.mul_(2),
    "copy_": lambda emb: emb["c"].weight.data.copy_(torch.arange(120.0).view(30, 4)),
    "copy_ of a row": lambda emb: emb["c"].weight.data.copy_(torch.arange(4.0)),
    "data =": lambda emb: setattr(emb["c"].weight, "data", torch.arange(120.0, dtype=torch.float64).view(30, 4)),
}


def written(kind: str) -> dict[str, float]:
    """Set rows of one feature in all processes, in the middle of training, and compare with one process."""
    found = {}
    for what, use in WRITTEN.items():
        rows = []
        for emb in (trained(kind), trained("one")):
            torch.manual_seed(7)
            with torch.no_grad():
                use(emb)
            opt = torch.optim.Adam(emb.parameters(), lr=0.1)
            sum(part.square().sum() for part in emb(ids_of(0, 0)).values()).backward()
            opt.step()
            rows.append(rows_of(emb))
        found[what] = float((rows[0] - rows[1]).abs().max())
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_rows_of_one_feature_are_set_in_all_processes(two, kind):
    for found in two(written, kind):
        assert {what: far for what, far in found.items() if far > 1e-12} == {}
