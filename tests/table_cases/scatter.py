"""Rows into a table, and what must not get in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import assert_same_bits, numbers, one_line, refused

from speedtransfer.errors import (
    InvalidValueError,
    RowIndexError,
)
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
            np.array([[3, 4], [1, 2]], dtype=np.float32)[::-1],
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

    def test_scatter_rows_of_the_wrong_shape(self):
        table = self.numbered()
        before = self.rows_of(table)
        for shape in ((4,), (2, 3), (3, 4), (2, 1, 4), (1, 2, 4), (8,), ()):
            with pytest.raises(ValueError, match="shape") as error:
                table.scatter([1, 2], torch.zeros(shape, device=table.device))
            assert isinstance(error.value, InvalidValueError)
            said = one_line(error)
            assert said == f"rows for plane 'weight' has shape {shape} but index and table ask for (2, 4); reshape it"
        self.assert_unchanged(table, before)

    def test_scatter_rows_of_the_wrong_kind(self):
        table = self.numbered()
        before = self.rows_of(table)
        cases = [
            (
                torch.zeros(1, 4, dtype=torch.float64, device=table.device),
                TypeError,
                "torch.float64 but .* torch.float32",
            ),
            (torch.zeros(1, 4, dtype=torch.int32, device=table.device), TypeError, "torch.int32 but .* torch.float32"),
            (np.zeros((1, 4)), TypeError, "torch.float64 but .* torch.float32"),
            (np.zeros((1, 4), dtype=np.complex64), TypeError, "complex64 but .* floats or integers"),
            (np.zeros((1, 4), dtype=bool), TypeError, "bool but .* floats or integers"),
            (torch.zeros(1, 4, device="meta"), ValueError, f"on meta but the table computes on {table.device}"),
            ([[1.0, 2.0], [3.0]], ValueError, "ragged"),
            ("abcd", TypeError, "dtype <U4"),
            (None, TypeError, "dtype object"),
            (
                {"wieght": torch.zeros(1, 4, device=table.device)},
                ValueError,
                "no plane 'wieght'; did you mean 'weight'",
            ),
        ]
        for rows, standard, message in cases:
            with refused(standard, message):
                table.scatter([1], rows)
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
            (slice(-3, None), [7, 8, 9]),
            (slice(8, 100), [8, 9]),
            (slice(5, 2), []),
            (slice(2, 5, -1), []),
            (slice(0, 0), []),
            ([4, 2], [4, 2]),
            (7, 7),
            (torch.tensor([[1], [2]]), [[1], [2]]),
        ):
            table = self.numbered()
            expected, index = self.rows_of(table), torch.from_numpy(np.asarray(rows, dtype=np.int64))
            assert_same_bits(table[item].cpu(), expected[index])
            table[item] = table[item] + 100
            expected[index] += 100
            self.assert_unchanged(table, expected)

    def test_setitem_of_a_list_and_an_array(self):
        table = self.make(3, 2)
        table[1] = [1, 2]
        table[[0, 2]] = np.array([[3, 4], [5, 6]], dtype=np.float32)
        assert self.rows_of(table).tolist() == [[3, 4], [1, 2], [5, 6]]
        with pytest.raises(RowIndexError):
            table[-1]
        with pytest.raises(InvalidValueError):
            table[0] = 1.0

    def test_iterates_over_rows(self):
        assert [row[0].item() for row in self.numbered(5)] == [0, 1, 2, 3, 4]
