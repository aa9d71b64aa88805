"""``emb.weight`` on a CUDA device: the whole table, wherever its rows live, reads and writes as that of ``nn.Embedding``."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu.tools import hold
from gpu.weight_pairs import DIM, MEMORIES, ROWS, check_rows, pair, pair_of, rows_of, stored, tolerance  # noqa: F401 - fixtures

READS = {
    "norm": lambda w: w.norm(),
    "norms of rows": lambda w: torch.linalg.norm(w, dim=1),
    "a row": lambda w: w[3],
    "a value": lambda w: w[3, 2],
    "some rows": lambda w: w[2:9],
    "every other column": lambda w: w[:, ::2],
    "rows by an index there": lambda w: w[torch.tensor([4, 0, -1, 4], device=w.device)],
    "rows by an index of the host": lambda w: w[torch.tensor([4, 0, -1])],
    "rows by a list": lambda w: w[[3, 30]],
    "rows by a mask": lambda w: w[w.detach()[:, 0] > 0],
    "index_select": lambda w: w.index_select(0, torch.tensor([1, 1, 7], device=w.device)),
    "all scores": lambda w: torch.ones(3, DIM, device=w.device) @ w.T,
    "linear": lambda w: F.linear(torch.ones(3, DIM, device=w.device), w),
    "embedding": lambda w: F.embedding(torch.tensor([[1, 2], [2, 2]], device=w.device), w),
    "embedding_bag": lambda w: F.embedding_bag(torch.tensor([[1, 2], [2, 2]], device=w.device), w, mode="sum"),
    "cat": lambda w: torch.cat([w, w * 2]),
    "double": lambda w: w.double(),
    "a copy": lambda w: w.detach().clone(),
}


class TestReads:
    @pytest.mark.parametrize("name", READS)
    def test_values(self, pair, device, name):
        emb, dense = pair
        found, expected = (READS[name](module.weight) for module in (emb, dense))
        assert (found.device, found.dtype, found.shape) == (expected.device, expected.dtype, expected.shape)
        assert found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-5)

    def test_what_it_tells_of_itself(self, pair, device):
        emb, dense = pair
        weight, other = emb.weight, dense.weight
        assert weight.device == device
        assert isinstance(weight, nn.Parameter)
        for ask in ("shape", "dtype", "is_cuda", "is_leaf", "requires_grad", "nbytes"):
            assert getattr(weight, ask) == getattr(other, ask), ask
        assert (weight.stride(), weight.is_contiguous(), weight.numel()) == ((DIM, 1), True, ROWS * DIM)
        assert weight.to(device) is weight
        assert weight.cuda() is weight
        assert weight.cpu().device.type == "cpu"

    def test_after_a_step_that_is_on_its_way(self, pair, device):
        """A read waits for rows that the step before has still to write."""
        emb, _ = pair
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in pair]
        side, ids = torch.cuda.Stream(), torch.tensor([1, 4, 4], device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold(side, 20)
            for module, optimizer in zip(pair, optimizers, strict=True):
                module(ids).sum().backward()
                optimizer.step()
            found, expected = (module.weight.detach().clone() for module in pair)
        side.synchronize()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(emb, 1.0))


WRITES = {
    "init.uniform_": lambda m: (torch.manual_seed(0), nn.init.uniform_(m.weight, -0.1, 0.1)),
    "init.xavier_normal_": lambda m: (torch.manual_seed(0), nn.init.xavier_normal_(m.weight)),
    "init.zeros_ of data": lambda m: nn.init.zeros_(m.weight.data),
    "data.uniform_": lambda m: (torch.manual_seed(0), m.weight.data.uniform_(-1, 1)),
    "data.mul_": lambda m: m.weight.data.mul_(0.5),
    "a row of data": lambda m: m.weight.data.__setitem__(7, 0.25),
    "rows of data by an index": lambda m: m.weight.data.__setitem__(
        torch.tensor([1, 4], device=m.weight.device), torch.ones(2, DIM, device=m.weight.device)
    ),
    "a row of data in place": lambda m: m.weight.data[3].zero_(),
    "a part of a row of data": lambda m: m.weight.data[3][2:4].fill_(0.5),
    "a slice of data from the host": lambda m: m.weight.data[2:5].copy_(torch.ones(3, DIM)),
    "data from the host": lambda m: m.weight.data.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM) / 400),
    "data assigned": lambda m: setattr(m.weight, "data", torch.ones(ROWS, DIM, device=m.weight.device) / 2),
    "data of itself": lambda m: setattr(m.weight, "data", m.weight.data * 2),
    "data normalized": lambda m: setattr(m.weight, "data", F.normalize(m.weight.data, dim=1)),
    "without gradients": lambda m: no_grad(lambda: m.weight.mul_(0.9)),
    "without gradients, a row": lambda m: no_grad(lambda: m.weight.__setitem__(7, 1.0)),
    "without gradients, a view": lambda m: no_grad(lambda: m.weight[2:4].fill_(0.125)),
    "detached": lambda m: m.weight.detach()[:, 1].zero_(),
    "renorm_": lambda m: m.weight.data.renorm_(2, 0, 1.0),
}


def no_grad(function):
    with torch.no_grad():
        return function()


class TestWrites:
    @pytest.mark.parametrize("name", WRITES)
    def test_rows(self, pair, device, name):
        for module in pair:
            WRITES[name](module)
        check_rows(*pair)
        emb, dense = pair
        ids = torch.arange(ROWS, device=device)
        torch.testing.assert_close(emb(ids), dense(ids), rtol=1e-5, atol=tolerance(emb))

    @pytest.mark.parametrize("name", WRITES)
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_between_backward_and_step(self, device, tmp_path, memory, name):
        pair = pair_of(memory, None, device, tmp_path)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in pair]
        ids = torch.tensor([3, 7, 7], device=device)
        for step in range(3):
            for module, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                module(ids + step).square().sum().backward()
                if step == 1:
                    WRITES[name](module)
                optimizer.step()
        torch.testing.assert_close(rows_of(pair[0]), rows_of(pair[1]), rtol=1e-5, atol=2e-5)

    def test_a_write_is_seen_on_another_stream_once_waited_for(self, pair, device):
        emb, _ = pair
        side = torch.cuda.Stream()
        ids = torch.arange(ROWS, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold(side, 20)
            emb.weight.data.fill_(0.5)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(emb(ids), torch.full((ROWS, DIM), 0.5, device=device), rtol=0, atol=1e-3)
