"""The table contract for every memory, files that are read in place, and caches, with a CUDA device to compute on."""

import numpy as np
import pytest
import torch
from cases import NO_NUMPY_DTYPES, assert_same_bits, numbers, one_line
from table_cases import ConvertCases, CopyCases, GatherCases, ScatterCases, TableContract, TableOfRecords
from test_tables_opened import ReadOnly

import speedtransfer as st
from speedtransfer.engines import engine_names
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError


class OnCuda(TableContract):
    def test_rows_are_gathered_to_the_device(self):
        table = self.numbered()
        assert table.gather([1]).device == self.device
        assert table.gather(torch.tensor([1])).device == self.device
        assert table.gather(np.array([1])).device == self.device

    def test_rows_on_the_host_are_refused(self):
        table = self.numbered()
        with pytest.raises(InvalidValueError, match=f"is on cpu but the table computes on {self.device}; pass it .to"):
            table.scatter([1], torch.zeros(1, 4))
        with pytest.raises(InvalidValueError, match=f"out is on cpu but the table computes on {self.device}; "):
            table.gather([1], out=torch.zeros(1, 4))

    def test_index_on_the_device_out_of_range(self):
        table = self.numbered()
        before = self.rows_of(table)
        bad = torch.tensor([3, 10, -1], device=self.device)
        for planes in ("weight", ["weight"]):
            message = r"^index\[1\].* is 10 but the table has 10 rows \(0 to 9\); clamp"
            with pytest.raises(IndexError, match=message) as error:
                # It is heard of at the latest when it is waited for.
                (table.gather(bad, planes), table.wait())
            one_line(error)
        with pytest.raises(IndexError, match=r"^index\[2\] is -1 but rows count from 0"):
            table.scatter(torch.tensor([3, 4, -1], device=self.device), torch.ones(3, 4, device=self.device))
        self.assert_unchanged(table, before)

    def test_the_engines_that_it_can_have(self):
        table = self.numbered()
        before = self.rows_of(table)
        names = engine_names(self.memory, self.device)
        assert table.engine == getattr(self, "engine", names[0])
        for name in names:
            table.engine = name
            assert table.engine == name
            self.assert_unchanged(table, before)
            table.scatter(torch.tensor([7, 2], device=self.device), torch.full((2, 4), -1.5, device=self.device))
            before[[7, 2]] = -1.5
            self.assert_unchanged(table, before)

    def test_calls_on_another_stream_see_the_rows(self):
        values = numbers((2000, 64), torch.float32)
        table = self.filled(values)
        index = torch.arange(0, 2000, 3, device=self.device)
        one, two = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        for _ in range(20):
            with torch.cuda.stream(one):
                rows = table.gather(index)
                table.scatter(index, rows + 1)
            with torch.cuda.stream(two):
                seen = table.gather(index)
            two.synchronize()
            values[index.cpu()] += 1
            assert_same_bits(seen, values[index.cpu()])

    def test_first_values_wait_for_rows_on_their_way(self):
        table = self.make(100_000, 64)
        index = torch.arange(100_000, device=self.device)
        for _ in range(4):
            table.scatter(index, torch.ones(100_000, 64, device=self.device))
            table.zero_()
            assert not table.gather(index).any()


class CupyViews:
    def test_cupy_view(self, dtype):
        table = self.filled(numbers((30, 3), dtype))
        if dtype in NO_NUMPY_DTYPES:
            with pytest.raises(InvalidTypeError) as error:
                table.cupy()
            one_line(error)
            return
        view = table.cupy()
        assert view.shape == (30, 3)
        view[3] = 1
        torch.cuda.synchronize(self.device)
        assert table.gather(3).tolist() == [1, 1, 1]
        table.scatter([4], torch.full((1, 3), 2, dtype=dtype, device=self.device))
        table.flush()
        assert view[4].tolist() == [2, 2, 2]


class TestPinned(CupyViews, OnCuda):
    memory = "pinned"

    def test_auto_is_pinned(self):
        assert st.Table(4, 4).memory == "pinned"

    def test_more_than_the_host_has(self):
        with pytest.raises(HostMemoryError, match=r"plane .weight. .* asks for 512 TB"):
            self.make(10**12, 128)

    def test_computes_on_the_cpu_too(self):
        table = st.Table(4, 2, memory="pinned", device="cpu")
        table.scatter([1], torch.ones(1, 2))
        assert table.gather([0, 1]).tolist() == [[0, 0], [1, 1]]


class TestPageable(OnCuda):
    memory = "pageable"

    def test_no_cupy_view(self):
        with pytest.raises(InvalidValueError, match=r"CUDA cannot address memory='pageable'; use ") as error:
            self.make(4, 4).cupy()
        one_line(error)


class TestMmap(OnCuda):
    memory = "mmap"


class TestDevice(CupyViews, OnCuda):
    memory, host = "device", False

    def test_more_than_the_device_has(self):
        with pytest.raises(HostMemoryError, match="plane 'weight' asks for 512 TB of cuda") as error:
            self.make(10**12, 128)
        one_line(error)


class Chosen(GatherCases, ScatterCases, ConvertCases):
    """The part of the contract in which rows move, for an engine that is no memory's default."""

    engine: str

    @pytest.fixture(autouse=True)
    def _choose(self, monkeypatch):
        monkeypatch.setenv("SPEEDTRANSFER_ENGINE", self.engine)

    test_the_engines_that_it_can_have = OnCuda.test_the_engines_that_it_can_have
    test_index_on_the_device_out_of_range = OnCuda.test_index_on_the_device_out_of_range
    test_calls_on_another_stream_see_the_rows = OnCuda.test_calls_on_another_stream_see_the_rows


class TestPinnedMapped(Chosen):
    memory, engine = "pinned", "mapped"


class TestPinnedStaged(Chosen):
    memory, engine = "pinned", "staged"


class TestDeviceReference(Chosen):
    memory, engine, host = "device", "reference", False


class Records(GatherCases, ScatterCases, ConvertCases, CopyCases):
    """Planes that are strided views of records."""

    kind = TableOfRecords


class TestPinnedRecords(Records):
    memory = "pinned"


class TestDeviceRecords(Records):
    memory, host = "device", False


class TestOpened(ReadOnly):
    """Rows of files, at any byte, that the host moves."""

    pads = (1, 6)


class TestOpenedThroughACache(ReadOnly):
    options = {"cache_rows": 20}


class TestPinnedThroughACache(TableContract):
    memory, options = "pinned", {"cache_rows": 3}
    test_calls_on_another_stream_see_the_rows = OnCuda.test_calls_on_another_stream_see_the_rows
