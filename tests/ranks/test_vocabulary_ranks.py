"""Vocabularies that several processes share out: the numbers of one process with the batches of all; what all refuse."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import take_step
from optimizer_cases import case_named
from torch import nn

import speedtransfer as st
from ranks.pair import DIM, Features, Pair, told
from ranks.run import on
from speedtransfer.vocabulary import owners_of
from speedtransfer.vocabulary.policies import share_of

# Padding has a row of rank 0; by the hash it would be an id of rank 1.
PADDING = -6
# Settings of a vocabulary; all others are of the module.
SETTINGS = ("admit", "unseen", "evict", "half_life", "max_capacity", "on_evict", "seed")


def embedding(capacity=60, kind=st.Embedding, shared=True, **options):
    settings = {"seed": 5} | {name: options.pop(name) for name in SETTINGS if name in options}
    if shared:
        options["process_group"] = dist.group.WORLD
    given = {"padding_idx": PADDING, "dtype": torch.float64, "idle": "lazy", **options}
    return kind(capacity, DIM, vocabulary=st.Vocabulary(**settings), **given)


def features(capacity, dim, padding_idx, **options):
    made = Features([capacity // 3] * 3, dim, [padding_idx >> 2] * 3, **options)
    made.shift = 2
    return made


class Parts(nn.Module):
    """A table in one process for the ids of each rank, which evicts as its owner does."""

    def __init__(self, world, capacity=60, max_capacity=None, **options):
        super().__init__()
        self.world = world
        if max_capacity is not None:
            options["max_capacity"] = share_of(max_capacity, world)
        parts = [embedding(share_of(capacity, world), shared=False, **options) for _ in range(world)]
        self.parts = nn.ModuleList(parts)

    def forward(self, ids):
        flat = ids.flatten()
        owners = torch.from_numpy(owners_of(flat.numpy(), self.world))
        places = [(owners == rank).nonzero().flatten() for rank in range(self.world)]
        rows = [part(flat[at]) for part, at in zip(self.parts, places, strict=True)]
        return torch.cat(rows)[torch.cat(places).argsort()].view(*ids.shape, DIM)


def batch(step, rank, ids=60, lookups=1):
    """Ids, skewed, over all 64 bits, now and then padding, now and then none; and weights of the loss."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    size = 0 if (step + rank) % 5 == 4 else lookups * (4 + rank)
    found = (torch.rand(size, 3, generator=draw) ** 2 * ids).long() * (2**57 + 1) - 2**62
    found[torch.rand(size, 3, generator=draw) < 0.15] = PADDING
    return found, torch.randn(size, 3, DIM, generator=draw, dtype=torch.float64)


def loss(emb, args, lookups=1):
    ids, weights = (each.tensor_split(lookups) for each in args)
    rows = map(emb, ids)
    return sum((row * (w.sum(1) if row.dim() == 2 else w)).sum() for row, w in zip(rows, weights, strict=True))


def export(modules, gathers):
    """Return the ids that all know, sorted, and their rows."""
    parts = [module.vocabulary.export() for module in modules]
    if gathers:
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, parts[0])
    ids, order = torch.cat([ids for ids, _ in parts]).sort()
    return ids, torch.cat([rows for _, rows in parts])[order]


def compared(pair):
    """Return how far the rows are from those of one process; the ids are the same."""
    (ids, rows), (same, wanted) = (export([pair.ours], True), export(getattr(pair.one, "parts", [pair.one]), False))
    assert torch.equal(ids, same)
    assert len(ids) > 20
    return float((rows - wanted).abs().max())


@torch.no_grad()
def evaluate(pair, step):
    """Return how far what the ids of a batch read, most of them new, is from what they read in one process."""
    batches = [pair.batch(step, rank)[0] for rank in range(dist.get_world_size())]
    found, wanted = pair.ours.eval()(batches[dist.get_rank()]), pair.one.eval()(torch.cat(batches))
    for each in (pair.ours, pair.one):
        each.train()
    wanted = wanted.split([len(batch) for batch in batches])[dist.get_rank()]
    return float((found - wanted).abs().sum())


