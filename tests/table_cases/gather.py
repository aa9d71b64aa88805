"""Rows out of a table, and every kind of index."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from cases import INTEGER_DTYPES, assert_same_bits, numbers, one_line, refused

from speedtransfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    RowIndexError,
)
from table_cases.base import TableCases

INDEX_DTYPES = [*INTEGER_DTYPES, torch.uint16, torch.uint32, torch.uint64]
# Ways to say rows 3, 0 and 3 of a table, row 2, and four rows in two dimensions.
ROWS_3_0_3 = {
    "list": [3, 0, 3],
    "tuple": (3, 0, 3),
    "array": np.array([3, 0, 3]),
    "array of uint8": np.array([3, 0, 3], dtype=np.uint8),
    "big-endian array": np.array([3, 0, 3], dtype=">i4"),
    "reversed array": np.array([3, 0, 3])[::-1],
    "array scalars": [np.int32(3), np.uint64(0), np.int8(3)],
    "tensor": torch.tensor([3, 0, 3]),
    "strided tensor": torch.tensor([3, 9, 0, 9, 3])[::2],
    "list of tensors": [torch.tensor(3), torch.tensor(0), torch.tensor(3)],
}
ROW_2 = (2, np.int64(2), np.array(2), torch.tensor(2), np.uint64(2))
ROWS_1_TO_4 = ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), torch.tensor([[1, 3], [2, 4]]).t())
INDEXES = [*((index, [3, 0, 3]) for index in ROWS_3_0_3.values()), *((index, 2) for index in ROW_2)]
INDEXES += [(index, [[1, 2], [3, 4]]) for index in ROWS_1_TO_4]
NO_INTEGERS = {
    "float": 1.0,
    "float tensor": torch.tensor([1.0]),
    "float array": np.array([1.0]),
    "bool": True,
    "mask": torch.tensor([True, False]),
    "array mask": np.array([True, False]),
    "string": "3",
    "None": None,
    "set": {1, 2},
}
# (index, what the message says of the first bad value) for a table of 10 rows
OUT_OF_RANGE = {
    "one too far": (10, "index is 10 but the table has 10 rows (0 to 9)"),
    "negative": (-1, "index is -1 but rows count from 0"),
    "first of two": ([3, 1000, -5], "index[1] is 1000 but the table has 10 rows"),
    "nested": ([[0, 1], [2, 77]], "index[1, 1] is 77 but"),
    "three dimensions": (torch.arange(12).reshape(2, 3, 2), "index[1, 2, 0] is 10 but"),
    "uint8": (torch.tensor([255], dtype=torch.uint8), "index[0] is 255 but"),
    "int64 limit": (torch.tensor([-(2**63)]), "index[0] is -9223372036854775808 but"),
    "uint64 tensor": (torch.tensor([1, 2**63 + 7], dtype=torch.uint64), "index[1] is 9223372036854775815 but"),
    "beyond 64 bits": ([1, 2**70], "index[1] is 1180591620717411303424 but"),
    "NumPy would make floats": ([2**63, -1], "index[0] is 9223372036854775808 but"),
}


class GatherCases(TableCases):
    # --- gather -------------------------------------------------------------------------------------------------------

    def test_gather_against_numpy(self, dtype):
        values = numbers((300, 7), dtype)
        table = self.filled(values)
        index = np.random.default_rng(0).integers(0, 300, size=(23, 5))
        # As bytes: torch 2.6 does not index float8.
        expected = values.view(torch.uint8)[torch.from_numpy(index)].view(dtype)
        assert_same_bits(table.gather(index).cpu(), expected)
        out = torch.zeros(23, 5, 7, dtype=dtype, device=table.device)
        assert table.gather(index, out=out) is out
        assert_same_bits(out.cpu(), expected)

    def test_every_integer_dtype_is_an_index(self):
        for index_dtype in INDEX_DTYPES:
            table = self.numbered(128, 2)
            index = torch.tensor([127, 0, 127, 1], dtype=index_dtype)
            assert table.gather(index)[:, 0].tolist() == [127, 0, 127, 1]
            table.scatter(index[1:], torch.full((3, 2), -1.0, device=table.device))
            assert table.gather([0, 1, 2, 127])[:, 0].tolist() == [-1, -1, 2, -1]

    def test_every_kind_of_index(self):
        table = self.numbered()
        for index, rows in INDEXES:
            assert table.gather(index)[..., 0].tolist() == rows, index
            assert table.gather(index).shape == (*np.shape(rows), 4)

    def test_no_rows(self):
        table = self.numbered()
        for index in ([], (), [[]], np.zeros((0, 3), dtype=np.int64), torch.zeros(2, 0, dtype=torch.int32), range(0)):
            rows = table.gather(index)
            assert rows.shape == (*np.shape(index), 4)
            table.scatter(index, rows)
        assert table.stats().gathered_rows == 0

    def test_result_is_a_copy(self):
        table = self.numbered()
        rows = table.gather([1, 2])
        rows.zero_()
        assert table.gather([1, 2])[:, 0].tolist() == [1, 2]
        before = table.gather([1])
        table.scatter([1], torch.zeros(1, 4, device=table.device))
        assert before[0, 0] == 1

    def test_index_without_integers(self):
        table = self.numbered()
        before = self.rows_of(table)
        rows = torch.zeros(2, 4, device=table.device)
        calls = (table.gather, lambda index: table.scatter(index, rows), table.__getitem__)
        for (name, index), call in itertools.product(NO_INTEGERS.items(), calls):
            with pytest.raises(TypeError) as error:
                call(index)
            assert isinstance(error.value, InvalidTypeError), name
            assert "rows are named by integers; pass " in one_line(error), name
        self.assert_unchanged(table, before)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    def test_an_index_of_another_kind_names_the_remedy(self):
        table, ids = self.numbered(), torch.tensor([[1, 0], [0, 2]])
        nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
        for index, words in (
            (torch.tensor([1.0], dtype=torch.float64), r"index is of dtype torch.float64 .*; pass index.long\(\)"),
            (torch.ones(10, dtype=torch.bool), r"index is a boolean mask .*; pass mask.nonzero\(\).flatten\(\)"),
            (nested, r"index is a nested tensor .*; pass index.values\(\)"),
            (
                ids.to_sparse(layout=torch.sparse_coo),
                r"a sparse tensor \(torch.sparse_coo\) .*; pass index.to_dense\(\)",
            ),
            (
                ids.to_sparse(layout=torch.sparse_csr),
                r"a sparse tensor \(torch.sparse_csr\) .*; pass index.to_dense\(\)",
            ),
            (ids.to("meta"), "index is on the meta device, which has no values"),
        ):
            with refused(InvalidTypeError, words):
                table.gather(index)
        with refused(InvalidValueError, "index is a ragged sequence"):
            table.gather([[1, 2], [3]])

    def test_index_out_of_range(self):
        table = self.numbered()
        table.add_plane("m", 2, fill=7)
        weight, m, version, stats = self.rows_of(table), self.rows_of(table, "m"), table.version, table.stats()
        for index, message in OUT_OF_RANGE.values():
            shape = index.shape if isinstance(index, torch.Tensor) else np.shape(np.asarray(index, dtype=object))
            rows = torch.full((*shape, 4), -1.0, device=table.device)
            out = torch.full((*shape, 4), 5.0, device=table.device)
            for call, *more in (
                (table.gather,),
                (functools.partial(table.gather, out=out),),
                (table.gather, ["weight", "m"]),
                (table.scatter, rows),
                (table.scatter, {"weight": rows, "m": rows[..., :2]}),
            ):
                with pytest.raises(IndexError) as error:
                    call(index, *more)
                assert isinstance(error.value, RowIndexError)
                assert one_line(error).startswith(message)
            assert bool((out == 5).all())
        assert table.version == version
        assert table.stats() == stats
        self.assert_unchanged(table, weight)
        self.assert_unchanged(table, m, "m")

    def test_table_without_rows(self):
        table = self.make(0, 4)
        assert table.gather([]).shape == (0, 4)
        table.scatter([], torch.zeros(0, 4, device=table.device))
        table.normal_().zero_()
        assert table[:].shape == (0, 4)
        with pytest.raises(RowIndexError, match=r"index\[0\] is 0 but the table has no rows"):
            table.gather([0])
        assert table.add_plane("m", 2, fill=3).shape == (0, 2)

    def test_table_without_columns(self):
        table = self.make(5, 0)
        assert table.gather([4, 4, 1]).shape == (3, 0)
        table.scatter([1, 2], torch.zeros(2, 0, device=table.device))
        table.normal_()
        table.add_plane("m", 1, fill=2.0)
        assert table.gather([4], ["weight", "m"])["m"].tolist() == [[2.0]]

    # --- gather(out=) -------------------------------------------------------------------------------------------------

    def test_out_strided(self):
        table = self.numbered(10, 3)
        whole = torch.full((4, 6), -1.0, device=table.device)
        assert table.gather([5, 6], out=whole[::2, ::2]).tolist() == table.gather([5, 6]).tolist()
        assert whole[1].tolist() == [-1] * 6
        assert whole[0].tolist() == [5, -1, 5.25, -1, 5.5, -1]
        out = torch.zeros(2, 2, 3, device=table.device).transpose(0, 1)
        assert table.gather([[1, 2], [3, 4]], out=out)[..., 0].tolist() == [[1, 2], [3, 4]]
        assert table.gather([], out=whole[:0, :3]).shape == (0, 3)

    def test_out_inside_the_table(self):
        table = self.numbered()
        if table.torch().device != table.device:
            pytest.skip("a view of these rows is on the host")
        assert table.gather([2, 1, 0], out=table.torch()[1:4])[:, 0].tolist() == [2, 1, 0]
        assert self.rows_of(table)[:5, 0].tolist() == [0, 2, 1, 0, 4]
