"""Rows into a table, what must not get in, and rows in another floating type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import assert_same_bits, dtype_name, numbers, refused

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from table_cases.base import TableCases


class ScatterCases(TableCases):
    # --- scatter ------------------------------------------------------------------------------------------------------

    def test_scatter_against_numpy(self, dtype):
        values, rows = numbers((300, 7), dtype), numbers((100, 7), dtype, seed=1)
        table = self.filled(values)
        index = torch.randperm(300, generator=torch.Generator().manual_seed(2))[:100]
        table.scatter(index, rows.to(table.device))
        values[index] = rows
        self.assert_unchanged(table, values)

    def test_scatter_of_sequences_and_arrays(self):
        for rows in (
            [[1, 2], [3, 4]],
            ((1.0, 2.0), (3.0, 4.0)),
            np.array([[1, 2], [3, 4]], dtype=np.float32),
            np.array([[1, 2], [3, 4]], dtype=">f4"),
            np.array([[1, 3], [2, 4]], dtype=np.float32).T,
            np.frombuffer(np.array([[1, 2], [3, 4]], dtype=np.float32).tobytes(), dtype=np.float32).reshape(2, 2),
            torch.arange(1.0, 5.0, device=self.device).view(2, 2).repeat_interleave(2, 1)[:, ::2],
            torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=self.device, requires_grad=True),
        ):
            table = self.make(4, 2)
            table.scatter([3, 1], rows)
            assert self.rows_of(table).tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
            assert not table.torch().requires_grad
        table.scatter([0, 2], torch.tensor([5.0, 6.0], device=table.device).expand(2, 2))
        assert self.rows_of(table)[[0, 2]].tolist() == [[5, 6], [5, 6]]

    def test_scatter_of_the_tables_own_rows(self):
        table = self.numbered()
        own = table.torch() if table.torch().device == table.device else table.numpy()
        table.scatter([1, 2, 3], own[0:3])
        assert self.rows_of(table)[:5, 0].tolist() == [0, 0, 1, 2, 4]

    def test_repeated_row_raises_and_writes_nothing(self):
        table = self.numbered()
        table.add_plane("m", 1)
        before, version = self.rows_of(table), table.version
        rows = torch.full((4, 4), -1.0, device=table.device)
        for index in ([5, 2, 9, 2], torch.tensor([5, 2, 9, 2]), np.array([5, 2, 9, 2], dtype=np.uint8)):
            with refused(InvalidValueError, r"index names row 2 twice \(positions 1 and 3\)"):
                table.scatter(index, rows)
            with pytest.raises(InvalidValueError, match="index names row 2 twice"):
                table.scatter(index, {"weight": rows, "m": rows[:, :1]})
        for index in ([2, 2], [[1, 3], [3, 1]], [0, 1, 1, 2]):
            with pytest.raises(InvalidValueError, match="twice"):
                table.scatter(index, torch.zeros(*np.shape(index), 4, device=table.device))
        assert table.version == version
        assert table.stats().scattered_rows == 0
        self.assert_unchanged(table, before)

    def test_scatter_numbers_that_the_dtype_cannot_hold(self, int_dtype):
        table = self.numbered(dtype=int_dtype)
        before = self.rows_of(table)
        with pytest.raises(InvalidValueError, match=f"has the value 1.5 but the plane holds {int_dtype}"):
            table.scatter([0], [[0, 0, 1.5, 0]])
        if int_dtype != torch.int64:
            too_large = torch.iinfo(int_dtype).max + 1
            with pytest.raises(InvalidValueError, match=f"has the value {too_large} but the plane holds {int_dtype}"):
                table.scatter([0], [[0, 0, 0, too_large]])
        self.assert_unchanged(table, before)
        table.scatter([0], [[1.0, 2.0, 3.0, 4.0]])
        assert self.rows_of(table)[0].tolist() == [1, 2, 3, 4]

    def test_nothing_is_written_when_one_plane_does_not_match(self):
        table = self.numbered()
        table.add_plane("m", 2, fill=7)
        weight, m = self.rows_of(table), self.rows_of(table, "m")
        good = torch.zeros(2, 4, device=table.device)
        for bad in (good, good[:, :2].double(), good[:1, :2], "no"):
            with pytest.raises((ValueError, TypeError), match="plane 'm'"):
                table.scatter([1, 2], {"weight": good, "m": bad})
        with pytest.raises(InvalidValueError, match="no plane 'n'"):
            table.scatter([1, 2], {"weight": good, "n": good})
        self.assert_unchanged(table, weight)
        self.assert_unchanged(table, m, "m")

    def test_unchecked_calls_move_the_same_rows(self):
        table = self.numbered()
        index = torch.tensor([7, 2], device=table.device)
        rows = table.gather(index, check=False)
        assert rows[:, 0].tolist() == [7, 2]
        table.scatter(index, rows * 2, check=False)
        table.scatter(index, {"weight": rows * 3}, check=False)
        assert table.gather([2, 7])[:, 0].tolist() == [6, 21]

    # --- sugar --------------------------------------------------------------------------------------------------------

    def test_getitem_and_setitem(self):
        for item, rows in (
            (slice(None), range(10)),
            (slice(2, 5), [2, 3, 4]),
            (slice(None, None, 3), [0, 3, 6, 9]),
            (slice(None, None, -1), range(9, -1, -1)),
            (slice(8, 100), [8, 9]),
            (slice(5, 2), []),
            (7, 7),
            (torch.tensor([[1], [2]]), [[1], [2]]),
        ):
            table = self.numbered()
            expected, index = self.rows_of(table), torch.from_numpy(np.asarray(rows, dtype=np.int64))
            assert_same_bits(table[item].cpu(), expected[index])
            table[item] = table[item] + 100
            expected[index] += 100
            self.assert_unchanged(table, expected)


KINDS = [torch.float32, torch.float16, torch.bfloat16]
# Ties, the largest and smallest of each type, values beyond them, signed zeros, infinities.
VALUES = [0.0, -0.0, 1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 65519.9, 65520, 2**-24, 2**-25]
VALUES += [2**-25 * 1.001, 6.1e-5, 3.4e38, 1e-45, float("inf"), -float("inf"), -2.5, 1e-8, 1e5, -1e-40, 3.14159, 0.1]


class ConvertCases(TableCases):
    """Rows in another floating type than the one stored."""

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