def trained(optimizer="adamw", ids=60, steps=14, accumulate=1, lookups=1, parts=False, **options):
    """Train, with evaluations in between, and return the largest distance and the counts of what was done with ids."""
    make = torch.optim.SparseAdam if optimizer == "sparse" else lambda params, lr: case_named(optimizer).make(params)
    one = Parts(dist.get_world_size(), **options) if parts else embedding(shared=False, **options)
    how = {"batch": functools.partial(batch, ids=ids, lookups=lookups), "at_once": lookups == 1}
    pair = Pair(embedding(**options), one, make, loss=functools.partial(loss, lookups=lookups), **how)
    far = []
    for step in range(steps):
        if step % 4 == 3:
            far.append(evaluate(pair, 100 * step))
        pair.accumulate(*range(10 * step, 10 * step + accumulate))
        pair.end()
    assert pair.ours.vocabulary.clock == steps
    stats = [each.vocabulary.stats() for each in (pair.ours, *getattr(one, "parts", [one]))]
    ours, *counts = [[each.admitted, each.evicted, each.lookups, each.unseen] for each in stats]
    return max([*far, compared(pair)]), ours, counts


SPARSE = {"ids": 400, "capacity": 70, "steps": 24, "parts": True}
RUNS = {
    "exact": {"idle": "exact"},
    "momentum, exact, sparse ids": {"idle": "exact", "optimizer": "sgd-momentum", "ids": 200, "capacity": 200},
    "sightings, a row for unseen ids": {"admit": 3, "unseen": "row"},
    "sightings, zeros for unseen ids": {"admit": 2, "unseen": "zeros"},
    "bag": {"admit": 2, "kind": st.EmbeddingBag},
    "features": {"kind": features, "max_capacity": 400, "lookups": 2},
    "features, exact": {
        "kind": features,
        "max_capacity": 400,
        "lookups": 2,
        "idle": "exact",
        "optimizer": "sgd-momentum",
    },
    "max_norm": {"max_norm": 1.0},
    "sparse gradients": {"sparse": True, "optimizer": "sparse"},
    "records, no padding": {"layout": "rows", "padding_idx": None, "unseen": "row", "admit": 2},
    "two lookups, three backwards": {"lookups": 2, "accumulate": 3},
    # More of them than a number has bits.
    "many lookups": {"lookups": 70, "steps": 2},
    "used least": {**SPARSE, "evict": "lfu", "half_life": 3.0},
    "used longest ago": {**SPARSE, "evict": "lru"},
    "time to live": {"parts": True, "evict": 3, "ids": 100, "capacity": 100, "idle": "exact"},
    "grows": {"capacity": 4, "max_capacity": 70, "idle": "exact"},
    "grows, then evicts": {**SPARSE, "capacity": 20, "max_capacity": 70, "evict": "lru"},
    "grows as the memory allows": {"capacity": 4, "max_capacity": "1 MB", "ids": 200},
}
BY_THREE = {"sightings, zeros for unseen ids", "used longest ago"}
# As others of the same kind.
SLOW = {"grows as the memory allows", "records, no padding", "used least"}
CASES = [
    pytest.param(world, name, marks=[pytest.mark.slow] if name in SLOW or (world == 3 and name not in BY_THREE) else [])
    for world in (2, 3)
    for name in RUNS
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_numbers_of_one_process(pool, world, name):
    found = pool.of(world)(functools.partial(trained, **RUNS[name]))
    assert max(far for far, *_ in found) < 1e-12
    assert np.sum([ours for _, ours, _ in found], 0).tolist() == np.sum(found[0][2], 0).tolist()
    for place, setting in ((1, "evict"), (3, "admit")):
        assert setting not in RUNS[name] or all(ours[place] for _, ours, _ in found)


# --- what fails in one process fails in all ---------------------------------------------------------------------------------


def ids_of(rank, count, start=0):
    every = np.arange(start, start + 40 * count)
    return torch.from_numpy(every[owners_of(every, dist.get_world_size()) == rank][:count])


def first_of(errors, rank, other):
    """Check that `rank` says why, and others that it was that rank."""
    for each, error in enumerate(errors):
        assert error.startswith("ProcessGroupError: rank " + str(rank) if each != rank else other), errors


def full(evict):
    """Rank 1 has no room for another id: of the ids that it owns more come in one batch than it has rows."""
    emb = embedding(8, padding_idx=None, evict=evict)
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
    at_first, then, last = zip(*two(full, "lru"), strict=True)
    first_of(at_first, 1, "HostMemoryError")
    assert then == ("", "")
    first_of(last, 1, "HostMemoryError")


@on(2)
def test_on_evict_that_fails_raises_in_all():
    def keep(ids, rows):
        if fails:
            raise OSError("the disk is full")
        kept.extend(ids.tolist())

    fails, kept = True, list[int]()
    emb = embedding(6, evict="lru", on_evict=keep)
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    take_step(opt, emb(ids_of(0, 5)).sum())
    error, fails = told(lambda: emb(ids_of(0, 5, 1000))), False
    emb(ids_of(0, 5, 1000))
    assert error.startswith("ProcessGroupError: rank 0" if dist.get_rank() else "OSError"), error
    assert bool(kept) is (dist.get_rank() == 0)


@on(2)
def test_rows_are_written_and_forgotten_wherever_they_are():
    """The seed is that of rank 0."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    emb = embedding(20, padding_idx=-1, seed=None)
    emb.vocabulary.update(torch.arange(3) + 10 * rank, torch.full((3, DIM), 1.0 + rank))
    padding = torch.tensor([-1])[rank:]
    emb.vocabulary.update(padding, torch.full((len(padding), DIM), 9.0))
    emb.eval()
    assert emb(torch.tensor([0, 1, 2, 10, 11, 12, -1]))[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 9]
    # One that both name, and one that nobody knows.
    assert emb.vocabulary.forget([1, 11] if rank else [77, 11]) == 2
    unseen = emb.vocabulary.initial_values(np.array([1, 11]), DIM, torch.float64)
    assert torch.equal(emb(torch.tensor([1, 11])), unseen)
    dist.all_reduce(total := torch.tensor(len(emb.vocabulary)))
    assert (int(total), emb.vocabulary.seed) == (4, 0)


@on(2)
def test_rows_of_a_batch_whose_gradient_comes_later_stay():
    emb = embedding(10, padding_idx=None, evict="lru")
    capacity, opt = emb.vocabulary.capacity, torch.optim.SGD(emb.parameters(), lr=0.1)
    first, mine = ids_of(0, 3), dist.get_rank() == 1
    held = emb(first if mine else first[:0])
    other = emb(ids_of(0, capacity - 3, 1000))
    assert told(lambda: emb(ids_of(0, 1, 5000))).startswith("ProcessGroupError" if mine else "HostMemoryError")
    take_step(opt, other.sum())
    # Takes rows of `other`: those of `held` are still waited for.
    emb(ids_of(0, capacity - 3, 2000)).sum().backward()
    take_step(opt, held.sum())
    after, again = emb.eval()(first).detach(), told(lambda: held.sum().backward())
    # Its graph is gone, as in torch.
    assert not mine or "second time" in again
    emb.train()
    # One that has come, and was dropped, is not waited for.
    for start in (3000, 4000):
        rows = emb(ids_of(0, capacity, start))
        rows.sum().backward()
        opt.zero_grad()
    dist.broadcast(before := held.detach() if mine else torch.empty_like(after), 1)
    assert torch.allclose(after, before - 0.1 / 2)


@on(2)
def test_sightings_do_not_grow_with_each_save(tmp_path):
    """Ids are seen once, twice saved and loaded, and seen once more."""
    for number in range(3):
        emb = embedding(padding_idx=None, admit=3)
        opt = torch.optim.SGD(emb.parameters(), lr=0.1)
        if number:
            st.load_checkpoint(tmp_path / f"{number - 1}", emb, opt)
        if number != 1:
            take_step(opt, emb(ids_of(dist.get_rank(), 10)).sum())
        st.save_checkpoint(tmp_path / f"{number}", emb, opt)
    assert len(emb.vocabulary) == 0
