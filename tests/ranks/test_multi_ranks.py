"""A `MultiEmbedding` of several processes: the numbers of one process with the batches of all, with a vocabulary too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import speedtransfer as st
from ranks.pair import DIM, Pair, rows_of, table, told, wrap

SIZES, PADDING = {"a": 40, "b": 1, "c": 30}, {"a": -1, "b": None, "c": 2}
# Which features each rank gives a gradient in each step.
STEPS = [("ab", "ab"), ("a", "c"), ("", "b"), ("abc", "a"), ("c", "c"), ("a", "ab"), ("b", "b"), ("abc", "abc")]
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
}


def multi(kind: str = "one", has_ids: bool = False, **options: Any) -> st.MultiEmbedding:
    if has_ids:
        options |= {"vocabulary": st.Vocabulary(seed=3, max_capacity=1000), "padding_idx": PADDING}
    return table(kind, SIZES, DIM, make=st.MultiEmbedding, **options)


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

    def forward(self, place: tuple[int, int]) -> Tensor:
        step, rank = place
        rows = self.emb(ids_of(step, rank, self.emb.vocabulary is not None))
        losses = [((rows[f] - 0.3).square() * torch.arange(DIM)).sum() for f in STEPS[step][rank]]
        return sum(losses, 0 * self.scale)


def pair_of(kind: str, has_ids: bool, ddp: bool, optimizer: str, idle: str) -> Pair:
    ours, one = (Net(multi(each, has_ids, idle=idle)) for each in (kind, "one"))
    around = {"wrap": wrap} if ddp else {}
    batch = lambda step, rank: (step, rank)  # noqa: E731
    return Pair(ours, one, OPTIMIZERS[optimizer], batch=batch, loss=lambda net, place: net(place), lr=0.05, **around)


@torch.no_grad()
def read(net: Net) -> Tensor:
    """What all ids read."""
    net.eval()
    has_ids = net.emb.vocabulary is not None
    rows = [net.emb(ids_of(step, rank, has_ids)) for step in range(len(STEPS) + 1) for rank in range(2)]
    net.train()
    return torch.cat([part.reshape(-1, DIM) for found in rows for part in found.values()])


def compared(*how: Any) -> float:
    pair = pair_of(*how)
    for step in range(len(STEPS)):
        pair.backward(step)
        pair.end()
    if pair.ours.emb.vocabulary is not None:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, pair.ours.emb.vocabulary.ids())
        assert torch.equal(torch.cat(parts).unique(), pair.one.emb.vocabulary.ids().sort().values)
    return float((read(pair.ours) - read(pair.one)).abs().max())


@pytest.mark.parametrize(
    "how",
    [
        ("sharded", False, False, "adamw", "exact"),
        ("shared", False, False, "adamw", "exact"),
        ("shared", False, False, "sgd", "lazy"),
        ("replicas", False, True, "sgd", "lazy"),
        ("sharded", True, False, "sgd", "lazy"),
        ("sharded", True, True, "adamw", "lazy"),
        ("sharded", True, False, "adamw", "exact"),
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in [("sharded", False, True, "sgd", "lazy"), ("replicas", False, True, "adamw", "exact")]
        ),
    ],
    ids=str,
)
def test_training(two, how):
    assert max(two(compared, *how)) < 1e-12


def resumed(path: str) -> float:
    """Saved by all, and gone on with by all and by one."""
    how = ("sharded", True, False, "adamw", "exact")
    pair, loaded = pair_of(*how), pair_of(*how)
    for step in range(5):
        pair.backward(step)
        pair.end()
    st.save_checkpoint(path, pair.ours, pair.opt)
    st.load_checkpoint(path, loaded.ours, loaded.opt)
    st.load_checkpoint(path, loaded.one, loaded.one_opt)
    for each in (pair, loaded):
        for step in range(5, len(STEPS)):
            each.backward(step)
            each.end()
    wanted = read(pair.one)
    return max(float((read(net) - wanted).abs().max()) for net in (pair.ours, loaded.ours, loaded.one))


def test_a_checkpoint(two, tmp_path):
    assert max(two(resumed, str(tmp_path / "saved"))) < 1e-12


def with_tickets(kind: str) -> float:
    """Look features up by tickets, all together and one alone."""

    def loss(emb: st.MultiEmbedding, ids: dict[str, Tensor]) -> Tensor:
        both, alone = emb.prefetch(ids), emb["a"].prefetch(ids["a"])
        rows, found = emb(both), emb["a"](alone)
        return rows["a"].sum() + rows["c"].square().sum() + found.square().sum()

    return Pair(multi(kind), multi(), torch.optim.Adam, batch=ids_of, loss=loss).train(0, 1, 2)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_tickets(two, kind):
    assert max(two(with_tickets, kind)) < 1e-12


def wrong(has_ids: bool) -> tuple[list[str], float]:
    """One process looks an id up that there cannot be: all raise, and go on."""
    emb = multi("sharded", has_ids)
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    bad = (1 << 62) if dist.get_rank() else 0
    ids = {name: torch.tensor([0, 0]) for name in SIZES}
    uses = [
        lambda: emb({**ids, "b": torch.tensor([0, bad])}),
        lambda: emb["b"](torch.tensor([bad])),
        lambda: emb(torch.tensor([[1, bad, 2]])),
        lambda: emb.activate([torch.tensor([1]), torch.tensor([bad]), torch.tensor([1])]),
        torch.no_grad()(lambda: emb(torch.tensor([[1, bad, 2]]))),
        lambda: emb({"z" if bad else "b": torch.tensor([0])}),
    ]
    said = [told(use) for use in uses]
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


def trained(kind: str, **options: Any) -> Pair:
    # Rows that miss steps catch up in all processes together, where they share memory.
    loss = lambda emb, ids: sum(rows.sum() for rows in emb(ids).values())  # noqa: E731
    pair = Pair(
        multi(kind, **options), multi(**options), torch.optim.Adam, batch=lambda step, _: ids_of(step, 0), loss=loss
    )
    for step in range(3):
        pair.backward(step)
        pair.end()
    return pair


def all_rows(kind: str, dtype: torch.dtype | None) -> None:
    options = {"storage_dtype": dtype, "dtype": torch.float32}
    pair = trained(kind, **options)
    model = nn.ModuleDict({"emb": pair.ours, "bag": nn.Linear(2, 2), "also": pair.ours})
    ours = st.full_state_dict(model)
    if dist.get_rank():
        assert ours == {}
        return
    plain = nn.ModuleDict({"emb": multi(**options), "bag": nn.Linear(2, 2), "also": multi(**options)})
    assert list(ours) == list(plain.state_dict())
    assert ours["emb.a.weight"].dtype == plain.state_dict()["emb.a.weight"].dtype
    plain.load_state_dict(ours)
    assert all(torch.equal(ours[f"also.{name}.weight"], ours[f"emb.{name}.weight"]) for name in SIZES)
    # Not those from before the training, and in their places.
    close = {"rtol": 0, "atol": 1e-6 if dtype is None else 0.02}
    for name in SIZES:
        torch.testing.assert_close(plain["emb"][name].weight, pair.one[name].weight, **close)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
def test_full_state_dict(two, kind, dtype):
    two(all_rows, kind, dtype)


def few_rows() -> None:
    # The last rank has no rows of one chunk.
    ours, one = (table(kind, 1, DIM, dtype=torch.float32, storage_dtype=torch.bfloat16) for kind in ("sharded", "one"))
    found = st.full_state_dict(ours)
    assert not found if dist.get_rank() else torch.equal(found["weight"], one.state_dict()["weight"])


def test_full_state_dict_of_fewer_rows_than_ranks(two):
    two(few_rows)


NUMBERS = torch.arange(120.0, dtype=torch.float64).view(30, DIM)
WRITTEN = {
    "normal_": lambda emb: nn.init.normal_(emb["c"].weight, std=0.1),
    "mul_": lambda emb: emb["a"].weight.data.mul_(2),
    "copy_ of a row": lambda emb: emb["c"].weight.data.copy_(NUMBERS[0]),
    "data =": lambda emb: setattr(emb["c"].weight, "data", NUMBERS.clone()),
}


def written(kind: str) -> dict[str, float]:
    """Set rows of one feature in all processes, in the middle of training, and compare with one process."""
    found = {}
    for what, use in WRITTEN.items():
        pair = trained(kind)
        for emb in (pair.ours, pair.one):
            torch.manual_seed(7)
            with torch.no_grad():
                use(emb)
        pair.backward(0)
        pair.end()
        found[what] = float((rows_of(pair.ours) - rows_of(pair.one)).abs().max())
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_rows_of_one_feature_are_set_in_all_processes(two, kind):
    for found in two(written, kind):
        assert {what: far for what, far in found.items() if far > 1e-12} == {}
