"""Device numbers: what one device can show of them, and two devices where there are two."""

import pytest
import torch
from cases import one_line

import speedtransfer as st
from gpu.tools import ENGINES, check_same, hold, pinned, store_in, table_in
from speedtransfer.engines import MappedEngine
from speedtransfer.errors import DeviceError

MEMORIES = ["pinned", "pageable", "mmap", "device"]


class TestOneDevice:
    @pytest.mark.parametrize("name", ["cuda", 0, torch.device("cuda"), None], ids=repr)
    def test_ways_to_name_it(self, name):
        with torch.cuda.device(0):
            table = st.Table(4, 2, device=name)
            assert table.device == torch.device("cuda", 0)
            assert table.gather([1]).device == torch.device("cuda", 0)
            emb = st.Embedding(4, 2, device="cuda:0" if name is None else name)
            assert emb.weight.device == torch.device("cuda", 0)
            assert emb(torch.tensor([1])).device == torch.device("cuda", 0)

    @pytest.mark.parametrize("memory", MEMORIES)
    def test_one_too_many(self, tmp_path, memory):
        count = torch.cuda.device_count()
        message = rf"device is 'cuda:{count}' but this process sees {count} CUDA devices; pass 'cuda:{count - 1}'"
        with pytest.raises(DeviceError, match=message) as error:
            table_in(memory, tmp_path, 4, 2, torch.device("cuda", count))
        one_line(error)
        with pytest.raises(DeviceError, match=message):
            st.Embedding(4, 2, device=count)
        with pytest.raises(DeviceError, match=message):
            st.Table(4, 2).to(f"cuda:{count}")
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def other():
    """A second device, which is not the current one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices; there is {count}")
    return torch.device("cuda", 1)


class TestTwoDevices:
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_a_table_of_the_one_that_is_not_current(self, other, tmp_path, memory):
        with torch.cuda.device(0):
            table = table_in(memory, tmp_path, 1000, 12, other).normal_()
            content, index = table.torch().cpu().clone(), torch.randperm(1000)[:500]
            for given in (index, index.to(other), index.to("cuda:0")):
                rows = table.gather(given)
                assert rows.device == other
                check_same([rows], [content[index]])
            table.scatter(index.to(other), rows * 2)
            content[index] *= 2
            check_same([table.torch()], [content])
            assert torch.cuda.current_device() == 0

    @pytest.mark.parametrize("name", ENGINES)
    def test_order_between_its_streams(self, other, tmp_path, name):
        engine = ENGINES[name](other)
        plane = store_in("device" if name == "reference" else "pinned", other, tmp_path)(torch.zeros(64, 9))
        index, rows, out = (
            torch.arange(64, device=other),
            torch.zeros(64, 9, device=other),
            torch.ones(64, 9, device=other),
        )
        one, two = torch.cuda.Stream(other), torch.cuda.Stream(other)
        torch.cuda.synchronize(other)
        with torch.cuda.stream(one):
            hold(one, 50)
            rows.fill_(5)
            engine.scatter([plane], index, [rows])
        with torch.cuda.stream(two):
            engine.gather([plane], index, [out])
        two.synchronize()
        assert out.eq(5).all()

    def test_one_page_locked_plane_for_both(self, other, device):
        plane, index = pinned(torch.zeros(100, 8)), torch.arange(100)
        engines = [MappedEngine(device), MappedEngine(other)]
        for step, engine in enumerate(engines * 3):
            rows = torch.zeros(100, 8, device=engine.device)
            engine.gather([plane], index.to(engine.device), [rows])
            engine.scatter([plane], index.to(engine.device), [rows + 1])
            engine.wait()
            assert plane.eq(step + 1).all()

    @pytest.mark.parametrize("memory", MEMORIES)
    def test_a_table_moves(self, other, device, tmp_path, memory):
        table = table_in(memory, tmp_path, 100, 8, device).normal_()
        content = table.torch().cpu().clone()
        table.to(other)
        assert table.gather([5]).device == other
        check_same([table.gather(range(100))], [content])
        table.to(device)
        check_same([table.gather(range(100))], [content])

    @pytest.mark.parametrize("memory", MEMORIES)
    def test_an_embedding_trains(self, other, tmp_path, memory):
        kwargs = {"path": tmp_path / "rows.npy"} if memory == "mmap" else {}
        emb = st.Embedding(100, 8, idle="lazy", memory=memory, device=other, **kwargs)
        before = emb.table.torch().cpu().clone()
        opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
        for ids in (torch.tensor([3, 5]), torch.tensor([5, 7], device=other)):
            opt.zero_grad()
            emb(ids).sum().backward()
            opt.step()
        changed = (emb.table.torch().cpu() != before).any(dim=1).nonzero().flatten()
        assert changed.tolist() == [3, 5, 7]
