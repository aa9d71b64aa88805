"""What processes that share a vocabulary out refuse, all together: the next lookup works, and nothing hangs."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import speedtransfer as st
from ranks.small import told
from speedtransfer.vocabulary import owners_of

DIM = 4


def embedding(capacity: int = 20, options: dict | None = None, **settings) -> st.Embedding:
    vocabulary = st.Vocabulary(**{"seed": 5, **settings})
    return st.Embedding(capacity, DIM, vocabulary=vocabulary, process_group=dist.group.WORLD, **(options or {}))


def ids_of(rank: int, count: int, start: int = 0) -> Tensor:
    """Ids that a rank owns."""
    every = np.arange(start, start + 40 * count)
    return torch.from_numpy(every[owners_of(every, dist.get_world_size()) == rank][:count])


def first_of(errors: list[str], rank: int, other: str) -> None:
    """Check that `rank` says why, and others that it was that rank."""
    for each, error in enumerate(errors):
        assert error.startswith("ProcessGroupError: rank " + str(rank) if each != rank else other), errors


def bad_ids() -> tuple[list[str], bool]:
    rank, emb = dist.get_rank(), embedding()
    each = (torch.rand(3), ["a"], [[1, 2], [3]])
    errors = [told(lambda bad=bad: emb(bad if rank == 1 else torch.arange(3))) for bad in each]
    assert len(emb.vocabulary) == 0
    return errors, torch.isfinite(emb(torch.arange(5) + rank)).all().item()


def test_ids_that_are_none_on_one_rank(two):
    every, fine = zip(*two(bad_ids), strict=True)
    for errors in zip(*every, strict=True):
        first_of(errors, 1, "Invalid")
    assert all(fine)


def full(evict: str | None) -> list:
    """Rank 1 has no room for another id: of the ids that it owns more come in one batch than it has rows."""
    emb = embedding(8, evict=evict)
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    capacity = emb.vocabulary.capacity
    emb(ids_of(1, capacity)).sum().backward()
    new = ids_of(1, 3, start=10_000)
    errors = [told(lambda: emb(torch.cat([ids_of(0, 2), new])))]
    assert sorted(emb.vocabulary.ids().tolist()) == ids_of(dist.get_rank(), (2, capacity)[dist.get_rank()]).tolist()
    opt.step()
    opt.zero_grad()
    errors.append(told(lambda: emb(new).sum().backward()))
    # The gradient of the last step is still there where nothing was raised.
    errors.append(told(lambda: emb(ids_of(1, capacity))))
    return errors


def test_a_full_process_raises_in_all(two):
    for errors in zip(*two(full, None), strict=True):
        if errors[0]:
            first_of(errors, 1, "HostMemoryError")
    found = two(full, "lru")
    first_of([each[0] for each in found], 1, "HostMemoryError")
    assert [each[1] for each in found] == ["", ""]
    first_of([each[2] for each in found], 1, "HostMemoryError")


def failing_archive() -> list:
    def keep(ids: Tensor, rows: Tensor) -> None:
        if fails:
            raise OSError("the disk is full")
        kept.extend(ids.tolist())

    fails, kept = True, []
    emb = embedding(6, evict="lru", on_evict=keep)
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    for turn in range(2):
        emb(ids_of(0, 5, 1000 * turn)).sum().backward()
        opt.step()
        opt.zero_grad()
        if not turn:
            error = told(lambda: emb(ids_of(0, 5, 1000)))
            fails = False
    return [error, sorted(kept)]


def test_on_evict_that_fails_raises_in_all(two):
    found = two(failing_archive)
    first_of([each[0] for each in found], 0, "OSError")
    assert found[0][1]
    assert not found[1][1]


def out_of_step() -> list[str]:
    rank, emb = dist.get_rank(), embedding()
    emb.train(rank == 0)
    errors = [told(lambda: emb(torch.arange(4)))]
    emb.train()
    with torch.set_grad_enabled(rank == 0):
        errors.append(told(lambda: emb(torch.arange(4))))
    return [*errors, told(lambda: emb(torch.arange(4)))]


def test_modes_that_differ(two):
    for *errors, last in two(out_of_step):
        for error, words in zip(errors, ("admitting none", "without gradients"), strict=True):
            assert "the processes differ where one finds ids" in error
            assert words in error
        assert last == ""


SETTINGS = {"admit": ("always", 2), "evict": ("lru", None), "unseen": ("row", "zeros"), "initial": (0.0, 1.0)}


def settings_differ() -> list[str]:
    return [told(lambda n=n, v=v: embedding(**{n: v[dist.get_rank()]})) for n, v in SETTINGS.items()]


def test_settings_that_differ(two):
    for errors in two(settings_differ):
        for error, (name, values) in zip(errors, SETTINGS.items(), strict=True):
            assert all(f"{name}={value}" in error for value in values), error


def seeds() -> tuple[int, Tensor]:
    torch.manual_seed(dist.get_rank())
    emb = embedding(seed=None)
    return emb.vocabulary.seed, emb.eval()(torch.arange(5))


def test_the_seed_is_that_of_rank_0(three):
    found = three(seeds)
    assert {seed for seed, _ in found} == {0}
    assert all(torch.equal(rows, found[0][1]) for _, rows in found)


def refused() -> list[str]:
    group, emb = dist.group.WORLD, embedding()
    model = nn.Sequential(emb)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(4)
    emb(ids).sum().backward()
    other = st.Embedding(5, DIM, vocabulary=st.Vocabulary())
    changes = other.vocabulary.changed_since(0)
    calls = {
        "leave memory out": lambda: embedding(options={"memory": "shared"}),
        "vocabulary.copy()": lambda: st.Embedding(5, DIM, vocabulary=emb.vocabulary, process_group=group),
        "must be a speedtransfer.Vocabulary": lambda: st.Embedding(5, DIM, vocabulary=5, process_group=group),
        "begin with drawn values": lambda: embedding(options={"dtype": torch.int64}),
        "has only a part; call st.save_checkpoint": model.state_dict,
        "call vocabulary.export() in each": lambda: st.full_state_dict(model),
        "call st.save_checkpoint and st.load_checkpoint": lambda: model.load_state_dict(
            {"0.weight": torch.zeros(22, DIM)}
        ),
        "update() with changes is for a vocabulary of one process": lambda: emb.vocabulary.update(changes),
        "an id to be forgotten was looked up": lambda: emb.vocabulary.forget(ids),
        "an id occurs twice": lambda: emb.vocabulary.update(ids, torch.zeros(4, DIM)),
        "changed_since() is for": lambda: emb.vocabulary.changed_since(0),
        "drawn anew": lambda: emb.weight.data.random_(),
        "changed as a whole": lambda: emb.weight.data.mul_(2),
        "written as a whole": lambda: emb.weight.data.copy_(torch.zeros(1)),
        "is used as a whole": lambda: emb.weight.sum(),
        "is indexed": lambda: nn.functional.embedding(ids, emb.weight),
    }
    wrong = [f"{wanted!r}: {found}" for wanted, call in calls.items() if wanted not in (found := told(call))]
    opt.step()
    return wrong


def test_what_is_refused(two):
    assert two(refused) == [[], []]


def written() -> list:
    rank, emb = dist.get_rank(), embedding(options={"padding_idx": -1})
    mine = torch.arange(3) + 10 * rank
    emb.vocabulary.update(mine, torch.full((3, DIM), 1.0 + rank))
    padding = torch.tensor([-1])[rank:]
    emb.vocabulary.update(padding, torch.full((len(padding), DIM), 9.0))
    every = torch.tensor([0, 1, 2, 10, 11, 12, -1])
    emb.eval()
    rows = [emb(every)[:, 0].tolist()]
    # One that both name, and one that nobody knows.
    count = emb.vocabulary.forget([1, 11] if rank else [77, 11])
    unseen = emb.vocabulary.initial_values(np.array([1, 11]), DIM, torch.float32)
    alike = torch.equal(emb(torch.tensor([1, 11])), unseen)
    return [*rows, count, alike, len(emb.vocabulary)]


def test_rows_are_written_and_forgotten_wherever_they_are(two):
    found = two(written)
    assert found[0][:3] == found[1][:3] == [[1, 1, 1, 2, 2, 2, 9], 2, True]
    assert found[0][3] + found[1][3] == 4


def later_gradient() -> tuple[Tensor, Tensor, str, str]:
    emb = embedding(10, evict="lru")
    capacity, opt = emb.vocabulary.capacity, torch.optim.SGD(emb.parameters(), lr=0.1)
    first, mine = ids_of(0, 3), dist.get_rank() == 1
    held = emb(first if mine else first[:0])
    other = emb(ids_of(0, capacity - 3, 1000))
    error = told(lambda: emb(ids_of(0, 1, 5000)))
    other.sum().backward()
    opt.step()
    opt.zero_grad()
    # Takes rows of `other`: those of `held` are still waited for.
    emb(ids_of(0, capacity - 3, 2000)).sum().backward()
    held.sum().backward()
    opt.step()
    opt.zero_grad()
    again = told(lambda: held.sum().backward())
    return held.detach(), emb.eval()(first), error, again


def test_rows_of_a_batch_whose_gradient_comes_later_stay(two):
    (none, after, error, _), (held, same, other_error, again) = two(later_gradient)
    assert torch.equal(after, same)
    assert torch.allclose(after, held - 0.1 / 2)
    assert len(none) == 0
    assert error.startswith("HostMemoryError")
    assert other_error.startswith("ProcessGroupError")
    # Its graph is gone, as in torch.
    assert "second time" in again


class Net(nn.Module):
    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb, self.out = emb, nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids)).sum()


def replaced() -> dict:
    """An ordinary model, given a vocabulary of all processes: with ids of its rows, under DistributedDataParallel."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    plain = Net(nn.Embedding(30, DIM, padding_idx=2, dtype=torch.float64))
    one = copy.deepcopy(plain)
    with torch.no_grad():
        plain.emb.weight[2] = one.emb.weight[2] = 3.0
    st.replace_embeddings(
        plain, vocabulary=st.Vocabulary(seed=0), process_group=dist.group.WORLD, idle="lazy", min_rows=1
    )
    copied = copy.deepcopy(plain)
    model = nn.parallel.DistributedDataParallel(plain)
    opts = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, one)]
    for step in range(4):
        batches = torch.randint(0, 30, (world, 5), generator=torch.Generator().manual_seed(step))
        model(batches[rank]).backward()
        (one(batches) / world).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    every = torch.arange(30)
    plain.eval()
    copied.eval()
    first = copied.emb(every).detach()
    return {
        "same": torch.allclose(plain.emb(every), one.emb(every)),
        "copied": torch.equal(first, copied.emb(every)) and not torch.equal(first, plain.emb(every)),
        "copied ids": sorted(copied.emb.vocabulary.ids().tolist()) == sorted(plain.emb.vocabulary.ids().tolist()),
        "rows": plain.emb.vocabulary.rows(every).tolist(),
        "parts": f"rank {rank} of {world}" in repr(plain),
    }


def test_a_model_with_rows_and_its_copy(two):
    found = two(replaced)
    for each in found:
        assert each["same"]
        assert each["copied"]
        assert each["copied ids"]
        assert each["parts"]
    mine, theirs = (each["rows"] for each in found)
    # The id of padding is known to all, each other one to one.
    assert [a >= 0 for a in mine] == [b < 0 or id == 2 for id, b in enumerate(theirs)]
    assert len({max(a, b) for a, b in zip(mine, theirs, strict=True)}) == 30
