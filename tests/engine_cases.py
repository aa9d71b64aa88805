"""What every engine must do, as a class of tests to inherit: with the fixtures `engine`, `device` and `store`.

`store(tensor)` returns a contiguous copy of a CPU tensor in memory where the engine can have planes; `device` is the
compute device.
"""

import contextlib
import functools
import re

import numpy as np
import pytest
import torch
from cases import TABLE_DTYPES, assert_same_bits, bits, same_values

from speedtransfer.engines import CachedEngine, HostEngine, LfuPolicy, StaticPolicy
from speedtransfer.errors import RowIndexError

DTYPES = [*TABLE_DTYPES, torch.uint16, torch.bool, torch.complex64, torch.complex128]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
CONVERSIONS = [(stored, dense) for stored in FLOATS for dense in FLOATS if stored != dense]


def any_bits(shape, dtype, seed=0):
    """Return a CPU tensor of random bits: NaN of every kind, infinities, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def interesting_floats():
    """Return float32 of every sign and exponent, with fractions at, above and below each tie that rounding can meet."""
    ones = [1 << k for k in range(24)]
    fractions = {f for one in ones for f in (one, one - 1, one + 1, 3 * one, 3 * one - 1, 3 * one + 1, -one)}
    fractions = torch.tensor(sorted({f % (1 << 23) for f in fractions}), dtype=torch.int64)
    tops = torch.arange(512, dtype=torch.int64) << 23
    bits = (tops[:, None] | fractions).flatten()
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    return bits[: len(bits) // 8 * 8].view(torch.float32).view(-1, 8)


class EngineCases:
    def gather(self, engine, device, planes, index):
        """Gather `planes` at a list of ids, into memory full of other bits."""
        index = torch.tensor(index, dtype=torch.int64, device=device)
        shapes = [(len(index), plane.shape[1]) for plane in planes]
        sizes = [n * width * plane.element_size() for (n, width), plane in zip(shapes, planes, strict=True)]
        ones = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]
        rows = [one.view(plane.dtype).view(shape) for one, plane, shape in zip(ones, planes, shapes, strict=True)]
        engine.gather(planes, index, rows)
        return rows

    def scatter(self, engine, device, planes, index, rows):
        engine.scatter(planes, torch.tensor(index, dtype=torch.int64, device=device), [r.to(device) for r in rows])
        engine.wait()

    def test_no_rows_columns_or_planes(self, engine, device, store):
        planes = [store(torch.zeros(3, 0)), store(torch.tensor([[1], [2], [3]]))]
        rows = self.gather(engine, device, planes, [2, 0])
        assert [r.tolist() for r in rows] == [[[], []], [[3], [1]]]
        self.scatter(engine, device, planes, [1], [torch.zeros(1, 0), torch.tensor([[7]])])
        assert [part.shape for part in self.gather(engine, device, planes, [])] == [(0, 0), (0, 1)]
        self.scatter(engine, device, planes, [], [torch.zeros(0, 0), torch.tensor([[7]])[:0]])
        assert planes[1].tolist() == [[1], [7], [3]]
        (rows,) = self.gather(engine, device, [store(torch.zeros(0, 4))], [])
        assert rows.shape == (0, 4)
        self.gather(engine, device, [], [1])
        self.scatter(engine, device, [], [1], [])

    def test_more_planes_than_one_launch_takes(self, engine, device, store):
        contents = [any_bits((9, 1 + i), torch.float32, seed=i) for i in range(37)]
        planes = [store(content) for content in contents]
        rows = self.gather(engine, device, planes, [4, 8])
        for got, content in zip(rows, contents, strict=True):
            np.testing.assert_array_equal(bits(got), bits(content[[4, 8]]))
        self.scatter(engine, device, planes, [0, 1], rows)
        for plane, content in zip(planes, contents, strict=True):
            np.testing.assert_array_equal(bits(plane[:2]), bits(content[[4, 8]]))

    def test_every_dtype_and_dim(self, engine, device, store):
        """As they are stored, every bit of them, and converted."""
        dims = [(torch.float32, torch.float32, dim) for dim in (*range(1, 66), 100, 128, 300, 1024, 4099)]
        dims += [(*pair, dim) for pair in CONVERSIONS for dim in (1, 3, 8, 20, 129, 1024)]
        for stored, dense, dim in [*((dtype, dtype, 5) for dtype in DTYPES), *dims]:
            generator, check = np.random.default_rng(dim), assert_same_bits if stored == dense else same_values
            content, new = any_bits((29, dim), stored), any_bits((17, dim), dense, seed=1)
            plane, index = store(content), torch.from_numpy(generator.integers(0, 29, 40))
            rows = torch.ones(40, dim, device=device).to(dense)
            engine.gather([plane], index.to(device), [rows])
            # As bytes: torch 2.6 does not index float8.
            check(rows, content.view(torch.uint8)[index].view(stored).to(dense))
            index = generator.permutation(29)[:17].tolist()
            self.scatter(engine, device, [plane], index, [new])
            expected = content.clone()
            expected.view(torch.uint8)[index] = new.to(stored).view(torch.uint8)
            check(plane, expected)

    @pytest.mark.parametrize(("start", "dim", "stride"), [(0, 4, 8), (1, 4, 7), (3, 16, 32), (1, 16, 16), (0, 16, 20)])
    def test_strided_and_misaligned_planes(self, engine, device, store, start, dim, stride):
        def rows_of(memory):
            return memory[0, start:].as_strided((13, dim), (stride, 1), storage_offset=memory.storage_offset() + start)

        for dtype, dense in ((torch.float32,) * 2, (torch.int8,) * 2, *CONVERSIONS):
            content, new = any_bits((1, 13 * stride + start), dtype), any_bits((2, dim), dense, seed=1)
            memory, expected = store(content), content.clone()
            rows = torch.ones(4, dim, dtype=dense, device=device)
            engine.gather([rows_of(memory)], torch.tensor([12, 0, 5, 12], device=device), [rows])
            same_values(rows, rows_of(content)[[12, 0, 5, 12]].to(dense))
            self.scatter(engine, device, [rows_of(memory)], [12, 5], [new])
            rows_of(expected)[[12, 5]] = new.to(dtype)
            same_values(memory, expected)  # padding and idle rows as they were

    def test_a_gather_sees_the_scatter_before(self, engine, device, store):
        plane = store(torch.zeros(100, 7))
        index = torch.arange(100, device=device)
        for step in range(20):
            engine.scatter([plane], index, [torch.full((100, 7), float(step), device=device)])
            rows = torch.full((100, 7), -1.0, device=device)
            engine.gather([plane], index, [rows])
            assert rows.eq(step).all()

    @pytest.mark.parametrize(("stored", "dense"), CONVERSIONS, ids=str)
    def test_conversion_of_hard_values(self, engine, device, store, stored, dense):
        """Every half, or float32 at every tie, (n, 8)."""
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(-1, 8)
        content = interesting_floats() if stored == torch.float32 else halves.view(stored)
        plane, rows = (
            store(torch.ones(content.shape, dtype=dense)),
            torch.ones_like(content, dtype=dense, device=device),
        )
        index = torch.from_numpy(np.random.default_rng(0).permutation(len(content)))
        engine.gather([store(content)], index.to(device), [rows])
        same_values(rows, content[index].to(dense))
        self.scatter(engine, device, [plane], index.tolist(), [content])
        same_values(plane.cpu()[index], content.to(dense))

    def test_an_index_on_the_host(self, engine, device, store):
        plane, index = store(torch.zeros(50, 6)), torch.tensor([49, 3])
        engine.scatter([plane], index, [torch.full((2, 6), 7.0, device=device)])
        index.fill_(0)  # the caller's again
        rows = torch.ones(3, 6, device=device)
        engine.gather([plane], torch.tensor([3, 4, 49]), [rows])
        assert rows.tolist() == [[7.0] * 6, [0.0] * 6, [7.0] * 6]

    def test_unsorted(self, engine, device, store):
        """Large enough to be sorted where that pays; repeats in a gather, several planes, conversion."""
        contents = [torch.randn(3000, 64), torch.randn(3000, 3), torch.arange(3000, dtype=torch.int32).view(3000, 1)]
        planes, generator = [store(content) for content in contents], np.random.default_rng(0)
        index = torch.from_numpy(generator.integers(0, 3000, 9000))
        dtypes = [torch.float32, torch.bfloat16, torch.int32]
        expected = [content[index].to(dtype) for content, dtype in zip(contents, dtypes, strict=True)]
        for given in (index.to(device), index):
            rows = [torch.ones_like(part, device=device) for part in expected]
            engine.gather(planes, given, rows, check=True, unsorted=True)
            assert all(torch.equal(got.cpu(), part) for got, part in zip(rows, expected, strict=True))
        content, order = torch.randn(9000, 64), torch.from_numpy(generator.permutation(9000))
        plane = store(torch.zeros(9000, 64))
        engine.scatter([plane], order.to(device), [content.to(device)], unsorted=True)
        engine.wait()
        assert torch.equal(plane.cpu()[order], content)

    def test_check_of_an_unsorted_index(self, engine, device, store):
        plane, rows = store(torch.randn(29, 64)), [torch.ones(9000, 64, device=device)]
        index = torch.from_numpy(np.random.default_rng(0).integers(0, 29, 9000))
        index[[8000, 4321]], index[7000] = 29, -5
        for given in (index.to(device), index):
            gather = functools.partial(engine.gather, [plane], given, rows, check=True, unsorted=True)
            self.expect_fault(engine, 4321, 29, gather)

    def expect_fault(self, engine, position, value, call):
        """Expect the error of a gather with `check` from `call`, which begins with that gather, or from a wait after it."""
        rule = "rows count from 0" if value < 0 else "the table has 29 rows (0 to 28)"
        with pytest.raises(RowIndexError, match=rf"^index\[{position}\].* is {value} but {re.escape(rule)}") as error:
            (call(), engine.wait())
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("where", ["device", "host"])
    @pytest.mark.parametrize("value", [29, -1, 2**31, 2**40, -(2**63), 2**63 - 1])
    def test_check(self, engine, device, store, value, where):
        planes = [store(torch.randn(29, 12)), store(torch.randn(29, 1))]
        rows = [torch.ones(100, 12, device=device), torch.ones(100, 1, device=device)]
        index = torch.arange(100) % 29
        engine.gather(planes, index.to(device if where == "device" else "cpu"), rows, check=True)
        engine.wait()
        assert torch.equal(rows[0].cpu(), planes[0].cpu()[index])
        for position in (0, 42, 99):
            bad = index.clone()
            bad[position:] = torch.where(torch.arange(100 - position) % 9 == 0, value, bad[position:])
            bad = bad.to(device if where == "device" else "cpu")
            self.expect_fault(engine, position, value, lambda bad=bad: engine.gather(planes, bad, rows, check=True))
            engine.gather(planes, index.to(device), rows, check=True)
            engine.wait()  # as if nothing had been
            assert torch.equal(rows[0].cpu(), planes[0].cpu()[index])

    def test_a_fault_comes_with_the_next_call_at_the_latest(self, engine, device, store):
        plane, rows = store(torch.zeros(29, 12)), torch.ones(2, 12, device=device)
        bad, good = torch.tensor([3, 29], device=device), torch.tensor([3, 28], device=device)

        def gather_and(call):
            engine.gather([plane], bad, [rows], check=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            call()
            pytest.fail("the call after it did not raise")

        self.expect_fault(engine, 1, 29, lambda: gather_and(lambda: engine.gather([plane], good, [rows])))
        self.expect_fault(engine, 1, 29, lambda: gather_and(lambda: engine.scatter([plane], good, [rows])))
        self.expect_fault(engine, 1, 29, lambda: gather_and(engine.wait))
        engine.wait()
        assert not plane.any()


class PaddingCases:
    """Of engines whose compute device is a CUDA device: an index may end in entries equal to the number of rows."""

    @pytest.mark.parametrize("where", ["device", "host"])
    @pytest.mark.parametrize("real", [0, 1, 7, 29])
    def test_padding(self, engine, device, store, real, where):
        """Its rows are zeros, and are scattered nowhere."""
        contents = [any_bits((29, 12), torch.float32), any_bits((29, 3), torch.int8), torch.randn(29, 5)]
        planes, index = [store(content) for content in contents], torch.full((40,), 29)
        index[:real] = torch.randperm(29, generator=torch.Generator().manual_seed(0))[:real].sort().values
        given, dtypes = index.to(device if where == "device" else "cpu"), [torch.float32, torch.int8, torch.float16]
        rows = [
            torch.ones(40, plane.shape[1], dtype=dtype, device=device)
            for plane, dtype in zip(planes, dtypes, strict=True)
        ]
        engine.gather(planes, given, rows)
        engine.wait()
        for got, content, dtype in zip(rows, contents, dtypes, strict=True):
            assert_same_bits(got[:real], content[index[:real]].to(dtype))
            assert not bits(got[real:]).any()
        rows = [any_bits((40, 12), torch.float32, 1), any_bits((40, 3), torch.int8, 1), torch.randn(40, 5).half()]
        engine.scatter(planes, given, [source.to(device) for source in rows])
        engine.wait()
        for plane, content, source in zip(planes, contents, rows, strict=True):
            expected = content.clone()
            expected[index[:real]] = source[:real].to(content.dtype)
            assert_same_bits(plane, expected)

    def test_check_of_what_the_index_was_made_from(self, engine, device, store):
        planes = [store(torch.randn(29, 12)), store(torch.randn(29, 1))]
        rows = [torch.ones(3, plane.shape[1], device=device) for plane in planes]
        index = torch.tensor([4, 28, 29]).to(device)
        for bad, position in (([28, 4, -3, 4, 29], 2), ([28, 4, 28, 4, 29], 4), ([4, 28, 4], None)):
            given = torch.tensor(bad).to(device)
            with pytest.raises(RowIndexError) if position is not None else contextlib.nullcontext() as error:
                engine.gather(planes, index, rows, check=given)
                engine.wait()
            if position is not None:
                assert str(error.value).startswith(f"index[{position}]")
                assert f" is {bad[position]} but" in str(error.value)
        for got, plane in zip(rows, planes, strict=True):
            assert torch.equal(got[:2].cpu(), plane.cpu()[[4, 28]])
            assert not got[2].any()

    def test_padding_of_many_chunks_and_of_no_rows(self, engine, device, store):
        content, index = torch.randn(5000, 64), torch.full((9000,), 5000)
        index[:3000] = torch.arange(0, 5000)[:3000]
        plane, rows = store(content), torch.ones(9000, 64, device=device)
        engine.gather([plane], index.to(device), [rows])
        assert torch.equal(rows.cpu(), torch.cat([content[:3000], torch.zeros(6000, 64)]))
        engine.scatter([plane], index.to(device), [rows + 1])
        engine.wait()
        assert torch.equal(plane.cpu(), torch.cat([content[:3000] + 1, content[3000:]]))
        engine.gather([store(torch.zeros(0, 3))], index[:4].zero_().to(device), [rows[:4, :3].contiguous()])


# --- caches around engines ----------------------------------------------------------------------------------------------


def cached(capacity, policy="static", inner=None, planes=None, kind=CachedEngine, device="cpu", **options):
    """Return a cache of the last rows of planes of 30, or of those gathered last."""
    device = torch.device(device)
    if policy == "static":
        chosen = StaticPolicy(torch.arange(max(capacity, 30) - 1, -1, -1, device=device)[:capacity])
    else:
        chosen = LfuPolicy(device, every=1)
    return kind(inner or HostEngine("cpu"), chosen, capacity, planes, **options)


class Twice(CachedEngine):
    """Gathers everything twice, so that the second time rows come from the cache."""

    def gather(self, planes, index, rows, check=False, unsorted=False):
        super().gather(planes, index, rows, check, unsorted)
        for out in rows:
            out.view(torch.uint8).fill_(1)
        super().gather(planes, index, rows, check, unsorted)
