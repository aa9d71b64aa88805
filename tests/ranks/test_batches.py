"""Loops over batches: `equal_steps`, which all ranks leave at the same step; ids sent ahead to the owners of their rows."""

import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from cases import take_step
from torch import nn
from torch.utils.data import DataLoader

import speedtransfer as st
from ranks.pair import told, wrap
from ranks.run import on
from speedtransfer.ranks import equal_steps, ids_ahead


class Broken:
    """Batches up to an error: the one that ends a training."""

    def __init__(self, batches, raises=True):
        self.batches, self.raises = batches, raises

    def __iter__(self):
        if self.batches < 0:
            raise OSError("the disk is gone")
        return self.numbers()

    def numbers(self):
        yield from range(self.batches)
        if self.raises:
            raise OSError("the disk is gone")


def train(steps):
    """Make a step with each batch: its collective comes out wrong, or hangs, where the ranks are not at the same step."""
    seen = []
    for batch in steps:
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [dist.get_world_size()] * 3
        seen.append(batch)
    return seen


@on(3)
def test_as_many_as_the_rank_with_fewest_in_every_epoch():
    for lengths in ([0, 3, 3], [4, 3, 5]):
        steps = equal_steps(list(range(lengths[dist.get_rank()])))
        for _ in range(2):
            assert train(steps) == list(range(min(lengths)))


def catch(broken, batches, ranks):
    group, said = None if ranks is None else dist.new_group(ranks), []
    if ranks is not None and dist.get_rank() not in ranks:
        assert "not in" in told(lambda: list(equal_steps([1], group)))
        return []
    is_broken = dist.get_rank() in broken
    for _ in range(2):
        seen = []
        steps = equal_steps(Broken(batches if is_broken else 2, is_broken), group)
        said.append((seen, told(functools.partial(seen.extend, steps))))
        # All ranks are in step, and may go on.
        dist.barrier(group)
    return said


# In a group of some, the rank is named by its number among all.
@pytest.mark.parametrize(("broken", "batches", "ranks"), [([0, 2], 2, None), ([1], -1, None), ([2], 0, [1, 2])])
def test_loaders_that_raise_end_all_ranks(three, broken, batches, ranks):
    words = "the loader of rank {0} raised an error, so no rank gets another batch; rank {0} shows the error"
    seen = list(range(max(batches, 0)))
    for rank, said in enumerate(three(catch, broken, batches, ranks)):
        if rank in broken:
            assert said == [(seen, "OSError: the disk is gone")] * 2
        elif ranks is None or rank in ranks:
            assert said == [(seen, f"ProcessGroupError: {words.format(broken[-1])}")] * 2


@on(2)
def test_the_loop_may_be_left():
    """In every way that leaves it at the same step on all ranks."""
    steps = equal_steps(DataLoader(range(dist.get_rank(), 10), batch_size=1))
    assert [batch.item() - dist.get_rank() for batch in itertools.islice(steps, 3)] == [0, 1, 2]
    train([0])
    with pytest.raises(ZeroDivisionError):
        train(1 / 0 for _ in steps)
    assert len(train(steps)) == 9


