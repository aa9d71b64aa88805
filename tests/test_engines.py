"""The engines on the CPU: the reference as it is; staged and mapped with the CPU in the part of the device."""

import contextlib
import threading
import types

import pytest
import torch
from cpu_kernels import COMPILER, CpuKernels
from engine_cases import EngineCases

from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine
from speedtransfer.engines.order import StreamOrder
from speedtransfer.errors import DeviceError


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

    def synchronize(self):
        assert self.record_calls, "the host waits for an event that was never recorded"
        self.synchronize_calls += 1


class Stream:
    def __init__(self, cuda_stream=0):
        self.cuda_stream, self.waits = cuda_stream, []

    def wait_event(self, event):
        assert event.record_calls, "a stream waits for an event that was never recorded"
        self.waits.append(event)


@pytest.fixture
def cpu_as_cuda(monkeypatch):
    """Let the CPU play the device: what it is asked to do, it has done at once."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=2)
    )
    for engine in ("mapped", "staged"):
        monkeypatch.setattr(f"speedtransfer.engines.{engine}.resolve_cuda", lambda device, what: torch.device(device))
    monkeypatch.setattr(
        "speedtransfer.engines.staged.pinned_empty", lambda size, device: torch.full((size,), 255, dtype=torch.uint8)
    )
    monkeypatch.setattr("speedtransfer.engines.mapped.require_mapped", lambda device: None)
    monkeypatch.setattr("speedtransfer.engines.mapped.torch_stream", lambda device: contextlib.nullcontext())
    return stream


class TestStagedLogic(OnCpu):
    @pytest.fixture(params=[16 << 20, 1024, 1], ids=["one chunk", "many chunks", "a row a chunk"])
    def engine(self, request, cpu_as_cuda):
        return StagedEngine("cpu", buffer_bytes=request.param)

    def test_a_buffer_is_not_reused_before_its_copy_is_done(self, cpu_as_cuda):
        engine = StagedEngine("cpu", num_buffers=2, buffer_bytes=1024)
        buffers = [next(engine._ring) for _ in range(2)]
        plane, index = torch.randn(50, 8), torch.arange(50)
        engine.gather([plane], index, [torch.empty(50, 8)])  # 3 chunks of 24 rows: one buffer twice
        records = [len(buffer._event.record_calls) for buffer in buffers]
        waits = [buffer._event.synchronize_calls for buffer in buffers]
        assert (records, waits) == ([2, 1], [1, 0])
        engine.scatter([plane], index, [torch.randn(50, 8)])
        records = [len(buffer._event.record_calls) for buffer in buffers]
        waits = [buffer._event.synchronize_calls for buffer in buffers]
        assert sum(records) == 6
        assert all(wait >= record - 1 for wait, record in zip(waits, records, strict=True))

    def test_buffers_grow_to_what_is_asked(self, cpu_as_cuda):
        engine = StagedEngine("cpu", num_buffers=1)
        (buffer,) = [next(engine._ring)]
        engine.gather([torch.randn(9, 8)], torch.arange(9), [torch.empty(9, 8)])
        assert len(buffer._memory) == 512  # 288 bytes, in steps of 256


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    return CpuKernels(tmp_path_factory.mktemp("kernels"))


class TestMappedLogic(OnCpu):
    @pytest.fixture(params=[None, 1], ids=["default launch", "one block"])
    def engine(self, request, cpu_as_cuda, kernels, monkeypatch):
        def load_kernel(source_name, function_name, device):
            assert source_name == "rows.cu"
            return lambda grid, block, args: getattr(kernels, function_name)(*grid, *block, *args)

        monkeypatch.setattr("speedtransfer.engines.mapped.load_kernel", load_kernel)
        return MappedEngine("cpu", max_blocks=request.param)


class TestStreamOrder:
    @pytest.fixture
    def on(self, cpu_as_cuda, monkeypatch):
        """Return a function that makes a stream current."""
        return lambda stream: monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def test_read_after_write_waits(self, on):
        order, one, two = StreamOrder(torch.device("cpu")), Stream(1), Stream(2)
        on(one)
        with order.writing() as stream:
            assert stream is one
        on(two)
        with order.reading():
            assert [event.record_calls for event in two.waits] == [[one]]

    def test_write_after_reads_and_write_waits_for_all(self, on):
        order, one, two, three = StreamOrder(torch.device("cpu")), Stream(1), Stream(2), Stream(3)
        on(three)
        with order.writing():
            pass
        for stream in (one, two, one):
            on(stream)
            with order.reading():
                pass
        on(three)
        with order.writing():
            assert [event.record_calls for event in three.waits] == [[three], [one, one], [two]]
        with order.writing():  # the reads are behind the write before
            assert [event.record_calls for event in three.waits[3:]] == [[three]]

    def test_the_event_is_left_also_after_an_error(self, on):
        order, stream = StreamOrder(torch.device("cpu")), Stream(1)
        on(stream)
        with pytest.raises(ZeroDivisionError), order.writing():
            _ = 1 / 0
        with order.reading():
            assert len(stream.waits) == 1

    def test_wait(self, on):
        order = StreamOrder(torch.device("cpu"))
        order.wait()  # nothing yet
        on(Stream(1))
        with order.writing():
            pass
        with order.reading():
            pass
        order.wait()
        assert order._written.synchronize_calls == 1

    def test_threads_take_turns(self, on):
        order = StreamOrder(torch.device("cpu"))
        on(Stream(1))
        entered = threading.Event()
        with order.writing():
            thread = threading.Thread(target=lambda: [order.reading().__enter__(), entered.set()])
            thread.start()
            assert not entered.wait(0.05)
        thread.join(10)
        assert entered.is_set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("engine", "name"), [(MappedEngine, "mapped"), (StagedEngine, "staged")])
def test_without_cuda_the_gpu_engines_say_what_is_missing(engine, name):
    with pytest.raises(DeviceError, match=f"the {name} engine needs CUDA, but .+; .+"):
        engine("cuda")
