"""What the cases of a table build on: how a table is made, filled and read."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
import torch
from cases import FLOAT_DTYPES, INTEGER_DTYPES, TABLE_DTYPES, assert_same_bits, dtype_name

import speedtransfer as st


def named(cases):
    """Return pytest parameters of a dict of cases, by name."""
    return [pytest.param(value, id=name.replace(" ", "_")) for name, value in cases.items()]


class TableOfRecords(st.Table):
    """A table whose added planes are strided views of records that have room for another plane."""

    def add_plane(self, name, width=None, dtype=None, fill=0):
        self.layout = "rows"
        added = self.add_planes({name: (width, dtype, fill), f"beside {name}": (3, torch.uint8, 0)})
        self.drop_plane(f"beside {name}")
        return added[name]


class TableCases(ABC):
    """The fixture `device` is the compute device; a subclass says how tables come about and what they can do."""

    dtypes = TABLE_DTYPES
    host = True  # the whole table is a host array
    persistent = False  # the rows are a file

    @abstractmethod
    def make(self, num_rows, dim, dtype=torch.float32, **kwargs) -> st.Table:
        """Return a new table of zeros."""

    @abstractmethod
    def from_array(self, array, **kwargs) -> st.Table:
        """Return a new table of `array`."""

    @abstractmethod
    def load(self, path, **kwargs) -> st.Table:
        """Return the table in the file at `path`, in this memory."""

    def pytest_generate_tests(self, metafunc):
        for name, dtypes in (("dtype", TABLE_DTYPES), ("float_dtype", FLOAT_DTYPES), ("int_dtype", INTEGER_DTYPES)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, [d for d in dtypes if d in self.dtypes], ids=dtype_name)

    @pytest.fixture(autouse=True)
    def _surroundings(self, tmp_path, device):
        self.folder, self.device, self.num_made = tmp_path, device, 0

    def new_path(self, suffix):
        self.num_made += 1
        return self.folder / f"table{self.num_made}{suffix}"

    def filled(self, values, **kwargs):
        """Return a table with the rows of the CPU tensor `values`, written through scatter, and its stats at zero."""
        table = self.make(values.shape[0], values.shape[1], dtype=values.dtype, **kwargs)
        table.scatter(range(len(values)), values.to(table.device))
        table.reset_stats()
        return table

    def numbered(self, num_rows=10, dim=4, dtype=torch.float32):
        """Return a table whose row i holds i, i + 0.25, ... (floats) or i, i + 1, ... (integers)."""
        step = 0.25 if dtype.is_floating_point else 1
        return self.filled((torch.arange(num_rows)[:, None] + step * torch.arange(dim)).to(dtype))

    @staticmethod
    def rows_of(table, plane="weight"):
        """Return all the rows of a plane as a CPU tensor."""
        return table.gather(torch.arange(table.num_rows), plane).cpu()

    def assert_unchanged(self, table, expected, plane="weight"):
        assert_same_bits(self.rows_of(table, plane), expected)
