"""All rows of a `MultiEmbedding` of several processes: those of one process, or an error of ours in whoever asks alone."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st
from ranks.small import told

SIZES = {"user": 30, "item": 9}
IDS = {"user": torch.tensor([1, 29, 1]), "item": torch.tensor([8, 0])}


def multi(kind: str = "one", **options) -> st.MultiEmbedding:
    if kind != "one":
        options["process_group"] = dist.group.WORLD
    if kind == "shared":
        options["memory"] = "shared"
    torch.manual_seed(4)
    return st.MultiEmbedding(SIZES, 4, **options)


def trained(kind: str, **options) -> st.MultiEmbedding:
    emb = multi(kind, **options)
    # Rows that miss steps catch up in all processes together, where they share memory.
    opt = torch.optim.Adam(emb.parameters(), lr=0.1)
    for _ in range(3):
        sum(rows.sum() for rows in emb(IDS).values()).backward()
        opt.step()
        opt.zero_grad()
    return emb


ALONE = {
    "state_dict": lambda emb: emb.state_dict(),
    "state dict of a feature": lambda emb: emb["item"].state_dict(),
    "weight": lambda emb: emb["user"].weight.detach().clone(),
    "product": lambda emb: emb["item"].weight @ torch.ones(4),
    "write to a row": lambda emb: emb["item"].weight.data.__setitem__(0, 7.0),
    "to_dense": st.to_dense,
    "to_dense of embeddings": lambda emb: st.to_dense(
        nn.Sequential(st.Embedding(9, 2, process_group=emb.group), nn.ReLU())
    ),
    "to_dense of bags": lambda emb: st.to_dense(st.EmbeddingBag(9, 2, process_group=emb.group)),
}


def asked(kind: str) -> tuple[dict[str, str], bool]:
    emb, mine = trained(kind), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    emb.group = mine
    before = emb.table.gather(torch.arange(39)).clone()
    # In rank 0 alone, whom the others do not wait for.
    found = {what: told(lambda use=use: use(emb)) for what, use in ALONE.items()} if dist.get_rank() == 0 else {}
    return found, torch.equal(emb.table.gather(torch.arange(39)), before)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_one_process_alone_is_refused(two, kind):
    (found, same), (_, also_same) = two(asked, kind)
    assert same
    assert also_same
    for what, said in found.items():
        assert re.match("(InvalidTypeError|InvalidValueError): .*processes", said), (what, said)


def all_rows(kind: str, dtype: torch.dtype | None) -> bool:
    shared = nn.ModuleDict({"emb": trained(kind, storage_dtype=dtype), "bag": nn.Linear(2, 2)})
    tied = nn.ModuleDict({"emb": shared["emb"], "also": shared["emb"]})
    # In both: a shared table takes part in every backward.
    one = trained("one", storage_dtype=dtype)
    ours, also = st.full_state_dict(shared), st.full_state_dict(tied)
    if dist.get_rank():
        return ours == also == {}
    plain = nn.ModuleDict({"emb": multi(storage_dtype=dtype), "bag": nn.Linear(2, 2)})
    assert list(ours) == list(plain.state_dict())
    assert ours["emb.user.weight"].dtype == plain.state_dict()["emb.user.weight"].dtype
    plain.load_state_dict(ours)
    assert all(torch.equal(also[f"also.{name}.weight"], ours[f"emb.{name}.weight"]) for name in SIZES)
    # Not those from before the training, and in their places.
    close = {"rtol": 0, "atol": 1e-6 if dtype is None else 0.02}
    for name in SIZES:
        torch.testing.assert_close(plain["emb"][name].weight, one[name].weight, **close)
    return True


@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.int8])
def test_full_state_dict(two, kind, dtype):
    assert two(all_rows, kind, dtype) == [True, True]


def few_rows(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(4)
    # The last rank has no rows of one chunk.
    emb = st.Embedding(1, 3, process_group=dist.group.WORLD, storage_dtype=dtype)
    return st.full_state_dict(emb).get("weight", torch.zeros(0))


def test_full_state_dict_of_fewer_rows_than_ranks(two):
    torch.manual_seed(4)
    wanted = st.Embedding(1, 3, storage_dtype=torch.bfloat16).state_dict()["weight"]
    first, second = two(few_rows, torch.bfloat16)
    assert torch.equal(first, wanted)
    assert not len(second)


def read_ahead(columns: bool) -> tuple[float, list[bool]]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, 9, (5, 2), generator=draw) for _ in range(4)]
    given = batches if columns else [dict(zip(SIZES, ids.unbind(1), strict=True)) for ids in batches]
    ours, plain = multi("sharded", idle="lazy"), multi("sharded", idle="lazy")
    opts, used = [torch.optim.SGD(emb.parameters(), lr=0.1) for emb in (ours, plain)], []
    for ahead, ids in zip(st.prefetch(given, lambda ids: {ours: ids}), given, strict=True):
        before = ours._handle.owners.exchange.traffic.calls
        for emb, of, opt in ((ours, ahead, opts[0]), (plain, ids, opts[1])):
            rows = emb(of)
            used.append(ours._handle.owners.exchange.traffic.calls - before)
            (rows.sum() if columns else sum(part.square().sum() for part in rows.values())).backward()
            opt.step()
            opt.zero_grad()
    rows = [emb.table.gather(torch.arange(39)) for emb in (ours, plain)]
    return float((rows[0] - rows[1]).abs().max()), used[::2]


@pytest.mark.parametrize("columns", [True, False])
def test_read_ahead(two, columns):
    for distance, calls in two(read_ahead, columns):
        assert distance == 0
        # Rows alone: the owners knew the ids; a lookup without makes three calls.
        assert max(calls) <= 2


def converted() -> bool:
    """A shared table stays one that processes share."""
    emb = st.Embedding(9, 2, process_group=dist.group.WORLD, memory="shared").double()
    assert torch.equal(emb.table.torch(), emb.table.gather(torch.arange(9)))
    return emb.prefetch(torch.arange(3)).is_waiting


def test_converted(two):
    # What others write unseen is not read ahead.
    assert two(converted) == [False, False]


WRITTEN = {
    "normal_": lambda emb: nn.init.normal_(emb["item"].weight, std=0.1),
    "data uniform_": lambda emb: emb["user"].weight.data.uniform_(-1, 1),
    "constant_": lambda emb: nn.init.constant_(emb["item"].weight, 0.5),
    "xavier_uniform_": lambda emb: nn.init.xavier_uniform_(emb["user"].weight),
    "kaiming_uniform_": lambda emb: nn.init.kaiming_uniform_(emb["item"].weight),
    "mul_": lambda emb: emb["item"].weight.data.mul_(2),
    "mul_ of the first": lambda emb: emb["user"].weight.data.mul_(2),
    "clamp_": lambda emb: emb["user"].weight.data.clamp_(-0.1, 0.1),
    "copy_": lambda emb: emb["item"].weight.data.copy_(torch.arange(36.0).view(9, 4)),
    "copy_ of a row": lambda emb: emb["item"].weight.data.copy_(torch.arange(4.0)),
    "data =": lambda emb: setattr(emb["item"].weight, "data", torch.arange(36.0).view(9, 4)),
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
            sum(part.square().sum() for part in emb(IDS).values()).backward()
            opt.step()
            rows.append(emb.table.gather(torch.arange(39)).clone())
        found[what] = float((rows[0] - rows[1]).abs().max())
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_rows_of_one_feature_are_set_in_all_processes(two, kind):
    for found in two(written, kind):
        assert {what: far for what, far in found.items() if far > 1e-5} == {}