@on(2)
def test_nothing_is_under_way_after_the_loop_is_left():
    """Rank 1 has told what comes by when rank 0 has left the loop."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def slow():
        yield 0
        if rank == 1:
            time.sleep(0.3)
            store.set("told", "")
        yield 1

    batches = iter(equal_steps(slow()))
    next(batches)
    batches.close()
    assert store.check(["told"])


@on(2)
def test_an_iterator_loses_no_batch():
    """As it does not begin anew."""
    first = 10 * dist.get_rank()
    steps = equal_steps(itertools.count(first))
    assert [number - first for number in itertools.islice(steps, 3)] == [0, 1, 2]
    assert [number - first for number in itertools.islice(steps, 2)] == [3, 4]
    shorter = iter(range(2 + dist.get_rank()))
    rest = equal_steps(shorter)
    assert [list(rest), list(rest), list(shorter)] == [[0, 1], [], []]
    failing = equal_steps(Broken(1).numbers() if dist.get_rank() == 0 else itertools.count())
    assert list(itertools.islice(failing, 1)) == [0]
    said = told(lambda: list(failing))
    assert "the disk is gone" in said if dist.get_rank() == 0 else "the loader of rank 0 raised an error" in said


def test_equal_steps_in_one_process():
    source = (number for number in range(3))
    assert next(iter(equal_steps(source))) == 0
    assert list(source) == [1, 2]
    with pytest.raises(OSError, match="disk"):
        list(equal_steps(Broken(1)))
    with pytest.raises(TypeError):
        len(equal_steps([1]))


# --- ids sent ahead -------------------------------------------------------------------------------------------------------

SIZES = (300, 40, 7)


class Net(nn.Module):
    def __init__(self, vocabulary=False, **options):
        super().__init__()
        torch.manual_seed(3)
        each = [{"vocabulary": st.Vocabulary(seed=n)} if vocabulary else {} for n in SIZES]
        options["process_group"] = dist.group.WORLD
        self.tables = nn.ModuleList(st.Embedding(n, 4, **options, **e) for n, e in zip(SIZES, each, strict=True))
        self.out = nn.Linear(4, 1)

    def ids_of(self, ids):
        return [(table, ids[:, i] % SIZES[i]) for i, table in enumerate(self.tables)]

    def forward(self, ids):
        return self.out(sum(table(some) for table, some in self.ids_of(ids)))


def trained(depth, options):
    """Train, with ids sent ahead if there is a `depth`; return all rows, and how many messages there were."""
    net = Net(**{name: value for name, value in options.items() if name != "repeats"})
    model = wrap(net)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    # Few ids, so that batches ahead hold rows that steps before them change.
    loader = [torch.randint(0, 30, (5, 3), generator=draw) for _ in range(8 + dist.get_rank())]
    if "repeats" in options and dist.get_rank() == 0:
        loader = [ids for ids in loader[::4] for _ in range(4)]
    batches = equal_steps(loader)
    if depth:
        batches = st.prefetch(batches, net.ids_of, depth)
    traffic = net.tables[0]._handle.owners.exchange.traffic
    before = traffic.calls
    for step, ids in enumerate(batches):
        take_step(opt, model(ids).square().sum())
        if step == 4:
            with torch.no_grad():
                net.tables[0](torch.arange(9))
    calls = traffic.calls - before
    with torch.no_grad():
        return [table.eval()(torch.arange(n)) for table, n in zip(net.tables, SIZES, strict=True)], calls


CASES = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "the same ids in several batches of a process": {"idle": "lazy", "repeats": True},
    "int8": {"storage_dtype": torch.int8, "state_dtype": torch.uint8, "idle": "lazy"},
    # Not read ahead.
    "shared": {"memory": "shared"},
    "max_norm": {"max_norm": 0.5, "idle": "lazy"},
    "vocabulary": {"vocabulary": True},
}


def each(case, room):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_ahead, "_STEP", room)
        return [trained(depth, CASES[case]) for depth in (0, 2)]


@pytest.mark.parametrize(("case", "room"), [*((case, 256) for case in CASES), ("lazy", 1), ("lazy", 7)])
def test_same_bits_in_fewer_messages(two, case, room):
    """Unless there are more ids than a message has room for."""
    for (wanted, most), (rows, calls) in two(each, case, room):
        assert all(map(torch.equal, rows, wanted))
        # Per step: three tables, three messages each, and one more for each form; ahead two and two for all.
        as_many = case in ("shared", "max_norm", "vocabulary")
        assert room < 256 or (calls == most if as_many else calls < 0.65 * most)


@on(2)
def test_messages_have_room_for_what_is_needed():
    """After batches of several sizes, one of them much larger."""
    emb = st.Embedding(20_000, 4, process_group=dist.group.WORLD)
    exchange, found = emb._handle.owners.exchange, []
    for count in (10, 3000, 3001, 500, 500, 0, 10):
        emb(emb.prefetch(torch.arange(count)))
        found.append(exchange.room_beside)
    assert found[0] == found[-1] == 256
    assert 1500 < found[1] == found[2] < 1.25 * 1600
    assert found[3] == found[4] <= 512


@on(2)
def test_nobody_waits_for_ids_ahead():
    """The first process sends its ids, the other waits until it has gone on; nobody waits for ids that come."""
    emb = st.Embedding(50, 4, process_group=dist.group.WORLD)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    first = emb.prefetch(torch.arange(5) + rank)  # makes the group for them
    if rank:
        store.wait(["gone on"])
    tickets = [emb.prefetch(torch.arange(n) * 2 + rank) for n in (6, 0, 9)]
    if not rank:
        store.set("gone on", "1")
    assert [emb(ticket).shape for ticket in (first, *tickets)] == [(n, 4) for n in (5, 6, 0, 9)]
    store.delete_key("gone on")
