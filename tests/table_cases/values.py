"""What a table starts from: initialisers, arrays, other tables; its counters, and the modes of torch around it."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from cases import (
    FLOAT8_DTYPES,
    INTEGER_DTYPES,
    NO_NUMPY_DTYPES,
    assert_same_bits,
    dtype_name,
    numbers,
    one_line,
    refused,
)

import speedtransfer as st
from speedtransfer.errors import (
    InvalidTypeError,
    InvalidValueError,
)
from speedtransfer.tables import chunks as fill
from table_cases.base import TableCases, named

# 16 is the block of torch's normal numbers. (num_rows, dim) around it and around chunks of it
INIT_SHAPES = [(0, 3), (1, 1), (3, 5), (15, 1), (16, 1), (17, 1), (5, 3), (33, 7), (47, 5), (48, 5), (49, 3), (100, 13)]


class ValueCases(TableCases):
    # --- first values -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunk_bytes", [1, 16 * 13 * 8, 1 << 24])
    def test_random_numbers_are_those_of_torch(self, chunk_bytes, float_dtype, monkeypatch):
        monkeypatch.setattr(fill, "CHUNK_BYTES", chunk_bytes)
        calls = [("normal_", (0.5, 2.0)), ("uniform_", (-3.0, 5.0)), ("normal_", ()), ("uniform_", ())]
        for (num_rows, dim), (name, arguments) in itertools.product(INIT_SHAPES, calls):
            table = self.make(num_rows, dim, dtype=float_dtype)
            whole = torch.empty(num_rows, dim, dtype=float_dtype)
            torch.manual_seed(11)
            getattr(whole, name)(*arguments)
            after = torch.random.get_rng_state()
            torch.manual_seed(11)
            assert getattr(table, name)(*arguments) is table
            self.assert_unchanged(table, whole)
            assert torch.equal(torch.random.get_rng_state(), after), "draws the same count of numbers"
            getattr(table, name)(*arguments, generator=torch.Generator().manual_seed(11))
            self.assert_unchanged(table, whole)

    def test_zero_and_fill(self, dtype, monkeypatch):
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)
        table = self.make(50, 3, dtype=dtype)
        assert table.fill_(3) is table
        assert self.rows_of(table).tolist() == [[3, 3, 3]] * 50
        table.zero_()
        assert self.rows_of(table).tolist() == [[0, 0, 0]] * 50

    def test_random_numbers_for_a_dtype_that_has_none(self):
        for dtype in self.dtypes:
            if dtype not in (*FLOAT8_DTYPES, *INTEGER_DTYPES):
                continue
            table, float8 = self.numbered(dtype=dtype), dtype in FLOAT8_DTYPES
            before = self.rows_of(table)
            rule = f"draws no {dtype}; use init_" if float8 else f"needs a floating dtype but the table holds {dtype}"
            for name in ("normal_", "uniform_"):
                with refused(InvalidTypeError, f"{name} {rule}"):
                    getattr(table, name)()
            self.assert_unchanged(table, before)
            if float8:
                torch.manual_seed(3)
                table.init_(lambda chunk: torch.randn(chunk.shape))
                torch.manual_seed(3)
                self.assert_unchanged(table, torch.randn(before.shape).to(dtype))

    @pytest.mark.parametrize(
        "function",
        named(
            {
                "in place": lambda chunk: torch.nn.init.normal_(chunk, std=0.1),
                "uniform": lambda chunk: chunk.normal_(0, 0.1) and None if chunk.numel() == 1 else chunk.uniform_(),
                "returns double": lambda chunk: torch.randn(chunk.shape, dtype=torch.float64),
                "has a graph": lambda chunk: torch.randn(chunk.shape, requires_grad=True) * 2,
                "array": lambda chunk: torch.rand(chunk.shape).numpy(),
            }
        ),
    )
    def test_init_with_a_function(self, function):
        table, whole = self.make(50, 3), torch.zeros(50, 3)
        torch.manual_seed(5)
        result = torch.as_tensor(function(whole)).detach().float()
        torch.manual_seed(5)
        assert table.init_(function) is table
        self.assert_unchanged(table, result)
        assert not table.torch().requires_grad

    # --- from_array ---------------------------------------------------------------------------------------------------

    def test_from_array_of_a_tensor(self, dtype):
        values = numbers((40, 3), dtype)
        table = self.from_array(values)
        assert table.dtype == dtype
        self.assert_unchanged(table, values)
        values.zero_()
        assert self.rows_of(table).any(), "the table has its own memory"

    @pytest.mark.parametrize(
        "change",
        named(
            {
                "Fortran": np.asfortranarray,
                "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
                "read-only": lambda a: np.frombuffer(a.tobytes(), dtype=a.dtype).reshape(a.shape),
                "reversed rows": lambda a: np.ascontiguousarray(a[::-1])[::-1],
                "list": lambda a: a.tolist(),
                "parameter": lambda a: torch.nn.Parameter(torch.from_numpy(a)),
            }
        ),
    )
    def test_from_array_of_anything(self, change):
        values = numbers((40, 3), torch.float64).numpy()
        table = self.from_array(change(values.copy()))
        assert table.dtype == torch.float64
        assert not table.torch().requires_grad
        assert table.torch().is_contiguous()
        np.testing.assert_array_equal(self.rows_of(table).numpy(), values)
        table.scatter([0], torch.zeros(1, 3, dtype=torch.float64, device=table.device))


class CopyCases(TableCases):
    # --- copies -------------------------------------------------------------------------------------------------------

    def test_deepcopy_has_every_plane_and_is_independent(self, dtype):
        values = numbers((40, 3), dtype)
        table = self.filled(values)
        table.add_plane("m", 2, torch.float64, fill=0.5)
        table.add_plane("step", 1, torch.int32, fill=3)
        duplicate = copy.deepcopy(table)
        assert duplicate.planes == table.planes
        assert (duplicate.memory, duplicate.device, duplicate.dtype) == (table.memory, table.device, table.dtype)
        self.assert_unchanged(duplicate, values)
        assert self.rows_of(duplicate, "m").tolist() == [[0.5, 0.5]] * 40
        assert self.rows_of(duplicate, "step").tolist() == [[3]] * 40
        table.zero_()
        table.plane("m").zero_()
        self.assert_unchanged(duplicate, values)
        assert self.rows_of(duplicate, "m").all()
        duplicate.fill_(1)
        assert not self.rows_of(table).any()

    def test_astype(self, dtype):
        table = self.numbered(40, 3)
        converted = table.astype(dtype)
        assert converted.dtype == dtype
        assert (converted.memory, converted.device) == (table.memory, table.device)
        self.assert_unchanged(converted, self.rows_of(table).to(dtype))
        converted.zero_()
        assert self.rows_of(table)[:, 0].tolist() == list(range(40))
        with pytest.raises(InvalidTypeError, match=r"dtype is torch.bool"):
            table.astype(torch.bool)

    def test_to_the_cpu_and_back(self):
        table = self.numbered()
        table.add_plane("m", 1, fill=2)
        assert table.to(table.device) is table
        assert table.to("cpu") is table
        assert table.device == torch.device("cpu")
        assert table.gather([3, 1])[:, 0].tolist() == [3, 1]
        table.scatter([3], torch.zeros(1, 4))
        table.to(self.device)
        assert table.gather([3, 1], ["weight", "m"])["m"].flatten().tolist() == [2, 2]
        assert table.gather([3, 1])[:, 0].tolist() == [0, 1]

    # --- stats, version, modes ----------------------------------------------------------------------------------------

    def test_stats(self):
        table = self.numbered(10, 4)
        table.add_plane("m", 3, torch.float16)
        assert table.stats() == st.TableStats()
        table.gather([1, 1, 2])
        table.gather([[1, 2], [3, 4]], ["weight", "m"])
        table.gather([5], "m")
        table.gather([])
        table.scatter([1, 2], torch.zeros(2, 4, device=table.device))
        table.scatter([3], {"m": torch.zeros(1, 3, dtype=torch.float16, device=table.device)})
        stats = table.stats()
        assert stats == st.TableStats(
            gathered_rows=3 + 4 + 1,
            gathered_bytes=3 * 16 + 4 * (16 + 6) + 6,
            scattered_rows=2 + 1,
            scattered_bytes=2 * 16 + 6,
        )
        table.gather([1])
        assert stats.gathered_rows == 8, "a copy"
        table.reset_stats()
        assert table.stats() == st.TableStats()

    def test_version_grows_with_every_change(self):
        table = self.numbered()
        changes = [
            lambda: table.scatter([1], torch.zeros(1, 4, device=table.device)),
            lambda: table.zero_(),
            lambda: table.fill_(2),
            lambda: table.normal_(),
            lambda: table.uniform_(),
            lambda: table.init_(lambda chunk: torch.ones_like(chunk)),
            lambda: table.torch().mul_(2),
            lambda: table.torch()[3].add_(1),
        ]
        for change in changes:
            before = table.version
            change()
            assert table.version > before
        before = table.version
        table.gather([1])
        table.flush()
        table.add_plane("m")
        assert table.version == before

    def test_made_in_inference_mode_it_can_be_trained(self):
        with torch.inference_mode():
            table = self.make(10, 4)
            table.normal_()
            table.add_plane("m", 2)
            given = self.from_array(torch.ones(3, 2))
            array = self.from_array(np.ones((3, 2), dtype=np.float32))
            path = self.folder / "saved.safetensors"
            table.save(path)
            loaded = self.load(path)
            duplicate = copy.deepcopy(table)
        for each in (table, given, array, loaded, duplicate):
            assert not each.torch().is_inference()
            before = each.version
            rows = each.gather([0, 2])
            weight = torch.nn.Parameter(rows)
            (weight**2).sum().backward()
            each.scatter([0, 2], rows - 0.5 * weight.grad)
            assert each.version > before
            assert not each.gather([0, 2]).any()

    def test_works_with_another_default_dtype_and_device(self):
        torch.set_default_dtype(torch.float64)
        try:
            table = self.make(4, 2)
            assert table.dtype == torch.float32
            table.scatter([1], [[1, 2]])
            table.add_plane("m", 1, fill=0.5)
            assert table.gather([1], ["weight", "m"])["m"].dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)


# --- what a table says of itself, planes of optimizer state, views of the whole ---------------------------------------


class PlaneCases(TableCases):
    # --- what it is ---------------------------------------------------------------------------------------------------

    def test_says_what_it_is(self, dtype):
        table = self.make(7, 3, dtype=dtype)
        assert (table.num_rows, table.dim, table.dtype, len(table)) == (7, 3, dtype, 7)
        assert table.planes == ("weight",)
        assert table.nbytes == 7 * 3 * dtype.itemsize
        assert table.device == self.device
        for word in ("7, 3", str(dtype), repr(table.memory), f"device='{self.device}'", "planes=['weight']"):
            assert word in repr(table)
        table.add_plane("exp_avg", 2)
        assert "planes=['weight', 'exp_avg']" in repr(table)
        assert table.nbytes == 7 * 5 * dtype.itemsize

    # --- planes -------------------------------------------------------------------------------------------------------

    def test_a_plane_of_scales_that_are_powers_of_two(self):
        scale = getattr(torch, "float8_e8m0fnu", None)
        if scale is None:
            pytest.skip("this torch has no float8_e8m0fnu")
        table = self.numbered(20, 4)
        table.add_plane("scale", 2, scale, fill=0.25)
        values = (2.0 ** torch.arange(-20.0, 20.0)).view(20, 2)
        table.add_plane("other", 2, scale, fill=values)
        rows = table.gather([3, 19, 3], ["weight", "scale", "other"])
        assert rows["scale"].float().tolist() == [[0.25, 0.25]] * 3
        assert torch.equal(rows["other"].float().cpu(), values[[3, 19, 3]])
        table.scatter([4, 5], {"other": torch.full((2, 2), 8.0).to(scale).to(table.device)})
        assert table.gather([3, 4], "other").float().tolist() == [values[3].tolist(), [8.0, 8.0]]
        for value in (0, 3.0, -1.0, math.inf, math.nan):
            with refused(InvalidValueError, rf"fill is {value} but the plane holds {scale}, powers"):
                table.add_plane("more", 2, scale, fill=value)
        with pytest.raises(InvalidTypeError, match=rf"dtype is {scale} but a table holds one of torch's"):
            self.make(4, 4, dtype=scale)
        assert table.planes == ("weight", "scale", "other")

    def test_add_plane_gives_a_view(self):
        table = self.make(4, 3)
        plane = table.add_plane("m", 2, torch.float64)
        assert plane.shape == (4, 2)
        assert plane.dtype == torch.float64
        plane[1] = 5
        assert table.plane("m").data_ptr() == plane.data_ptr()
        assert self.rows_of(table, "m").tolist() == [[0, 0], [5, 5], [0, 0], [0, 0]]

    def test_add_plane_copies_a_tensor(self):
        table = self.make(50, 3)
        fill_values = numbers((50, 2), torch.float64)
        table.add_plane("m", 2, fill=fill_values.requires_grad_())
        assert not table.plane("m").requires_grad
        assert_same_bits(self.rows_of(table, "m"), fill_values.detach().float())

    # --- views --------------------------------------------------------------------------------------------------------

    def test_torch_view(self, dtype):
        values = numbers((30, 3), dtype)
        table = self.filled(values)
        view = table.torch()
        assert_same_bits(view.cpu(), values)
        view[3] = 1
        assert table.gather(3).tolist() == [1, 1, 1]
        table.scatter([4], torch.full((1, 3), 2, dtype=dtype, device=table.device))
        assert table.torch()[4].tolist() == [2, 2, 2]
        assert view.data_ptr() == table.torch().data_ptr() == table.plane("weight").data_ptr()

    def test_numpy_views(self, dtype):
        table = self.filled(numbers((30, 3), dtype))
        if not self.host or dtype in NO_NUMPY_DTYPES:
            with pytest.raises((BufferError, RuntimeError)):
                np.from_dlpack(table)
        if not self.host:
            with pytest.raises(InvalidValueError, match=r"the rows live on .*; use .cupy\(\)"):
                table.numpy()
            return
        if dtype in NO_NUMPY_DTYPES:
            with pytest.raises(InvalidTypeError, match=rf"NumPy has no {dtype_name(dtype)}; use .torch\(\)") as error:
                table.numpy()
            bits = one_line(error).partition(".torch().view(torch.")[2].partition(")")[0]
            assert table.torch().view(getattr(torch, bits)).numpy().shape == (30, 3)
            return
        assert table.numpy().flags.writeable
        for value, view in enumerate((table.numpy(), np.from_dlpack(table)), start=1):
            assert view.__array_interface__["data"][0] == table.torch().data_ptr()
            if view.flags.writeable:  # those of DLPack are not in older versions of NumPy
                view[3] = value
                assert table.gather(3).tolist() == [value] * 3
            table.scatter([4], torch.full((1, 3), value, dtype=dtype, device=table.device))
            table.flush()
            assert view[4].tolist() == [value] * 3

    def test_dlpack_to_torch(self, dtype):
        table = self.filled(numbers((30, 3), dtype))
        if dtype in FLOAT8_DTYPES and torch.__version__ < "2.13":
            try:
                torch.zeros(3, dtype=dtype).__dlpack__()
            except RuntimeError as refused:  # of torch 2.6
                with pytest.raises(RuntimeError, match=str(refused)):
                    torch.from_dlpack(table)
                return
        view = torch.from_dlpack(table)
        assert_same_bits(view.cpu(), self.rows_of(table))
        view[3] = 1
        assert table.gather(3).tolist() == [1, 1, 1]
        assert view.data_ptr() == table.torch().data_ptr()
