"""Rows in another floating type than the one stored."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same_bits, dtype_name, refused

from speedtransfer.errors import InvalidTypeError
from table_cases.base import TableCases

KINDS = [torch.float32, torch.float16, torch.bfloat16]
# Ties, the largest and smallest of each type, values beyond them, signed zeros, infinities.
VALUES = [0.0, -0.0, 1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 65519.9, 65520, 2**-24, 2**-25]
VALUES += [2**-25 * 1.001, 6.1e-5, 3.4e38, 1e-45, float("inf"), -float("inf"), -2.5, 1e-8, 1e5, -1e-40, 3.14159, 0.1]


class ConvertCases(TableCases):
    def need(self, dtype):
        if dtype not in self.dtypes:
            pytest.skip(f"this memory has no {dtype}")

    @pytest.mark.parametrize("dense", KINDS, ids=dtype_name)
    @pytest.mark.parametrize("stored", KINDS, ids=dtype_name)
    def test_rows_are_converted_as_torch_does(self, stored, dense):
        self.need(stored)
        values = torch.tensor(VALUES * 2).view(4, 12)
        table = self.filled(values.to(stored))
        expected = values.to(stored).to(dense)
        rows = table.gather([3, 0, 3], dtype=dense)
        assert rows.dtype == dense
        assert_same_bits(rows, expected[[3, 0, 3]])
        out = torch.empty(2, 12, dtype=dense, device=self.device)
        assert table.gather([1, 2], out=out, dtype=dense) is out
        assert_same_bits(out, expected[[1, 2]])
        if not table.writable:
            return
        table.scatter([3, 0, 1], values[:3].to(dense).to(self.device), convert=True)
        stored_rows = values.to(stored).clone()
        stored_rows[[3, 0, 1]] = values[:3].to(dense).to(stored)
        self.assert_unchanged(table, stored_rows)

    def test_several_planes(self):
        table = self.numbered()
        table.add_plane("half", 3, torch.bfloat16, fill=1.5)
        rows = table.gather([2, 4], ["weight", "half"], dtype=torch.float32)
        assert [r.dtype for r in rows.values()] == [torch.float32] * 2
        table.scatter([2, 4], {name: value * 2 for name, value in rows.items()}, convert=True)
        assert table.gather(4).tolist() == [8, 8.5, 9, 9.5]
        assert table.gather(4, "half").tolist() == [3, 3, 3]

    def test_the_bytes_that_cross_are_those_stored(self):
        table = self.make(10, 4, dtype=torch.float16)
        table.gather([1, 2, 3], dtype=torch.float32)
        assert table.stats().gathered_bytes == 3 * 4 * 2

    def test_what_is_not_converted(self):
        table = self.make(4, 4, dtype=torch.float16)
        for wanted in (torch.float64, torch.int8, torch.float8_e5m2):
            with refused(InvalidTypeError, r"but the plane holds torch.float16; float32, float16 and"):
                table.gather([1], dtype=wanted)
        with refused(InvalidTypeError, r"but the plane holds torch.float16"):
            table.scatter([1], torch.zeros(1, 4, dtype=torch.float64, device=self.device), convert=True)
        with pytest.raises(InvalidTypeError, match=r"pass it .to\(torch.float16\)"):
            table.scatter([1], torch.ones(1, 4, device=self.device))
        assert not self.rows_of(table).any()
