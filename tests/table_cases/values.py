"""What a table starts from: initialisers, arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cases import FLOAT8_DTYPES, INTEGER_DTYPES, numbers, refused

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
                "truncated": lambda chunk: torch.nn.init.trunc_normal_(chunk, std=0.1),
                "uniform": lambda chunk: chunk.normal_(0, 0.1) and None if chunk.numel() == 1 else chunk.uniform_(),
                "returns": lambda chunk: torch.randn(chunk.shape),
                "returns double": lambda chunk: torch.randn(chunk.shape, dtype=torch.float64),
                "has a graph": lambda chunk: torch.randn(chunk.shape, requires_grad=True) * 2,
                "strided": lambda chunk: torch.randn(chunk.shape[1], chunk.shape[0]).t(),
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

    def test_init_in_place_without_a_result(self, monkeypatch):
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)
        table, shapes = self.make(50, 3, dtype=torch.int16), []

        def function(chunk):
            assert chunk.device.type == "cpu"
            chunk.copy_(sum(shapes) + torch.arange(len(chunk))[:, None].expand(chunk.shape))
            shapes.append(len(chunk))

        table.init_(function)
        assert shapes == [16, 16, 18]
        assert self.rows_of(table).tolist() == [[i, i, i] for i in range(50)]

    def test_init_with_a_function_of_the_wrong_shape(self):
        table = self.numbered()
        with refused(InvalidValueError, r"returned shape \(3,\) for a chunk of \(10, 4\)"):
            table.init_(lambda chunk: torch.zeros(3))
        with pytest.raises(InvalidValueError, match=r"returned shape \(\) for a chunk"):
            table.init_(lambda chunk: 0.5)

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
                "reversed columns": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
                "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
                "list": lambda a: a.tolist(),
                "transposed": lambda a: torch.from_numpy(a).t().contiguous().t(),
                "grad": lambda a: torch.from_numpy(a).requires_grad_(),
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

    @pytest.mark.parametrize(
        ("array", "standard", "message"),
        [
            (np.zeros(3), ValueError, r"array has shape \(3,\) but a table is 2-D"),
            (torch.zeros(3, 2, 1), ValueError, r"array has shape \(3, 2, 1\) but a table is 2-D"),
            (1.0, ValueError, r"array has shape \(\) but a table is 2-D"),
            ([[1.0], [1.0, 2.0]], ValueError, "array is a ragged sequence"),
            (np.zeros((3, 2), dtype=bool), TypeError, "array has dtype bool"),
            (np.zeros((3, 2), dtype=np.complex64), TypeError, "array has dtype complex64"),
            (np.array([["a"]]), TypeError, "array has dtype <U1"),
            (None, TypeError, "array has dtype object"),
            (torch.zeros(3, 2, dtype=torch.bool), TypeError, "dtype is torch.bool"),
            (torch.eye(3).to_sparse(), TypeError, "array has layout torch.sparse_coo"),
        ],
        ids=lambda value: "" if isinstance(value, type | str) else f"{value}".split("\n")[0][:30],
    )
    def test_from_array_of_what_is_no_table(self, array, standard, message):
        with refused(standard, message):
            self.from_array(array)
        assert list(self.folder.iterdir()) == [], "a failure leaves nothing behind"
