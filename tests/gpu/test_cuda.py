"""speedtransfer.cuda where there is a device: page-locked memory, views of it, streams, kernels."""

import gc
import subprocess
import sys

import pytest
import torch

import speedtransfer as st
from gpu.tools import embedding_in, hold
from speedtransfer import cuda
from speedtransfer.cuda.status import load_cupy
from speedtransfer.errors import DeviceError, HostMemoryError, InvalidTypeError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex128]


@pytest.fixture(params=["alloc", "register"])
def _way(request, monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_PINNED", request.param)


@pytest.mark.usefixtures("_way")
class TestPinnedEmpty:
    @pytest.mark.parametrize("num_bytes", [0, 1, 199, 4096, (1 << 20) + 1])
    def test_exact_size(self, device, num_bytes):
        memory = cuda.pinned_empty(num_bytes, device)
        assert (memory.shape, memory.dtype, memory.device.type) == ((num_bytes,), torch.uint8, "cpu")
        memory.fill_(7)
        assert memory.eq(7).all()
        assert num_bytes == 0 or memory.is_pinned()

    def test_memory_lives_until_a_queued_copy_is_done(self, device):
        memory = cuda.pinned_empty(1 << 20, device).fill_(7)
        there = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        torch.cuda._sleep(100_000_000)
        there.copy_(memory, non_blocking=True)
        del memory
        gc.collect()
        assert there.eq(7).all()

    def test_too_much(self, device):
        with pytest.raises(HostMemoryError) as error:
            cuda.pinned_empty(1 << 46, device)
        for part in ("70.4 TB", str(1 << 46), "likely limit", "memory='pageable'", "memory='mmap'"):
            assert part in str(error.value)
        assert torch.ones(3, device=device).sum() == 3  # CUDA is none the worse
        assert len(cuda.pinned_empty(8, device)) == 8

    def test_leaving_python_is_silent(self):
        code = (
            "import torch; from speedtransfer import cuda as d;"
            "memory = d.pinned_empty(1 << 20); view = d.mapped_view(memory); view.fill_(3);"
            "import builtins; builtins.kept = [memory, view]"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestMappedView:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_same_memory(self, device, dtype):
        memory = cuda.pinned_empty(12 * dtype.itemsize, device).fill_(1)
        host = memory.view(dtype).view(3, 4)
        view = cuda.mapped_view(host, device)
        assert (view.dtype, view.device, view.shape) == (dtype, device, host.shape)
        assert view.data_ptr() == host.data_ptr()
        assert torch.equal(view.cpu().view(torch.uint8), host.view(torch.uint8))
        view.zero_()
        torch.cuda.current_stream().synchronize()
        assert memory.eq(0).all()
        memory.fill_(1)
        assert torch.equal(view.cpu().view(torch.uint8), host.view(torch.uint8))

    def test_strides(self, device):
        host = cuda.pinned_empty(4 * 60, device).view(torch.float32).copy_(torch.arange(60)).view(6, 10)[1:, 2:7]
        view = cuda.mapped_view(host, device)
        assert view.stride() == (10, 1)
        assert torch.equal(view.cpu(), host)

    def test_keeps_the_memory(self, device):
        view = cuda.mapped_view(cuda.pinned_empty(1 << 20, device).fill_(9), device)
        gc.collect()
        assert view.eq(9).all()


class TestToCupy:
    def test_same_memory(self, device):
        tensor = torch.arange(6, dtype=torch.float32, device=device, requires_grad=True)
        array = cuda.to_cupy(tensor)
        assert array.data.ptr == tensor.data_ptr()
        assert (array.shape, array.dtype.name) == ((6,), "float32")
        with cuda.torch_stream(device):
            array *= 2
        assert tensor.tolist() == [0, 2, 4, 6, 8, 10]

    def test_sees_what_torch_has_queued(self, device):
        tensor, side = torch.zeros(1000, device=device), torch.cuda.Stream()
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            tensor.fill_(1)
            array = cuda.to_cupy(tensor)
        assert float(array.sum()) == 1000

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
    def test_dtypes_that_cupy_lacks(self, device, dtype):
        with pytest.raises(InvalidTypeError, match=r"which CuPy does not have; use a torch tensor, or its bits with"):
            cuda.to_cupy(torch.zeros(3, device=device).to(dtype))


class TestTorchStream:
    def test_cupy_follows_torch(self, device):
        cupy = load_cupy()
        before = cupy.cuda.get_current_stream().ptr
        for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
            with torch.cuda.stream(stream), cuda.torch_stream(device):
                assert cupy.cuda.get_current_stream().ptr == stream.cuda_stream
        assert cupy.cuda.get_current_stream().ptr == before


class TestLoadKernel:
    def test_more_shared_memory_than_there_is(self, device):
        with pytest.raises(
            DeviceError, match=r"^train_spans asks for \d+ bytes of shared memory .+ refuses \(.+\); pass"
        ):
            cuda.load_kernel("word2vec.cu", "train_spans", device, 1 << 20)
        assert torch.ones(3, device=device).sum() == 3  # CUDA is none the worse

    def test_what_does_not_compile(self, device):
        with pytest.raises(DeviceError, match=r"cannot compile no_such_kernel of rows.cu for cuda:\d+: .+; reinstall"):
            cuda.load_kernel("rows.cu", "no_such_kernel", device)


class TestDevices:
    @pytest.mark.parametrize("name", ["cuda", 0, torch.device("cuda"), None], ids=repr)
    def test_ways_to_name_it(self, name):
        with torch.cuda.device(0):
            assert st.Table(4, 2, device=name).gather([1]).device == torch.device("cuda", 0)
            emb = st.Embedding(4, 2, device="cuda:0" if name is None else name)
            assert emb.weight.device == torch.device("cuda", 0)

    @pytest.mark.parametrize("make", [st.Table, st.Embedding])
    def test_one_too_many(self, make):
        count = torch.cuda.device_count()
        with pytest.raises(DeviceError, match=rf"sees {count} CUDA devices; pass 'cuda:{count - 1}'"):
            make(4, 2, device=f"cuda:{count}")

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    @pytest.mark.parametrize("memory", ["pinned", "pageable", "mmap", "device"])
    def test_training_on_one_that_is_not_current(self, device, tmp_path, memory):
        other = torch.device("cuda", 1)
        emb = embedding_in(memory, tmp_path, other, 100, 8, idle="lazy")
        before, side = emb.table.torch().cpu().clone(), torch.cuda.Stream(other)
        opt = torch.optim.SGD(emb.parameters(), lr=1.0)
        with torch.cuda.stream(side):
            for ids in (torch.tensor([3, 5]), torch.tensor([5, 7], device=other)):
                opt.zero_grad()
                emb(ids).sum().backward()
                hold(side, 20)
                opt.step()
        before[[3, 5, 5, 7]] -= torch.tensor([1.0, 2.0, 2.0, 1.0])[:, None]
        torch.testing.assert_close(emb.table.gather(range(100)).cpu(), before)
        assert torch.cuda.current_device() == device.index
        table = emb.table.to(device)
        torch.testing.assert_close(table.gather(range(100)).cpu(), before)
