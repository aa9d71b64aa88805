"""The planes of a table: what it says of itself, planes of optimizer state, views of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import FLOAT8_DTYPES, NO_NUMPY_DTYPES, assert_same_bits, dtype_name, numbers, one_line, refused

from speedtransfer.errors import (
    InvalidTypeError,
    InvalidValueError,
)
from table_cases.base import TableCases


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
        for fill in (0, 3.0, -1.0, math.inf, math.nan):
            with refused(InvalidValueError, rf"fill is {fill} but the plane holds {scale}, powers"):
                table.add_plane("more", 2, scale, fill=fill)
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
