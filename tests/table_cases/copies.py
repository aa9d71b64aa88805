"""Copies of a table, its counters, and the modes of torch around it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from cases import numbers

import speedtransfer as st
from speedtransfer.errors import (
    InvalidTypeError,
)
from table_cases.base import TableCases


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

    def test_deepcopy_keeps_identity_within_one_copy(self):
        table = self.numbered()
        one, two = copy.deepcopy([table, table])
        assert one is two

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
        assert repr(stats) == (
            f"TableStats(gathered_rows=8, gathered_bytes={3 * 16 + 4 * 22 + 6}, scattered_rows=3, scattered_bytes=38)"
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

    def test_works_inside_inference_mode(self):
        table = self.numbered()
        with torch.inference_mode():
            rows = table.gather([1, 2])
            table.scatter([1, 2], rows * 2)
        table.scatter([3], rows[:1])
        assert table.gather([1, 2, 3])[:, 0].tolist() == [2, 4, 1]

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
