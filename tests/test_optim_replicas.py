"""Tables under ``DistributedDataParallel``: refused by name where replicas would drift apart, else exactly as without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


class Net(nn.Module):
    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.sides = nn.ModuleDict({"user": nn.Sequential(emb, nn.Linear(4, 1))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.sides["user"](ids).sum()


def frozen(seed: int, **options) -> st.Embedding:
    torch.manual_seed(seed)
    return st.Embedding(10, 4, _freeze=True, **options)


def both_ranks(rank: int, folder: str) -> None:
    """What each of two processes does: what it sees is checked in the tests below."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    said = {}

    def attempt(name: str, act) -> None:
        try:
            said[name] = act()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def train(name: str, model: nn.Module, steps: int = 3) -> None:
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(steps):
            opt.zero_grad()
            model(torch.tensor([rank + step, 7])).backward()
            opt.step()
        said[name] = [*model.module.sides["user"][1].weight.flatten().tolist()]

    attempt("plain", lambda: str(DistributedDataParallel(Net(st.Embedding(10, 4)))))
    net = Net(st.EmbeddingBag(10, 4))
    net._ddp_params_and_buffers_to_ignore = ["sides.user.0.weight"]
    attempt("ignored", lambda: str(DistributedDataParallel(module=net, find_unused_parameters=True)))
    attempt("itself", lambda: str(DistributedDataParallel(st.Embedding(10, 4))))
    attempt("other rows", lambda: str(DistributedDataParallel(Net(frozen(rank)))))
    attempt("other codes", lambda: str(DistributedDataParallel(Net(frozen(rank, storage_dtype=torch.int8)))))
    dense = DistributedDataParallel(Net(nn.Embedding.from_pretrained(frozen(3).state_dict()["weight"].clone())))
    ours = DistributedDataParallel(Net(frozen(3)))
    ours.load_state_dict(dense.state_dict())
    train("dense", dense)
    train("ours", ours)
    ours.module.sides["user"][0].weight.requires_grad_(True)
    attempt("unfrozen", lambda: train("unfrozen", ours))
    small = dist.new_group([0]), dist.new_group([1])
    attempt("alone", lambda: len(str(DistributedDataParallel(Net(st.Embedding(10, 4)), process_group=small[rank]))) > 0)
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict]:
    """What two processes have seen."""
    folder = tmp_path_factory.mktemp("ranks")
    code = "import sys, test_optim_replicas as t; t.both_ranks(int(sys.argv[1]), sys.argv[2])"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(st.__file__).parents[1])])
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(folder)], env={**os.environ, "PYTHONPATH": paths})
        for rank in range(2)
    ]
    try:
        assert [rank.wait() for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_trained_table_is_refused_by_name(said) -> None:
    for rank in said:
        for case in ("plain", "ignored"):
            assert rank[case] == (
                "InvalidValueError: DistributedDataParallel was given a model with the table 'sides.user.0', which it cannot "
                "keep equal in all processes: each would train rows of its own; train in one process, use "
                "torch.nn.Embedding there, or freeze the table with weight.requires_grad_(False)"
            )
        assert "with the table (the model itself), which it cannot keep equal" in rank["itself"]


@pytest.mark.parametrize("case", ["other rows", "other codes"])
def test_frozen_tables_with_other_rows_are_refused(said, case: str) -> None:
    for rank in said:
        assert rank[case].startswith(
            "InvalidValueError: the rows of the frozen table 'sides.user.0' are not the same in"
        )


def test_frozen_tables_with_the_same_rows_train_the_rest(said) -> None:
    assert said[0]["ours"] == said[1]["ours"] == said[0]["dense"]


def test_a_frozen_table_stays_frozen(said) -> None:
    for rank in said:
        assert rank["unfrozen"].startswith("OptimizerError: the table 'sides.user.0' was frozen when")


def test_a_group_of_one_process_within_more(said) -> None:
    assert [rank["alone"] for rank in said] == [True, True]


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_one_process_trains_as_without(one_process, idle: str) -> None:
    results = []
    for wrap in (DistributedDataParallel, lambda net: net):
        torch.manual_seed(0)
        net = Net(st.Embedding(10, 4, idle=idle))
        model = wrap(net)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            opt.zero_grad()
            model(torch.tensor([step, 7])).backward()
            opt.step()
        results.append(net.state_dict())
    assert list(results[0]) == list(results[1])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_models_without_tables_are_none_of_our_business(one_process) -> None:
    keep = st.Embedding(10, 4)  # there is a table, elsewhere
    model = DistributedDataParallel(Net(nn.Embedding(10, 4)))
    model(torch.tensor([1])).backward()
    assert model.module.sides["user"][0].weight.grad is not None
    assert not hasattr(model.module, "_ddp_params_and_buffers_to_ignore")
    with pytest.raises(TypeError, match="module"):
        DistributedDataParallel()
    del keep
