"""Every optimizer of torch.optim trains a table as it trains ``nn.Embedding``, idle rows apart: weights, state, scalars."""

from __future__ import annotations

import math

import pytest
import torch
from lazy_oracle import LAZY, LazyOracle, Twins, assert_same, assert_same_weights, skewed_batches, squared_loss
from optimizer_cases import BASE, CASES, FOREACH, FUSED, LOOP, ONCE, OptimizerCase, case_named, some
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer


def ids_of(case: object) -> str:
    return str(case)


# Bit-equal: 16 columns fill whole vector registers, so no kernel treats a row differently for its place in the array.
@pytest.mark.parametrize("case", some(CASES, ONCE), ids=ids_of)
def test_thirty_skewed_steps_equal_the_oracle(case: OptimizerCase) -> None:
    twins = Twins(case.make)
    twins.train(twins.batches(30))
    twins.assert_same()
    assert set(twins.opt.state[twins.ours.weight]) == {*case.planes, *case.shared}
    assert set(twins.ours.table.planes) == {"weight", *case.planes}
    never = twins.num_rows - 1
    torch.manual_seed(3)
    assert torch.equal(twins.ours.table.torch()[never], torch.randn(twins.num_rows, twins.dim)[never])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "adagrad-initial", "nadam-foreach", "adam-fused"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    case = case_named(name)
    eps = {"eps": 1e-4} if "eps" in case.make([nn.Parameter(torch.zeros(1))]).defaults else {}  # 1e-8 is 0 in float16
    # 64 halves fill the registers; scalar tails round once more.
    twins = Twins(lambda params: case.make(params, **eps), dim=64, dtype=dtype)
    twins.train(twins.batches(8))
    twins.assert_same()


SCHEDULES = {
    "step": lambda opt: lr_scheduler.StepLR(opt, step_size=4, gamma=0.5),
    "from-zero": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(step / 6, 1.0)),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=10),
}


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", some(BASE), ids=ids_of)
def test_schedulers(case: OptimizerCase, schedule: str) -> None:
    twins = Twins(case.make)
    schedulers = [SCHEDULES[schedule](opt) for opt in twins.optimizers]
    twins.train(twins.batches(12), *schedulers)
    twins.assert_same()


def test_momentum_switched_on_later_brings_its_plane() -> None:
    twins = Twins(case_named("sgd").make)
    batches = twins.batches(20)
    twins.train(batches[:5])
    for opt in twins.optimizers:
        opt.param_groups[0]["momentum"] = 0.9
    twins.train(batches[5:])
    twins.assert_same()


# --- models -------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two embeddings, a bag and dense layers: a small recommender."""

    def __init__(self, library: object) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.user = library.Embedding(41, 16)  # type: ignore[attr-defined]
        self.item = library.Embedding(29, 16, padding_idx=0)  # type: ignore[attr-defined]
        self.tags = library.EmbeddingBag(23, 16, mode="sum")  # type: ignore[attr-defined]
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.head(self.user(user) * self.item(item) + self.tags(tags)).square().mean()

    def tables(self) -> list[nn.Module]:
        return [self.user, self.item, self.tags]


def model_batches(steps: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)

    def draw(rows: int, *shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=generator) ** 2 * (rows - 1)).long()

    return [(draw(41, 12), draw(29, 12), draw(23, 12, 3)) for _ in range(steps)]


def groups(model: Model) -> list[dict[str, object]]:
    return [
        {"params": [model.user.weight, *model.head.parameters()]},
        {"params": [model.item.weight], "lr": 0.01, "weight_decay": 0.2},
        {"params": [model.tags.weight], "lr": 0.003},
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adam-fused", "sgd-momentum-foreach", "adagrad", "adamax"])
@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "three-groups"])
def test_a_whole_model_in_one_optimizer(name: str, grouped: bool) -> None:
    case = case_named(name)
    ours, dense = Model(LAZY), Model(nn)
    opt = case.make(groups(ours) if grouped else ours.parameters(), lr=0.02)
    oracle = LazyOracle(case.make(groups(dense) if grouped else dense.parameters(), lr=0.02), *dense.tables())
    for batch in model_batches(15):
        opt.zero_grad()
        oracle.zero_grad()
        assert torch.equal(ours(*batch), dense(*batch))
        ours(*batch).backward()
        dense(*batch).backward()
        opt.step()
        oracle.step()
    for our_module, dense_module in zip(ours.tables(), dense.tables(), strict=True):
        assert_same(opt, our_module, oracle, dense_module)
    for ours_param, dense_param in zip(ours.head.parameters(), dense.head.parameters(), strict=True):
        assert torch.equal(ours_param, dense_param)


def test_the_numbers_are_those_written_here() -> None:
    """Two steps of SGD with momentum by hand: row 1 in both, row 0 in the first, row 3 in the second, row 2 in none."""
    emb = speedtransfer.Embedding.from_pretrained(torch.zeros(4, 1), freeze=False, idle="lazy")
    opt = torch.optim.SGD([emb.weight], lr=1.0, momentum=0.5)
    for ids in ([0, 1, 1], [1, 3]):
        opt.zero_grad()
        emb(torch.tensor(ids)).sum().backward()
        opt.step()
    assert emb.table.torch().flatten().tolist() == [-1.0, -2.0 - (0.5 * 2 + 1), 0.0, -1.0]
    assert opt.state[emb.weight]["momentum_buffer"].flatten().tolist() == [1.0, 2.0, 0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_long_sweep_in_every_memory(cases: tuple[OptimizerCase, ...], memory: str, tmp_path) -> None:
    for case in cases:
        (tmp_path / case.name).mkdir()
        long_sweep(case, memory, tmp_path / case.name)


def long_sweep(case: OptimizerCase, memory: str, tmp_path) -> None:
    path = tmp_path / "rows.npy" if memory == "mmap" else None
    torch.manual_seed(11)
    ours = speedtransfer.Embedding(203, 32, memory=memory, path=path, idle="lazy")
    torch.manual_seed(11)
    dense = nn.Embedding(203, 32)
    opt, oracle = case.make([ours.weight]), LazyOracle(case.make([dense.weight]), dense)
    schedulers = [
        lr_scheduler.LambdaLR(o, lambda step: 0.5 + 0.5 * math.cos(step / 30)) for o in (opt, oracle.optimizer)
    ]
    for ids, target in skewed_batches(203, 32, 200, size=48):
        opt.zero_grad()
        oracle.zero_grad()
        squared_loss(ours(ids), target).backward()
        squared_loss(dense(ids), target).backward()
        opt.step()
        oracle.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same(opt, ours, oracle, dense)
    if path is not None:
        ours.table.flush()
        assert_same_weights(speedtransfer.Embedding.from_pretrained(speedtransfer.Table.load(path).torch()), dense)


def test_a_gradient_by_hand_of_other_ids_than_those_that_were_looked_up() -> None:
    """The step reads their rows: those of the lookup are other rows."""
    emb = speedtransfer.Embedding(10, 2, memory="pageable", idle="lazy")
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    for _ in range(2):
        wanted = emb.table.gather(torch.arange(10))
        wanted[5:7] -= 1
        active = emb.activate(torch.tensor([1, 2]))
        active.ids = torch.tensor([5, 6])
        active.add_grad(torch.ones(2, 2))
        opt.step()
        opt.zero_grad()
        assert torch.equal(emb.table.gather(torch.arange(10)), wanted)
