"""The engines on the CPU: the reference as it is; staged and mapped with the CPU in the part of the device."""

import contextlib
import mmap
import types

import numpy as np
import pytest
import torch
from cpu_kernels import cpu_kernels
from engine_cases import EngineCases, PaddingCases

from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine
from speedtransfer.engines.mapped import pack_plane
from speedtransfer.errors import DeviceError, InvalidValueError, RowIndexError


class OnCpu(EngineCases):
    @pytest.fixture
    def device(self):
        return torch.device("cpu")

    @pytest.fixture
    def store(self):
        return torch.clone


class TestReference(OnCpu):
    @pytest.fixture
    def engine(self):
        return ReferenceEngine("cpu")


class Event:
    """An event on a device that does everything at once. It notes what was asked of it."""

    def __init__(self):
        self.record_calls, self.synchronize_calls = [], 0

    def record(self, stream):
        self.record_calls.append(stream)

    def query(self):
        return not self.record_calls

    def synchronize(self):
        assert self.record_calls, "the host waits for an event that was never recorded"
        self.synchronize_calls += 1


class Stream:
    """`owned`: torch's own, as by its odd id; another has its address for an id."""

    def __init__(self, cuda_stream=0, owned=True):
        self.cuda_stream, self.waits = cuda_stream, []
        self.stream_id = 2 * cuda_stream + owned
        self.device_index = 0

    def wait_event(self, event):
        assert event.record_calls, "a stream waits for an event that was never recorded"
        self.waits.append(event)

    def synchronize(self):
        """Return at once: this device has done everything."""


