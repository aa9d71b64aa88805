"""The order between streams, with the CPU in the part of the device."""

import threading

import pytest
import torch
from test_cuda_graphs import capturing
from test_engines import Event, Stream, cpu_as_cuda

from speedtransfer.cuda import StreamOrder, streams
from speedtransfer.errors import DeviceError

__all__ = ["capturing", "cpu_as_cuda"]


@pytest.fixture
def on(cpu_as_cuda, monkeypatch):
    """Return a function that makes a stream current."""
    return lambda stream: monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


class TestStreamOrder:
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


class TestCapture:
    """The current stream is being captured in a CUDA graph, as far as torch says."""

    def test_no_event_of_before_is_waited_for_and_none_is_left(self, on, capturing):
        order, one, two = StreamOrder(torch.device("cpu")), Stream(1), Stream(2)
        on(one)
        with order.writing():
            pass
        with order.reading():
            pass
        written, reads = order._written, dict(order._reads)
        capturing(True)
        on(two)
        for queueing in (order.reading, order.writing, order.reading):
            with queueing() as stream:
                assert stream is two
        assert two.waits == []
        assert (order._written, order._reads) == (written, reads)
        assert [event.record_calls for event in (written, *reads.values())] == [[one], [one]]
        capturing(False)
        with order.writing():
            assert two.waits == [written, *reads.values()]

    def test_a_wait_after_it_is_for_the_device(self, on, capturing, monkeypatch):
        order, waits = StreamOrder(torch.device("cpu")), []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        on(Stream(1))
        with order.reading():
            pass
        order.wait()
        assert waits == []
        capturing(True)
        with order.reading():
            pass
        with pytest.raises(DeviceError, match="waiting for rows on their way cannot be captured in a CUDA graph"):
            order.wait()
        capturing(False)
        order.wait()
        assert waits == [order.device]
