"""Padded unique rows and the sums of their gradients: in torch, and by the kernels of CUDA run on the CPU."""

import numpy as np
import pytest
import torch
from cpu_kernels import cpu_kernels, launch_by_cpu

from speedtransfer.tables import NOTHING, padded
from speedtransfer.tables.padded import padded_anew, padded_unique, sum_rows, trimmed

WAYS = ["torch", "kernels", "kernels, many"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Let `padded` use torch, or the kernels: on the CPU, in launches of odd sizes."""
    if request.param == "torch":
        return
    made = launch_by_cpu(monkeypatch, padded)
    monkeypatch.setattr(padded, "kernel_on", lambda source, name, device: name)
    monkeypatch.setattr(padded, "current_stream", lambda device: None)
    monkeypatch.setattr(padded, "launch_kernel", lambda name, *how: cpu_kernels().launch(name, *how[:3], len(made) % 2))
    if request.param == "kernels, many":
        monkeypatch.setattr(padded, "_FEW", 0)
    monkeypatch.setattr(padded, "_find", padded._find_by_kernels)
    monkeypatch.setattr(padded, "_sum", padded._sum_by_kernels)


def index_of(count, num_rows, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).zipf(1.3, count) % num_rows)


class TestUnique:
    @pytest.mark.parametrize("spare", [False, True])
    @pytest.mark.parametrize(
        ("count", "num_rows"), [(1, 1), (1, 9), (5, 3), (300, 50), (300, 2**31 + 5), (1000, 7), (4096, 90)]
    )
    def test_is_that_of_torch_and_padding(self, way, count, num_rows, spare):
        flat = index_of(count, num_rows)
        ids, inverse = torch.unique(flat, return_inverse=True)
        found = padded_unique(flat, num_rows, spare)
        assert found.ids[: len(ids)].tolist() == ids.tolist()
        assert found.ids[len(ids) :].tolist() == [num_rows] * (len(found.ids) - len(ids))
        assert len(found.ids) <= min(count, num_rows) + 1
        assert not spare or found.ids[-1] == num_rows
        assert torch.equal(found.inverse, inverse)
        assert found.known.length.tolist() == [len(ids)]
        assert torch.equal(found.order, flat.sort(stable=True).indices)
        sizes = found.starts.diff()
        assert sizes.tolist() == [*torch.bincount(inverse).tolist(), *[0] * (len(found.ids) - len(ids))]
        assert found.starts[-1] == count
        exact = trimmed(found)
        assert torch.equal(exact.ids, ids)
        assert torch.equal(exact.starts, found.starts[: len(ids) + 1])

    @pytest.mark.parametrize("bad", [-1, 9, 2**31, 2**40, -(2**63), 2**63 - 1])
    def test_what_is_out_of_range_names_no_row(self, way, bad):
        found = padded_unique(torch.tensor([bad, 3, 0, bad, 8, *range(9)]), 9)
        assert found.ids.tolist() == [*range(9), 9]
        assert found.inverse[:5].tolist() == [9, 3, 0, 9, 8]
        assert found.known.length.tolist() == [9]

    def test_padding_of_a_table_that_has_grown(self, way):
        groups = padded_unique(torch.tensor([3, 1, 3]), 5)
        found = padded_anew(groups.ids, groups.known, 9)
        assert found.tolist() == [1, 3, 9]
        assert groups.known.length.tolist() == [2]
        assert padded_anew(found[:2], NOTHING, 9).tolist() == [1, 3]


class TestSums:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        ("count", "num_rows", "width"), [(1, 1, 1), (40, 5, 3), (700, 50, 16), (4000, 9, 5), (5000, 3, 5)]
    )
    def test_are_those_of_the_groups(self, way, count, num_rows, width, dtype):
        flat = index_of(count, num_rows)
        groups = padded_unique(flat, num_rows, spare=True)
        values = torch.randn(count, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        total = sum_rows(values, groups, num_rows)
        wanted = torch.zeros(len(groups.ids), width, dtype=torch.float64).index_add_(0, groups.inverse, values.double())
        exact = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-4 if dtype == torch.float32 else 1e-11)
        assert total.dtype == dtype
        torch.testing.assert_close(total.double(), wanted, rtol=exact, atol=exact * 4)
        assert torch.equal(total, sum_rows(values, groups, num_rows))

    def test_none_of_what_names_no_row_or_is_excluded(self, way):
        flat = torch.tensor([2, 7, 2, -1, 4])
        total = sum_rows(torch.ones(5, 2), padded_unique(flat, 5), 5, excluded=2)
        assert total.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]

    def test_of_half_precision_are_made_in_single(self, way):
        values = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
        total = sum_rows(values, padded_unique(torch.zeros(4096, dtype=torch.int64), 3), 3)
        assert total[0, 0] == 4096
