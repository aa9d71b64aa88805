"""A bad index that only the device has seen: which one is named, when, and what it leaves behind."""

import pytest
import torch

import speedtransfer as st
from gpu.tools import check_same, hold, store_in
from speedtransfer.engines import MappedEngine, make_engine
from speedtransfer.errors import RowIndexError

LATE = r" of an earlier gather \(its row is zeros\)"


@pytest.fixture(params=["pinned", "device"])
def memory(request):
    return request.param


@pytest.fixture
def store(memory, device, tmp_path):
    return store_in(memory, device, tmp_path)


@pytest.fixture(params=["mapped", "default"])
def engine(request, memory, device):
    return MappedEngine(device) if request.param == "mapped" else make_engine(memory, device)


@pytest.mark.parametrize("count", [1, 33, 1_000_000])
def test_the_first_of_many(engine, device, store, count):
    plane, rows = store(torch.randn(1000, 4)), torch.ones(count, 4, device=device)
    generator = torch.Generator().manual_seed(count)
    for _ in range(3):
        index = torch.randint(1000, (count,), generator=generator)
        bad = torch.randint(count, (1 + count // 50,), generator=generator).unique()
        index[bad] = torch.randint(1000, 2**62, (len(bad),), generator=generator)
        index[bad[::2]] *= -1
        first = int(bad[0])
        engine.gather([plane], index.to(device), [rows], check=True)
        with pytest.raises(RowIndexError, match=rf"^index\[{first}\]{LATE} is {index[first]} but .+; clamp or"):
            engine.wait()
        expected = plane.cpu()[index.clamp(0, 999)].index_fill(0, bad, 0)
        check_same([rows], [expected])
        engine.wait()  # said once


def test_the_host_does_not_wait_for_it(engine, device, store):
    plane, rows, side = store(torch.ones(10, 3)), torch.ones(2, 3, device=device), torch.cuda.Stream()
    bad, good = torch.tensor([4, 11], device=device), torch.tensor([4, 9], device=device)
    with torch.cuda.stream(side):
        engine.gather([plane], good, [rows], check=True)  # once, so that nothing is loaded or allocated below
        torch.cuda.synchronize()
        held = hold(side)
        engine.gather([plane], bad, [rows], check=True)
        engine.gather([plane], good, [rows])  # the device has not come to it
        assert not held.query()
        side.synchronize()
        with pytest.raises(RowIndexError, match=rf"^index\[1\]{LATE} is 11 "):
            engine.gather([plane], good, [rows])
        engine.gather([plane], good, [rows], check=True)
    engine.wait()
    assert rows.eq(1).all()


@pytest.mark.parametrize("look", ["torch", "flush", "zero_", "save", "to"])
def test_no_view_before_it_is_said(device, memory, tmp_path, look):
    table = st.Table(100, 8, memory=memory, device=device).fill_(1)
    table.gather(torch.tensor([100], device=device))
    arguments = {"save": [tmp_path / "t.npy"], "to": ["cpu"]}.get(look, [])
    with pytest.raises(RowIndexError, match=LATE):
        getattr(table, look)(*arguments)
    assert table.torch().eq(1).all()


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("module", [st.Embedding, st.EmbeddingBag])
def test_a_step_with_ids_out_of_range_is_not_made(device, memory, module, padding_idx):
    emb = module(100, 8, idle="lazy", memory=memory, device=device, padding_idx=padding_idx)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.1)
    before = emb.table.torch().clone()

    def step(ids):
        emb(torch.tensor(ids, device=device)).sum().backward()
        torch.cuda.synchronize()
        optimizer.step()

    with pytest.raises(RowIndexError, match=rf"^index\[3\]{LATE} is 100 "):
        step([[3, 4], [5, 100]])
    assert torch.equal(emb.table.torch(), before)
    optimizer.zero_grad()
    step([[99, 3]])
    changed = (emb.table.torch() != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [99] if padding_idx == 3 and module is st.Embedding else [3, 99]
