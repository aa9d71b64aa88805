"""The engines on the CPU: the reference as it is; staged and mapped with the CPU in the part of the device."""

import contextlib
import threading
import types

import pytest
import torch
from cpu_kernels import as_engine_kernels
from engine_cases import EngineCases

from speedtransfer.cuda import StreamOrder, launch, status, streams
from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine
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
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=2)
    )
    for engine in ("mapped", "staged"):
        monkeypatch.setattr(f"speedtransfer.engines.{engine}.resolve_cuda", lambda device, what: torch.device(device))
        monkeypatch.setattr(
            f"speedtransfer.engines.{engine}.pinned_empty",
            lambda size, device, remedy="": torch.full((size,), 255, dtype=torch.uint8),
        )
    monkeypatch.setattr("speedtransfer.engines.mapped.require_mapped", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
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
        engine = StagedEngine("cpu", num_buffers=2)
        _, buffer = next(engine._ring), next(engine._ring)
        engine.gather([torch.randn(9, 8)], torch.arange(9), [torch.empty(9, 8)])
        engine.gather([torch.randn(9, 8)], torch.arange(9), [torch.empty(9, 8)])
        assert len(buffer._memory) == 512  # 288 bytes, in steps of 256

    def test_one_buffer_is_not_enough(self, cpu_as_cuda):
        for number in (0, 1):
            with pytest.raises(
                InvalidValueError, match=f"num_buffers is {number} but one is filled while another crosses"
            ):
                StagedEngine("cpu", num_buffers=number)


class TestMappedLogic(OnCpu):
    @pytest.fixture(autouse=True)
    def kernels(self, cpu_as_cuda, monkeypatch):
        with as_engine_kernels(monkeypatch) as kernels:
            yield kernels

    @pytest.fixture(params=[(None, "lanes"), (1, "lanes"), (None, "bulk")], ids=["lanes", "one block", "bulk"])
    def engine(self, request):
        max_blocks, kernel = request.param
        return MappedEngine("cpu", max_blocks=max_blocks, kernel=kernel)

    @pytest.fixture
    def launches(self, monkeypatch, kernels):
        """What was launched: function and threads in all."""
        seen, launch = [], kernels.launch
        monkeypatch.setattr(
            kernels, "launch", lambda name, *size_and_move: [seen.append(name), launch(name, *size_and_move)]
        )
        return seen

    def test_all_planes_go_in_one_launch(self, launches):
        engine, index = MappedEngine("cpu"), torch.tensor([3, 1])
        planes = [torch.randn(9, width) for width in (8, 8, 1)]
        engine.gather(planes, index, [torch.zeros(2, plane.shape[1]) for plane in planes])
        assert launches == ["gather_rows"]
        halves = [planes[0].half(), *planes[1:]]
        engine.scatter(halves, index, [torch.zeros(2, plane.shape[1]) for plane in planes])
        assert launches[1:] == ["scatter_converted"]

    def test_bulk_leaves_to_lanes_what_it_cannot_move(self, launches):
        engine, index = MappedEngine("cpu", kernel="bulk"), torch.tensor([3, 1])
        memory = torch.zeros(9 * 8 + 1)
        whole, odd = torch.zeros(9, 8), memory[1:].view(9, 8)
        for planes, dtypes, expected in [
            ([whole], [torch.float32], ["gather_bulk"]),
            ([odd], [torch.float32], ["gather_rows"]),
            ([whole, odd, whole], [torch.float32] * 3, ["gather_rows", "gather_bulk"]),
            ([whole, whole], [torch.float16, torch.float32], ["gather_converted", "gather_bulk"]),
            ([torch.zeros(9, 0)], [torch.float32], []),
        ]:
            launches.clear()
            rows = [torch.ones(2, plane.shape[1], dtype=dtype) for plane, dtype in zip(planes, dtypes, strict=True)]
            engine.gather(planes, index, rows)
            assert launches == expected
            assert not any(out.any() for out in rows)

    def test_a_row_that_does_not_exist_is_zeros(self, engine):
        planes, index = [torch.randn(9, 8), torch.randn(9, 3)], torch.tensor([8, 9, 0, -4])
        rows = [torch.ones(4, 8), torch.ones(4, 3)]
        engine.gather(planes, index, rows, check=True)
        with pytest.raises(RowIndexError) as error:
            engine.wait()
        assert str(error.value) == (
            "index[1] of an earlier gather (its row is zeros) is 9 but the table has 9 rows (0 to 8); "
            "clamp or filter the index"
        )
        for plane, out in zip(planes, rows, strict=True):
            assert torch.equal(out, torch.stack([plane[8], torch.zeros_like(plane[0]), plane[0], 0 * plane[0]]))

    def test_a_scatter_by_a_bad_index_writes_nowhere(self, engine):
        memory = torch.zeros(12, 8)
        planes, index = [memory[1:10]], torch.tensor([2, 9, -1, 2**62])
        engine.scatter(planes, index, [torch.ones(4, 8)])
        assert memory.any(dim=1).nonzero().tolist() == [[3]]

    def test_a_fault_in_more_planes_than_one_launch_takes(self, engine):
        planes = [torch.zeros(9, 1 + i) for i in range(37)]
        rows = [torch.ones(2, 1 + i) for i in range(37)]
        engine.gather(planes, torch.tensor([3, 9]), rows, check=True)
        assert not any(out.any() for out in rows)
        with pytest.raises(RowIndexError, match=r"^index\[1\] of an earlier gather"):
            engine.scatter(planes, torch.tensor([3, 4]), rows)
        engine.wait()

    def test_unchecked_says_nothing(self, engine):
        engine.gather([torch.zeros(9, 8)], torch.tensor([9]), [torch.ones(1, 8)])
        engine.wait()

    def test_a_table_made_in_inference_mode_keeps_its_faults(self, kernels):
        with torch.inference_mode():
            engine = MappedEngine("cpu")
        for _ in range(2):  # the second is reported only if the first was put away
            engine.gather([torch.zeros(9, 8)], torch.tensor([9]), [torch.ones(1, 8)], check=True)
            with pytest.raises(
                RowIndexError, match=r"index\[0\] of an earlier gather .* is 9 but the table has 9 rows"
            ):
                engine.wait()

    def test_other_kernels(self):
        with pytest.raises(InvalidValueError, match=r"kernel is 'bulky', which there is not; did you mean 'bulk'\?"):
            MappedEngine("cpu", kernel="bulky")

    def test_bulk_needs_hopper(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
        with pytest.raises(DeviceError, match=r"needs compute capability 9.0 \(Hopper\), but A Device has 8.6; use "):
            MappedEngine("cpu", kernel="bulk")


class TestLaunch:
    """A launch with another CuPy."""

    @pytest.fixture
    def cupy(self, monkeypatch):
        class CupyStream:
            @classmethod
            def from_external(cls, handle):
                stream = cls()
                stream.version, stream.ptr = handle.__cuda_stream__()
                return stream

        cuda = types.SimpleNamespace(Stream=CupyStream, Device=self.entered)
        for module in (status, streams):
            monkeypatch.setattr(module, "load_cupy", lambda: types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(torch.cuda, "device", self.entered)
        streams.cupy_stream.cache_clear()
        yield cuda
        streams.cupy_stream.cache_clear()

    @pytest.fixture(autouse=True)
    def devices(self, monkeypatch):
        self.inside = []
        found = types.SimpleNamespace(devices=("A Device",))
        monkeypatch.setattr(launch, "cuda_status", lambda: found)
        return found

    @contextlib.contextmanager
    def entered(self, index):
        self.inside.append(index)
        yield

    def launch(self, stream):
        calls = []
        launch.launch_kernel(lambda *args, **kwargs: calls.append((*args, kwargs)), 3, 64, "move", stream, 128)
        ((grid, block, arguments, keywords),) = calls
        assert (grid, block, arguments, keywords["shared_mem"]) == ((3,), (64,), ("move",), 128)
        return keywords["stream"]

    def test_one_device_needs_no_switching(self, cupy):
        stream = self.launch(Stream(5))
        assert (stream.version, stream.ptr) == (0, 5)
        assert self.inside == []
        assert self.launch(Stream(5)) is stream
        assert self.launch(Stream(6)).ptr == 6

    def test_several_devices(self, cupy, devices):
        devices.devices = ("A Device", "Another")
        stream = Stream(5)
        stream.device_index = 1
        assert self.launch(stream).ptr == 5
        assert self.inside == [1, 1]  # torch's and CuPy's

    def test_cupy_13(self, cupy):
        del cupy.Stream.from_external
        cupy.ExternalStream = lambda pointer, index: ("external", pointer, index)
        assert self.launch(Stream(5)) == ("external", 5, 0)

    @pytest.mark.parametrize(("before", "wanted", "after"), [(49152, 0, 49152), (49152, 66560, 66560), (99, 50, 99)])
    def test_shared_memory_only_grows(self, cupy, monkeypatch, before, wanted, after):
        kernel = types.SimpleNamespace(max_dynamic_shared_size_bytes=before)
        monkeypatch.setattr(launch, "require_cuda", lambda what: None)
        monkeypatch.setattr(launch, "_compiled", lambda *names: kernel)
        assert launch.load_kernel("a.cu", "a", torch.device("cuda", 0), wanted) is kernel
        assert kernel.max_dynamic_shared_size_bytes == after

    def test_too_much_shared_memory(self, cupy, monkeypatch):
        class Kernel:
            @property
            def max_dynamic_shared_size_bytes(self):
                return 49152

            @max_dynamic_shared_size_bytes.setter
            def max_dynamic_shared_size_bytes(self, size):
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

        monkeypatch.setattr(launch, "require_cuda", lambda what: None)
        monkeypatch.setattr(launch, "_compiled", lambda *names: Kernel())
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
        with pytest.raises(
            DeviceError, match=r"^a asks for 600000 bytes of shared memory .+ A Device refuses .+; pass "
        ):
            launch.load_kernel("a.cu", "a", torch.device("cuda", 0), 600000)


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
            assert [event.record_calls for event in three.waits] == [[one, one], [two]]
        on(two)
        with order.writing():  # the reads are behind the write before
            assert [event.record_calls for event in two.waits[1:]] == [[three]]

    def test_one_stream_needs_no_waits(self, on):
        order, stream = StreamOrder(torch.device("cpu")), Stream(1)
        on(stream)
        for queueing in (order.writing, order.reading, order.reading, order.writing, order.writing):
            with queueing():
                pass
        assert stream.waits == []

    def test_a_stream_of_another_library_may_be_gone_and_its_address_taken(self, on):
        order, reader, old, new = StreamOrder(torch.device("cpu")), Stream(2), Stream(8, False), Stream(8, False)
        on(old)
        with order.writing():
            pass
        on(new)
        with order.reading():
            assert [event.record_calls for event in new.waits] == [[old]]
        on(old)
        with order.reading():
            pass
        assert [event.record_calls for event in old.waits[1:]] == [[new, old]]  # both reads are in the event now
        on(reader)
        with order.writing():
            assert [event.record_calls for event in reader.waits] == [[old], [new, old]]
        on(old)
        with order.reading():
            pass
        on(new)
        with order.writing():
            assert [event.record_calls for event in new.waits[1:]] == [[reader], [old]]

    @pytest.mark.parametrize(("where", "what"), [(Stream, "wait_event"), (Event, "record")])
    def test_nothing_stays_locked_where_cuda_fails(self, on, monkeypatch, where, what):
        def fail(*args):
            raise RuntimeError("CUDA error")

        order = StreamOrder(torch.device("cpu"))
        on(Stream(1))
        with order.writing():
            pass
        on(Stream(2))
        with monkeypatch.context() as patch:
            patch.setattr(where, what, fail)
            with pytest.raises(RuntimeError, match="CUDA error"), order.reading():
                pass
        with order.writing():
            pass

    def test_the_current_stream_is_looked_up_by_its_address(self, monkeypatch):
        device, current, asked = torch.device("cuda", 0), [Stream(1)], []
        monkeypatch.setattr(streams, "_current_pointer", lambda index: current[0].cuda_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: [asked.append(device), current[0]][1])
        streams._stream_at.cache_clear()
        one, two = current[0], Stream(2)
        for stream in (one, one, two, one):
            current[0] = stream
            assert streams.current_stream(device) is stream
        assert len(asked) == 2
        streams._stream_at.cache_clear()

    def test_the_event_is_left_also_after_an_error(self, on):
        order, stream = StreamOrder(torch.device("cpu")), Stream(1)
        on(stream)
        with pytest.raises(ZeroDivisionError), order.writing():
            _ = 1 / 0
        other = Stream(2)
        on(other)
        with order.reading():
            assert [event.record_calls for event in other.waits] == [[stream]]

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