@pytest.fixture
def cpu_as_cuda(monkeypatch):
    """Let the CPU play the device: what it is asked to do, it has done at once."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=2)
    )
    for engine in ("mapped", "staged"):
        monkeypatch.setattr(f"speedtransfer.engines.{engine}.resolve_cuda", lambda device, what: torch.device(device))
        monkeypatch.setattr(
            f"speedtransfer.engines.{engine}.pinned_empty",
            lambda size, device, remedy="", wait=None: torch.full((size,), 255, dtype=torch.uint8),
        )
    monkeypatch.setattr("speedtransfer.engines.mapped.require_mapped", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return stream


class TestStagedLogic(PaddingCases, OnCpu):
    @pytest.fixture(params=[16 << 20, 8192], ids=["one chunk", "many chunks"])
    def engine(self, request, cpu_as_cuda):
        return StagedEngine("cpu", buffer_bytes=request.param)

    def test_a_buffer_is_not_reused_before_its_copy_is_done(self, cpu_as_cuda):
        engine = StagedEngine("cpu", num_buffers=2, buffer_bytes=1024)
        events = [next(engine._ring)._event for _ in range(2)]
        plane, index = torch.randn(50, 8), torch.arange(50)
        engine.gather([plane], index, [torch.empty(50, 8)])  # 3 chunks of 24 rows: one buffer twice
        assert [(len(event.record_calls), event.synchronize_calls) for event in events] == [(2, 1), (1, 0)]
        engine.scatter([plane], index, [torch.randn(50, 8)])
        assert sum(len(event.record_calls) for event in events) == 6
        assert all(event.synchronize_calls >= len(event.record_calls) - 1 for event in events)
        with pytest.raises(InvalidValueError, match="num_buffers is 1 but one is filled while another crosses"):
            StagedEngine("cpu", num_buffers=1)


def sparse_plane(num_rows, dim):
    """Return a float32 plane of more memory than there is: pages that nobody writes cost nothing."""
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, num_rows * dim * 4, flags=flags)
    except (OSError, AttributeError) as error:
        pytest.skip(f"no sparse memory of 9 GB here: {error}")
    return torch.from_numpy(np.frombuffer(memory, dtype=np.float32)).view(num_rows, dim)


class TestMappedLogic(PaddingCases, OnCpu):
    @pytest.fixture(autouse=True)
    def launches(self, cpu_as_cuda, monkeypatch):
        """Run the kernels on the CPU, in one order of the threads or the other; return the names of those launched."""
        kernels, seen = cpu_kernels(), []

        def load_kernel(source_name, function_name, device):
            assert source_name == {"rows": "rows.cu", "converted": "convert.cu"}[function_name.split("_")[1]]
            return function_name

        def launch_kernel(name, blocks, threads, argument, stream):
            seen.append(name)
            kernels.launch(name, blocks, threads, argument, backwards=len(seen) % 2 == 0)

        for function in (load_kernel, launch_kernel):
            monkeypatch.setattr(f"speedtransfer.engines.mapped.{function.__name__}", function)
        return seen

    @pytest.fixture(params=[(None, 256), (1, 3), (2, 32), (3, 7)], ids=str)
    def engine(self, request):
        return MappedEngine("cpu", *request.param)

    def test_every_lane_is_read_once(self, engine):
        for width, count in [(4, 1), (4, 300), (48, 29), (512, 300), (528, 29), (3000, 300)]:
            plane, rows = (torch.zeros(n, width, dtype=torch.uint8) for n in (37, count))
            for move in (engine.gather, engine.scatter):
                move([plane], torch.arange(count) % 37, [rows])
                assert cpu_kernels().lanes_read == count * pack_plane(plane, rows)[3]

    def test_more_than_2_to_the_31_elements(self, engine):
        plane = sparse_plane(2**31 // 64 + 1000, 64)
        index = torch.tensor([len(plane) - 1, 0, 2**31 // 64, 2**30 // 64])
        rows, out = torch.randn(4, 64), torch.zeros(4, 64)
        engine.scatter([plane], index, [rows])
        assert torch.equal(plane[index], rows)
        engine.gather([plane], index, [out])
        assert torch.equal(out, rows)

    def test_all_planes_go_in_one_launch(self, launches):
        engine, index = MappedEngine("cpu"), torch.tensor([3, 1])
        planes = [torch.randn(9, width) for width in (8, 8, 1)]
        engine.gather(planes, index, [torch.zeros(2, plane.shape[1]) for plane in planes])
        assert launches == ["gather_rows"]
        halves = [planes[0].half(), *planes[1:]]
        engine.scatter(halves, index, [torch.zeros(2, plane.shape[1]) for plane in planes])
        assert launches[1:] == ["scatter_converted"]

    def test_a_row_that_does_not_exist_is_zeros_and_scattered_nowhere(self, engine):
        planes, index = [torch.randn(9, 8), torch.randn(9, 3).half()], torch.tensor([8, 9, 0, -4])
        rows = [torch.ones(4, 8), torch.ones(4, 3)]
        engine.gather(planes, index, rows, check=True)
        with pytest.raises(RowIndexError) as error:
            engine.wait()
        assert str(error.value) == (
            "index[1] of an earlier gather (its row is zeros) is 9 but the table has 9 rows (0 to 8); "
            "clamp or filter the index"
        )
        for plane, out in zip(planes, rows, strict=True):
            assert torch.equal(out, torch.stack([plane[8], torch.zeros_like(plane[0]), plane[0], 0 * plane[0]]).float())
        engine.scatter(planes, torch.tensor([2, 9, -1, 2**62]), [torch.full_like(part, 7) for part in rows])
        for plane in planes:
            assert plane.eq(7).all(1).nonzero().flatten().tolist() == [2]

    def test_capture(self, engine, launches, monkeypatch):
        """What the device does alone is captured; the rest says so before it harms the capture."""
        plane, index, rows = torch.zeros(9, 8), torch.arange(9), [torch.ones(9, 8)]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        engine.scatter([plane], index, rows)
        engine.gather([plane], index, rows, check=True)
        assert len(launches) == 2
        with pytest.raises(DeviceError, match="loading the kernel gather_converted cannot be captured"):
            engine.gather([plane.half()], index, rows)
        with pytest.raises(DeviceError, match="waiting for rows on their way cannot be captured"):
            engine.wait()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "device", torch.device("cuda", 0))
            for call in (engine.gather, engine.scatter):
                with pytest.raises(DeviceError, match="by an index on the host cannot be captured"):
                    call([plane], index, rows)
        engine.gather([plane], index + 1, rows, check=True)
        with pytest.raises(DeviceError, match="the first call after a gather that named a row out of range cannot be"):
            engine.gather([plane], index, rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("engine", "name"), [(MappedEngine, "mapped"), (StagedEngine, "staged")])
def test_without_cuda_the_gpu_engines_say_what_is_missing(engine, name):
    with pytest.raises(DeviceError, match=f"the {name} engine needs CUDA, but .+; .+"):
        engine("cuda")
