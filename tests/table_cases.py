"""What every table must do, as a class of tests to inherit: `TableContract`, and its parts by subject."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from cases import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    NO_NUMPY_DTYPES,
    TABLE_DTYPES,
    assert_same_bits,
    dtype_name,
    numbers,
    one_line,
    refused,
)

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError, RowIndexError, StorageError
from speedtransfer.tables import chunks as fill

# --- how tables are made, filled and read ----------------------------------------------------------------------------


# Planes: width, dtype and fill.
PLANES = {"m": (4, torch.float32, 0.5), "step": (1, torch.int32, 3), "flag": (5, torch.uint8, 0)}


class TableOfRecords(st.Table):
    """A table whose added planes are strided views of records that have room for another plane."""

    def add_plane(self, name, width=None, dtype=None, fill=0):
        self.layout = "rows"
        added = self.add_planes({name: (width, dtype, fill), f"beside {name}": (3, torch.uint8, 0)})
        self.drop_plane(f"beside {name}")
        return added[name]


class TableCases:
    """The fixture `device` is the compute device; a subclass says in which memory tables are and what they can do."""

    memory: str
    suffix = ".safetensors"  # of the file of a "mmap" one
    kind = st.Table
    options: dict = {}
    dtypes = TABLE_DTYPES
    host = True  # the whole table is a host array

    def make(self, num_rows, dim, dtype=torch.float32, **kwargs):
        """Return a new table of zeros."""
        return self.kind(num_rows, dim, dtype, self.memory, device=self.device, **self._where(kwargs))

    def from_array(self, array, **kwargs):
        """Return a new table of `array`."""
        return self.kind.from_array(array, self.memory, device=self.device, **self._where(kwargs))

    def load(self, path, **kwargs):
        """Return the table in the file at `path`, in this memory."""
        writable = {"writable": True} if self.memory == "mmap" else {}
        return self.kind.load(path, self.memory, device=self.device, **self.options | writable | kwargs)

    def _where(self, kwargs):
        return self.options | ({"path": self.new_path(self.suffix)} if self.memory == "mmap" else {}) | kwargs

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
        return table.gather(torch.arange(table.num_rows), plane).cpu()

    def assert_unchanged(self, table, expected, plane="weight"):
        assert_same_bits(self.rows_of(table, plane), expected)


# --- rows out of a table, and every kind of index --------------------------------------------------------------------


INDEX_DTYPES = [*INTEGER_DTYPES, torch.uint16, torch.uint32, torch.uint64]
# Ways to say rows 3, 0 and 3 of a table, row 2, and four rows in two dimensions.
ROWS_3_0_3 = [[3, 0, 3], (3, 0, 3), [np.int32(3), np.uint64(0), np.int8(3)], [torch.tensor(n) for n in (3, 0, 3)]]
ROWS_3_0_3 += [np.array([3, 0, 3], dtype) for dtype in (np.int64, np.uint8, ">i4")]
ROWS_3_0_3 += [np.array([3, 0, 3])[::-1], torch.tensor([3, 0, 3]), torch.tensor([3, 9, 0, 9, 3])[::2]]
ROW_2 = (2, np.int64(2), np.array(2), torch.tensor(2), np.uint64(2))
ROWS_1_TO_4 = ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), torch.tensor([[1, 3], [2, 4]]).t())
INDEXES = [*((index, [3, 0, 3]) for index in ROWS_3_0_3), *((index, 2) for index in ROW_2)]
INDEXES += [(index, [[1, 2], [3, 4]]) for index in ROWS_1_TO_4]
INDEXES += [(torch.tensor([127, 0, 127], dtype=dtype), [127, 0, 127]) for dtype in INDEX_DTYPES]
# (index, what the message says of the first bad value) for a table of 10 rows
OUT_OF_RANGE = [
    (10, "index is 10 but the table has 10 rows (0 to 9)"),
    (-1, "index is -1 but rows count from 0"),
    ([3, 1000, -5], "index[1] is 1000 but the table has 10 rows"),
    ([[0, 1], [2, 77]], "index[1, 1] is 77 but"),
    (torch.arange(12).reshape(2, 3, 2), "index[1, 2, 0] is 10 but"),
    (torch.tensor([255], dtype=torch.uint8), "index[0] is 255 but"),
    (torch.tensor([-(2**63)]), "index[0] is -9223372036854775808 but"),
    (torch.tensor([1, 2**63 + 7], dtype=torch.uint64), "index[1] is 9223372036854775815 but"),
    ([1, 2**70], "index[1] is 1180591620717411303424 but"),
    ([2**63, -1], "index[0] is 9223372036854775808 but"),  # of which NumPy would make floats
]


class GatherCases(TableCases):
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

    def test_every_kind_of_index(self):
        table = self.numbered(128)
        for index, rows in INDEXES:
            assert table.gather(index)[..., 0].tolist() == rows, index
            assert table.gather(index).shape == (*np.shape(rows), 4)
        for number, dtype in enumerate(INDEX_DTYPES if table.writable else ()):
            table.scatter(torch.tensor([1, 127], dtype=dtype), torch.full((2, 4), -float(number), device=table.device))
            assert table.gather([0, 1, 127])[:, 0].tolist() == [0, -number, -number]

    def test_no_rows(self):
        table = self.numbered()
        for index in ([], (), [[]], np.zeros((0, 3), dtype=np.int64), torch.zeros(2, 0, dtype=torch.int32), range(0)):
            rows = table.gather(index)
            assert rows.shape == (*np.shape(index), 4)
            table.scatter(index, rows)
        assert table.stats().gathered_rows == 0

    def test_what_is_no_index_names_the_remedy(self):
        table, ids = self.numbered(), torch.tensor([[1, 0], [0, 2]])
        before, rows = self.rows_of(table), torch.zeros(2, 4, device=table.device)
        nested = torch.nested.nested_tensor([ids[0], ids[1, :1]], layout=torch.jagged)
        others = (1.0, True, "3", None, {1, 2}, np.array([1.0]), np.array([True, False]))
        for index, words in (
            *((given, "rows are named by integers; pass ") for given in others),
            (torch.tensor([1.0], dtype=torch.float64), r"index is of dtype torch.float64 .*; pass index.long\(\)"),
            (torch.ones(10, dtype=torch.bool), r"index is a boolean mask .*; pass mask.nonzero\(\).flatten\(\)"),
            (nested, r"index is a nested tensor .*; pass index.values\(\)"),
            (ids.to_sparse(), r"a sparse tensor \(torch.sparse_coo\) .*; pass index.to_dense\(\)"),
            (ids.to("meta"), "index is on the meta device, which has no values"),
        ):
            for call in (table.gather, table.__getitem__, lambda index: table.scatter(index, rows)):
                with refused(InvalidTypeError, words):
                    call(index)
        with refused(InvalidValueError, "index is a ragged sequence"):
            table.gather([[1, 2], [3]])
        self.assert_unchanged(table, before)

    def test_index_out_of_range(self):
        table = self.numbered()
        table.add_plane("m", 2, fill=7)
        weight, m, version, stats = self.rows_of(table), self.rows_of(table, "m"), table.version, table.stats()
        for index, message in OUT_OF_RANGE:
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


# --- rows into a table, and rows in another floating type ------------------------------------------------------------


class ScatterCases(TableCases):
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

    def test_getitem_and_setitem(self):
        slices = (slice(None), slice(2, 5), slice(None, None, 3), slice(None, None, -1), slice(8, 100), slice(5, 2))
        for item in (*slices, 7, torch.tensor([[1], [2]])):
            table = self.numbered()
            expected, index = self.rows_of(table), torch.from_numpy(np.array(np.arange(10)[item], order="C"))
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

    @pytest.mark.parametrize("dense", KINDS, ids=dtype_name)
    @pytest.mark.parametrize("stored", KINDS, ids=dtype_name)
    def test_rows_are_converted_as_torch_does(self, stored, dense):
        if stored not in self.dtypes:
            pytest.skip(f"this memory has no {stored}")
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


# --- what a table starts from, says and shows; copies, and the modes of torch around it ------------------------------


# 16 is the block of torch's normal numbers. (num_rows, dim) around it and around chunks of it
INIT_SHAPES = [(0, 3), (1, 1), (3, 5), (15, 1), (16, 1), (17, 1), (5, 3), (33, 7), (47, 5), (48, 5), (49, 3), (100, 13)]


class ValueCases(TableCases):
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

    def test_init_with_a_function(self):
        for function in (
            lambda chunk: torch.nn.init.normal_(chunk, std=0.1),
            lambda chunk: chunk.normal_(0, 0.1) and None if chunk.numel() == 1 else chunk.uniform_(),
            lambda chunk: torch.randn(chunk.shape, dtype=torch.float64),
            lambda chunk: torch.randn(chunk.shape, requires_grad=True) * 2,
            lambda chunk: torch.rand(chunk.shape).numpy(),
        ):
            table, whole = self.make(50, 3), torch.zeros(50, 3)
            torch.manual_seed(5)
            result = torch.as_tensor(function(whole)).detach().float()
            torch.manual_seed(5)
            assert table.init_(function) is table
            self.assert_unchanged(table, result)
            assert not table.torch().requires_grad

    def test_from_array_of_anything(self):
        values = numbers((40, 3), torch.float64).numpy()
        for given in (
            np.asfortranarray(values),
            values.astype(">f8"),
            np.frombuffer(values.tobytes(), dtype=values.dtype).reshape(values.shape),
            np.ascontiguousarray(values[::-1])[::-1],
            values.tolist(),
            torch.nn.Parameter(torch.from_numpy(values.copy())),
        ):
            table = self.from_array(given)
            assert table.dtype == torch.float64
            assert not table.torch().requires_grad
            assert table.torch().is_contiguous()
            np.testing.assert_array_equal(self.rows_of(table).numpy(), values)
            table.scatter([0], torch.zeros(1, 3, dtype=torch.float64, device=table.device))
        assert values[0].any()


class CopyCases(TableCases):
    def test_copies_have_every_plane_and_are_independent(self, dtype):
        table = self.filled(numbers((40, 3), dtype))
        table.add_planes(PLANES)
        values = {name: self.rows_of(table, name) for name in table.planes}
        duplicate, wide = copy.deepcopy(table), table.astype(torch.float64)
        assert duplicate.planes == table.planes
        assert (duplicate.memory, duplicate.device, duplicate.dtype) == (table.memory, table.device, table.dtype)
        table.zero_()
        table.plane("m").zero_()
        for name, part in values.items():
            self.assert_unchanged(duplicate, part, name)
        self.assert_unchanged(wide, values["weight"].double())
        duplicate.fill_(1)
        assert not self.rows_of(table).any()

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
        assert (stats.gathered_rows, stats.gathered_bytes) == (3 + 4 + 1, 3 * 16 + 4 * (16 + 6) + 6)
        assert (stats.scattered_rows, stats.scattered_bytes) == (2 + 1, 2 * 16 + 6)
        table.gather([1])
        assert stats.gathered_rows == 8, "a copy"
        table.reset_stats()
        assert table.stats() == st.TableStats()

    def test_version_grows_with_every_change(self):
        table = self.numbered()
        for change in (
            lambda: table.scatter([1], torch.zeros(1, 4, device=table.device)),
            table.zero_,
            lambda: table.fill_(2),
            table.normal_,
            table.uniform_,
            lambda: table.init_(torch.ones_like),
            lambda: table.torch().mul_(2),
            lambda: table.torch()[3].add_(1),
        ):
            before = table.version
            change()
            assert table.version > before
        before = table.version
        table.gather([1])
        table.flush()
        table.add_plane("m", fill=1).add_(1)
        table.drop_plane("m")
        # A new plane is no change, and its own count when it is gone.
        assert table.version == before + 1

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


# --- what a table says of itself, planes of optimizer state, views of the whole ---------------------------------------


class PlaneCases(TableCases):
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

    def test_a_plane_of_scales_that_are_powers_of_two(self):
        scale = getattr(torch, "float8_e8m0fnu", None)
        if scale is None:
            pytest.skip("this torch has no float8_e8m0fnu")
        table = self.numbered(20, 4)
        table.add_plane("scale", 2, scale, fill=0.25)
        assert table.gather([3, 3], "scale").float().tolist() == [[0.25, 0.25]] * 2
        table.scatter([4], {"scale": torch.full((1, 2), 8.0).to(scale).to(table.device)})
        assert table.gather([3, 4], "scale").float().tolist() == [[0.25, 0.25], [8.0, 8.0]]
        for value in (0, 3.0, -1.0, math.inf, math.nan):
            with refused(InvalidValueError, rf"fill is {value} but the plane holds {scale}, powers"):
                table.add_plane("more", 2, scale, fill=value)
        with pytest.raises(InvalidTypeError, match=rf"dtype is {scale} but a table holds one of torch's"):
            self.make(4, 4, dtype=scale)

    def test_add_plane_copies_a_tensor(self):
        table = self.make(50, 3)
        fill_values = numbers((50, 2), torch.float64)
        table.add_plane("m", 2, fill=fill_values.requires_grad_())
        assert not table.plane("m").requires_grad
        assert_same_bits(self.rows_of(table, "m"), fill_values.detach().float())

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


# --- tables saved and loaded, and tables that grow -------------------------------------------------------------------


class FileCases(TableCases):
    @pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
    def test_save_and_load(self, suffix, dtype, monkeypatch):
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)  # many chunks
        for shape in ((50, 3), (0, 3), (5, 0)):
            values = numbers(shape, dtype)
            table, path = self.filled(values), self.folder / f"saved{suffix}"
            if suffix == ".npy" and dtype in NO_NUMPY_DTYPES:
                with refused(InvalidTypeError, rf"{dtype} has no .npy form .*; use .*.safetensors"):
                    table.save(path)
                assert not path.exists()
                continue
            table.save(path)
            loaded = self.load(path)
            assert (loaded.num_rows, loaded.dim, loaded.dtype, loaded.memory) == (*shape, dtype, table.memory)
            self.assert_unchanged(loaded, values)


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
            moved = [(each.scattered_rows, each.gathered_rows) for each in (table.stats(), stats)]
            assert moved[0] == moved[1]
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

    def test_no_room(self, monkeypatch):
        table, values = self.growing(max_rows=2**40)
        with pytest.raises((HostMemoryError, StorageError)) as error:
            table.grow(2**40)
        assert "1099511627776 rows" in one_line(error) or "asks for" in one_line(error)
        self.assert_holds(table, values)
        table.grow(9)
        self.assert_holds(table, self.longer(values, 9))

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


class TableContract(GatherCases, ScatterCases, PlaneCases, ValueCases, ConvertCases, FileCases, CopyCases, GrowCases):
    """Inherit it as a class ``Test...`` that overrides `make`, `from_array` and `load` (see `TableCases`)."""
