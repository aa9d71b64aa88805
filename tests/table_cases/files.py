"""Tables saved and loaded, and tables that grow: old rows as they were, or nothing at all where there is no room."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import NO_NUMPY_DTYPES, assert_same_bits, numbers, one_line, refused

from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError, RowIndexError, StorageError
from speedtransfer.tables import chunks as fill
from table_cases.base import TableCases


class FileCases(TableCases):
    @pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
    def test_save_and_load(self, suffix, dtype, monkeypatch):
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)  # many chunks
        values = numbers((50, 3), dtype)
        table, path = self.filled(values), self.folder / f"saved{suffix}"
        if suffix == ".npy" and dtype in NO_NUMPY_DTYPES:
            with refused(InvalidTypeError, rf"{dtype} has no .npy form .*; use .*.safetensors"):
                table.save(path)
            assert not path.exists()
            return
        table.save(path)
        loaded = self.load(path)
        assert (loaded.num_rows, loaded.dim, loaded.dtype, loaded.memory) == (50, 3, dtype, table.memory)
        self.assert_unchanged(loaded, values)

    @pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
    @pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 0), (1, 1), (33, 16)], ids=str)
    def test_save_and_load_of_awkward_shapes(self, suffix, shape):
        values = numbers(shape, torch.float32)
        path = self.folder / f"saved{suffix}"
        path.write_bytes(b"old")
        self.filled(values).save(path)
        loaded = self.load(path)
        self.assert_unchanged(loaded, values)
        assert (loaded.num_rows, loaded.dim) == shape
        loaded.add_plane("m", 1)

    def test_whether_the_loaded_file_is_the_table(self):
        path = self.folder / "one.npy"
        self.numbered().save(path)
        before = path.read_bytes()
        loaded = self.load(path)
        loaded.fill_(9)
        loaded.flush()
        assert (path.read_bytes() != before) == self.persistent

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
    def test_failure_of_save_keeps_the_old_file(self, error, monkeypatch):
        table, path = self.numbered(100, 4), self.folder / "saved.npy"
        path.write_bytes(b"old")
        files_before = sorted(p.name for p in self.folder.iterdir())
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)
        calls = []

        def failing(plane):
            for rows in fill.plane_chunks(plane):
                calls.append(rows)
                if len(calls) == 3:
                    raise error
                yield rows

        expected = pytest.raises(KeyboardInterrupt)
        if isinstance(error, OSError):
            expected = refused(StorageError, r"cannot write .* \(No space left on device\); free some space")
        with monkeypatch.context() as patch, expected:
            patch.setattr("speedtransfer.tables.saving.plane_chunks", failing)
            table.save(path)
        assert path.read_bytes() == b"old"
        assert sorted(p.name for p in self.folder.iterdir()) == files_before


# Width, dtype and fill.
PLANES = {"m": (4, torch.float32, 0.5), "step": (1, torch.int32, 3), "flag": (5, torch.uint8, 0)}


class GrowCases(TableCases):
    def growing(self, num_rows=5, dim=4, **kwargs):
        """Return a table that can grow, with planes, some of which share records, and what they hold."""
        table = self.make(num_rows, dim, **{"max_rows": 10_000, **kwargs})
        for layout in ("planes", "rows"):
            table.layout = layout
            table.add_planes({f"{layout}.{name}": spec for name, spec in PLANES.items()})
        table.add_plane("given", 2, torch.float32, torch.ones(num_rows, 2))
        table.add_plane("alone", 3, torch.bfloat16, -1.5)
        values = {name: numbers(table.stored(name).shape, table.stored(name).dtype) for name in table.planes}
        table.scatter(range(num_rows), {name: part.to(table.device) for name, part in values.items()})
        return table, values

    @staticmethod
    def longer(values, num_rows):
        """Return what planes hold after they have grown to `num_rows` rows."""
        found = {}
        for name, part in values.items():
            fill = {"alone": -1.5, "weight": 0, "given": 0}.get(name)
            fill = PLANES[name.split(".")[1]][2] if fill is None else fill
            found[name] = torch.cat((part, part.new_full((num_rows - len(part), part.shape[1]), fill)))
        return found

    def assert_holds(self, table, expected):
        for name, part in expected.items():
            assert_same_bits(self.rows_of(table, name), part)
            assert_same_bits(table.plane(name).cpu(), part)
            assert_same_bits(table.chunk(name, slice(1, 4)).cpu(), part[1:4])

    def test_all_planes_grow(self):
        table, values = self.growing()
        for num_rows in (6, 6, 300, 9000):
            version, stats = table.version, table.stats()
            grows = num_rows > table.num_rows
            log = table.watch()
            table.grow(num_rows)
            assert (table.version > version) == grows
            assert (table.written_since(log) is None) == grows
            assert (table.stats().scattered_rows, table.stats().gathered_rows) == (
                stats.scattered_rows,
                stats.gathered_rows,
            )
            values = self.longer(values, num_rows)
            assert (len(table), table.max_rows) == (num_rows, 10_000)
            assert table.nbytes == sum(part.nbytes for part in values.values())
            self.assert_holds(table, values)
            last = torch.tensor([num_rows - 1])
            for name, part in values.items():
                part[-1] = numbers(part.shape, part.dtype)[-1]
                table.scatter(last, {name: part[-1:].to(table.device)})
            self.assert_holds(table, values)
        with pytest.raises(RowIndexError, match="9000 but the table has 9000 rows"):
            table[9000]

    def test_rows_are_filled_as_asked(self):
        table, values = self.growing()
        table.lengthen(7, {"weight": 2.0, "rows.m": torch.arange(4.0), "planes.step": 0})
        expected = self.longer(values, 7)
        expected["weight"][5:], expected["rows.m"][5:], expected["planes.step"][5:] = 2, torch.arange(4.0), 0
        self.assert_holds(table, expected)

    def test_planes_come_and_go(self):
        table, values = self.growing()
        table.drop_plane("rows.m")
        table.drop_plane("planes.step")
        table.grow(8)
        assert table.add_plane("new", 2, torch.float64, 7).shape == (8, 2)
        table.drop_plane("rows.step")
        table.grow(11)
        expected = {name: self.longer(values, 11)[name] for name in values if name in table.planes}
        self.assert_holds(table, {**expected, "new": torch.full((11, 2), 7, dtype=torch.float64)})

    def test_a_table_of_no_rows(self):
        table = self.make(0, 4, max_rows=100)
        table.add_plane("m", 2, torch.float32, 1.5)
        table.grow(3)
        self.assert_holds(table, {"weight": torch.zeros(3, 4), "m": torch.full((3, 2), 1.5)})

    @pytest.mark.parametrize(
        ("options", "num_rows", "fills", "message"),
        [
            ({}, 4, None, "num_rows is 4 but the table has 5 rows already, and never loses any; "),
            ({}, 10_001, None, "num_rows is 10001 but the table was made with max_rows=10000; "),
            (
                {"max_rows": None},
                6,
                None,
                "num_rows is 6 but the table was made to keep its 5 rows; make it with max_rows",
            ),
            ({}, 6, {"x": 1}, "the table has no plane 'x'"),
        ],
    )
    def test_what_cannot_be(self, options, num_rows, fills, message):
        table, values = self.growing(**options)
        with pytest.raises(InvalidValueError) as error:
            table.lengthen(num_rows, fills)
        assert one_line(error).startswith(message)
        self.assert_holds(table, values)

    def test_no_room(self, monkeypatch):
        table, values = self.growing(max_rows=2**40)
        with pytest.raises((HostMemoryError, StorageError)) as error:
            table.grow(2**40)
        assert "1099511627776 rows" in one_line(error) or "asks for" in one_line(error)
        self.assert_holds(table, values)
        table.grow(9)
        self.assert_holds(table, self.longer(values, 9))

    def test_copies_grow_by_themselves(self):
        table, values = self.growing()
        other = copy.deepcopy(table)
        other.grow(8)
        self.assert_holds(other, self.longer(values, 8))
        self.assert_holds(table, values)
        assert table.astype(torch.float64).max_rows == 10_000

    def test_a_cache_shows_new_rows(self):
        if "cache_rows" in repr(self.make(2, 2)) or self.make(2, 2).memory == "device":
            pytest.skip("has a cache, or can have none")
        for asked, rows in ((20, 11), (3, 3)):
            table, values = self.growing(cache_rows=asked)
            before = table.stats()
            table.gather(torch.arange(5), list(values))
            table[2] = torch.full((4,), 9.0, device=table.device)
            values["weight"][2] = 9
            table.grow(11)
            assert table.cache_rows == rows
            hits, misses = table.stats().cache_hits, table.stats().cache_misses
            assert hits + misses > before.cache_hits + before.cache_misses
            for _ in range(2):
                self.assert_holds(table, self.longer(values, 11))
