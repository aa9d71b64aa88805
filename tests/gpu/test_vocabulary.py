"""Ids on a device find their rows there: the rows that the host would find, without a wait. Training: test_training.py."""

import contextlib
import copy

import pytest
import torch
from cases import take_step

import speedtransfer as st
from gpu.test_waits import recorded
from gpu.tools import synchronizing
from speedtransfer.vocabulary import device_map

MEMORIES = ["pinned", "device"]


def module_on(device, memory="pinned", kind=st.Embedding, **about):
    options = {name: about.pop(name) for name in ("dtype", "idle") if name in about}
    torch.manual_seed(0)
    vocabulary = st.Vocabulary(seed=3, **{"capacity": 60, "max_capacity": 400, **about})
    return kind(8, 4, vocabulary=vocabulary, memory=memory, device=device, **options)


def ids_of(step, count=24):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(3 * step, 3 * step + 30, (count,), generator=draw) * -(2**58)


def train(module, opt, ids):
    take_step(opt, module(ids).square().sum())


@contextlib.contextmanager
def waits():
    """Give a list that has every wait of the host afterwards: torch's, and where the GPU is emulated those of events too."""
    found = []
    with synchronizing("warn") as of_torch, recorded() as others:
        yield found
    found += [*of_torch, *others]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("unseen", ["initial", "zeros", "row"])
def test_evaluation_follows_training_without_a_wait(device, memory, unseen):
    """Ids come, and go, are forgotten and set; before each lookup the device learns of it."""
    module = module_on(device, memory, unseen=unseen, admit=2, evict="lru", capacity=50, max_capacity=50)
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    vocabulary = module.vocabulary
    for step in range(30):
        train(module, opt, ids_of(step))
        if step % 7 == 3:
            vocabulary.forget(ids_of(step, 3))
            vocabulary.update(torch.tensor([step, -step - 1]), torch.full((2, 4), float(step)))
        ids = torch.cat([ids_of(step + 1), torch.tensor([step, -5, 2**63 - 1])]).view(3, 9)
        there = ids.to(device)
        with torch.no_grad():
            if step == 0:
                module(there)
            with waits() as found:
                out = module(there)
            assert torch.equal(out.cpu(), module(ids).cpu())
        assert not found
    assert module.vocabulary._map._slots is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("initial", [("normal", 1.0, 0.1), ("uniform", -1.0, 0.0), 0.3], ids=str)
def test_unseen_ids_read_the_bits_of_the_host(device, dtype, initial):
    module = module_on(device, dtype=dtype, initial=initial).eval()
    ids = ids_of(0)
    wanted = module.vocabulary.initial_values(ids.numpy(), 4, dtype)
    assert torch.equal(module(ids.to(device)).cpu(), wanted)
    assert torch.equal(module(ids).cpu(), wanted)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "about", [{}, {"evict": "lru", "capacity": 45, "max_capacity": 45}, {"unseen": "row", "admit": 2}], ids=str
)
@pytest.mark.parametrize(("kind", "idle"), [(st.Embedding, "lazy"), (st.Embedding, "exact"), (st.EmbeddingBag, "lazy")])
def test_deferred_training_waits_for_the_ids_alone(device, memory, about, kind, idle):
    module = module_on(device, memory, kind, deferred=True, idle=idle, **about)
    opt = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    batches = [ids_of(step).to(device).view(4, 6) for step in range(14)]
    for ids in batches[:8]:
        train(module, opt, ids)
    torch.cuda.synchronize()
    evicted = module.vocabulary.stats().evicted
    for ids in batches[8:]:
        capacity = module.vocabulary.capacity
        with waits() as before:
            module(ids).square().sum().backward()
        with waits() as found:
            opt.step()
        with waits() as after:
            opt.zero_grad()
        assert not before
        assert not after
        # A table that grows makes the host wait.
        assert len(found) <= 1 or module.vocabulary.capacity > capacity, found
    assert (module.vocabulary.stats().evicted > evicted) == ("evict" in about)


def test_statistics_are_those_of_the_host(device):
    module = module_on(device).eval()
    module.vocabulary.update(torch.arange(4), torch.zeros(4, 4))
    for _ in range(3):
        module(torch.arange(10, device=device))
    stats = module.vocabulary.stats()
    assert (stats.lookups, stats.unseen) == (30, 18)
    module.vocabulary.reset_stats()
    module(torch.arange(3, 5, device=device))
    stats = module.vocabulary.stats()
    assert (stats.lookups, stats.unseen) == (2, 1)


def test_streams(device):
    """A lookup on one stream sees what was admitted on another, and a table made anew is not written to while one reads it."""
    module, streams = module_on(device), [torch.cuda.Stream() for _ in range(3)]
    known = 0
    for step in range(40):
        stream = streams[step % 3]
        with torch.no_grad(), torch.cuda.stream(stream):
            ids = torch.arange(known + 9, device=device)
            out = module(ids)
        module.vocabulary.update(torch.arange(known, known + 8), torch.full((8, 4), 1000.0 + step))
        wanted = torch.arange(1000, 1000 + step).repeat_interleave(8)
        stream.synchronize()
        assert out[:known, 0].tolist() == wanted.tolist()
        assert out[known:].abs().max() < 100
        known += 8


def test_a_state_that_is_loaded_and_a_move(device):
    module, ids = module_on(device), torch.arange(32, device=device)
    module(ids[:30])
    with torch.no_grad():
        expected = module(ids)
        state = {name: value.clone() for name, value in module.vocabulary.state_dict().items()}
        module.vocabulary.forget(torch.arange(10))
        module.vocabulary.update(torch.arange(50, 60), torch.zeros(10, 4))
        module(ids)
        module.vocabulary.load_state_dict(state)
        # The ids that were forgotten have their rows again, which are those of others now.
        assert torch.equal(module(ids)[10:], expected[10:])
        assert torch.equal(module(ids).cpu(), module(ids.cpu()).cpu())
        expected, there = module(ids).cpu(), copy.deepcopy(module).cpu()
        assert torch.equal(there(ids.cpu()), expected)
        assert torch.equal(there.cuda()(ids).cpu(), expected)


def test_an_index_that_is_too_large_for_the_device(device, monkeypatch):
    """The host finds the rows."""
    monkeypatch.setattr(device_map, "_SHARE", 1 << 60)
    module = module_on(device, evict="lru", capacity=50, max_capacity=50)
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        ids = ids_of(step).to(device)
        train(module, opt, module.prefetch(ids) if step % 2 else ids)
        assert torch.equal(module.eval()(ids).cpu(), module(ids.cpu()).cpu())
        module.train()


@pytest.mark.parametrize("deferred", [False, True])
def test_a_lookup_by_a_ticket_waits_for_the_ids_of_the_ticket_alone(device, deferred):
    module = module_on(device, deferred=deferred, idle="lazy", capacity=45, max_capacity=45, evict="lru")
    opt = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    batches = [ids_of(step).to(device) for step in range(14)]
    for ids in batches[:8]:
        train(module, opt, module.prefetch(ids))
    torch.cuda.synchronize()
    for ids in batches[8:]:
        with waits() as before:
            ticket = module.prefetch(ids)
        with waits() as found:
            loss = module(ticket).square().sum()
        assert not before
        assert len(found) <= (not deferred), found
        take_step(opt, loss)
