"""What is refused while a CUDA graph is captured, and what tables keep for replays; the captures are pretended."""

import os
import warnings

import pytest
import torch

import speedtransfer as st
from speedtransfer.cuda import graphs, launch, memory
from speedtransfer.errors import DeviceError
from speedtransfer.optim import find_handle

IDS = torch.tensor([1, 5, 5, 2])


@pytest.fixture
def capturing(monkeypatch):
    """Say whether the current stream is being captured."""

    def say(now):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now)

    return say


def trained(idle="lazy", steps=2, **options):
    """Return an embedding that pretends to be one whose rows the device moves, and its optimizer."""
    emb = st.Embedding(10, 4, device="cpu", idle=idle, **options)
    optimizer = torch.optim.AdamW(emb.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        emb(IDS).sum().backward()
        optimizer.step()
    emb.table._engine.takes_padding = True
    return emb, optimizer


class TestCaptures:
    def test_without_cuda_there_are_none(self):
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError):
                torch.cuda.is_current_stream_capturing()
        assert not graphs.is_capturing()
        assert graphs.capture_number() is None
        graphs.check_not_capturing("this")

    def test_each_has_a_number(self, capturing, monkeypatch):
        class Graph:
            begun, replays = (), 0

            def capture_begin(self, *args, **kwargs):
                self.begun = args, kwargs

            def capture_end(self):
                if not self.begun:
                    raise RuntimeError("there is none")

            def replay(self):
                self.replays += 1

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        graphs.count_graphs.cache_clear()
        for _ in range(2):
            graphs.count_graphs()
        one = Graph()
        one.capture_begin(1, capture_error_mode="relaxed")
        assert one.begun == ((1,), {"capture_error_mode": "relaxed"})
        assert graphs.some_thread_captures()
        one.capture_end()
        assert not graphs.some_thread_captures()
        with pytest.raises(TypeError):
            Graph.capture_begin()
        assert not graphs.some_thread_captures()
        capturing(True)
        first = graphs.capture_number()
        another = Graph()
        another.capture_begin(2)
        assert graphs.capture_number() == first + 1
        another.capture_end()
        capturing(False)
        assert graphs.capture_number() is None
        before = graphs.num_replays()
        one.replay()
        assert (one.replays, graphs.num_replays()) == (1, before + 1)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            (
                {"idle": "exact"},
                r"weight with idle='exact', where the host records steps for idle rows,.*use idle='lazy'",
            ),
            (
                {"storage_dtype": torch.int8},
                "training weight with storage_dtype or state_dtype .* random numbers again",
            ),
            ({"state_dtype": torch.uint8}, "training weight with storage_dtype or state_dtype"),
        ],
    )
    def test_rows(self, capturing, options, match):
        handle = find_handle(trained(**options)[0].weight)
        handle.check_capturable(writes=True)
        capturing(True)
        with pytest.raises(DeviceError, match=match):
            handle.check_capturable(writes=True)
        if "idle" not in options:
            handle.check_capturable(writes=False)

    def test_rows_that_the_host_moves(self, capturing):
        emb, _ = trained()
        capturing(True)
        find_handle(emb.weight).check_capturable(writes=True)
        emb.table._engine.takes_padding = False
        with pytest.raises(
            DeviceError, match=r"whose rows the host moves \(memory='pageable'\), .*use memory='pinned'"
        ):
            find_handle(emb.weight).check_capturable(writes=False)

    def test_kernels_that_nobody_has_used(self, capturing):
        capturing(True)
        with pytest.raises(
            DeviceError, match=r"first use of the kernels for this .* a few steps like it before the capture"
        ):
            launch.is_trusted("this", torch.device("cuda", 0), lambda: True)
        with pytest.raises(DeviceError, match="compiling the kernel gather_rows"):
            launch._compiled("rows.cu", "gather_rows", 77)

    def test_planes(self, capturing):
        table = st.Table(3, 2, memory="pageable", device="cpu")
        capturing(True)
        with pytest.raises(DeviceError, match="adding planes"):
            table.add_plane("more")


class TestGradientOfAGraph:
    @pytest.fixture
    def emb(self):
        """An embedding whose gradient was made by a graph."""
        emb, _ = trained()
        emb(IDS).sum().backward()
        find_handle(emb.weight).pending.capture = 1
        return emb

    def test_no_other_is_added(self, emb):
        before = emb.weight.grad.to_dense()
        with pytest.raises(DeviceError, match=r"writes at each replay, to which no other can be added; call zero_grad"):
            emb(IDS).sum().backward()
        assert torch.equal(emb.weight.grad.to_dense(), before)
        emb.weight.grad = None
        emb(IDS).sum().backward()
        assert torch.equal(emb.weight.grad.to_dense()[5], torch.full((4,), 2.0))

    def test_it_stays_as_it_is(self, emb):
        pending = find_handle(emb.weight).pending
        ids, grad = pending.ids, pending.grad
        assert emb.weight.grad.to_dense().shape == (10, 4)
        with pytest.raises(DeviceError, match=r"cannot become dense; take a dense copy \(weight.grad.to_dense\(\)\)"):
            emb.weight.grad.add_(1)
        assert pending.ids is ids
        assert pending.grad is grad

    def test_not_for_a_sparse_step(self, emb):
        with pytest.raises(DeviceError, match=r"made by a CUDA graph, .* make the embedding with sparse=False"):
            find_handle(emb.weight).pending.trim()


class TestTableOfAGraph:
    def test_its_version_grows(self, monkeypatch):
        table = st.Table(3, 2, memory="pageable", device="cpu")
        for captured in (False, True):
            table._captured = captured
            before = table.version
            monkeypatch.setitem(graphs._calls, "replay", graphs.num_replays() + 1)
            assert table.version - before == captured

    def test_memory_stays(self):
        for captured in (False, True):
            table = st.Table(3, 2, memory="pageable", device="cpu")
            table._captured = captured
            plane, engine, weight = table.add_plane("more"), table._engine, table.stored("weight")
            table.drop_plane("more")
            table.engine = "reference"
            table.take("weight", torch.zeros(3, 2))
            addresses = [part.data_ptr() for part in table._outlived if isinstance(part, torch.Tensor)]
            assert addresses == ([plane.data_ptr(), weight.data_ptr()] if captured else [])
            assert (engine in table._outlived) is captured


def test_memory_is_freed_after_the_capture(capturing):
    calls = []
    capturing(True)
    for number in range(2):
        memory._free_host(lambda n=number: calls.append(n), 0, os.getpid(), lambda: calls.append("wait"))
    assert calls == []
    capturing(False)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "on_device", lambda index: warnings.catch_warnings())
        memory._free_host(lambda: calls.append(2), 0, os.getpid(), lambda: calls.append("wait"))
    assert calls == ["wait", 2, "wait", 1, "wait", 0]
