"""Tables of n-grams shared out over processes: the numbers of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st


def trained(options: dict) -> torch.Tensor:
    """Train on a half of the batch in each of two processes, or on all of it in one."""
    torch.manual_seed(0)
    ngrams = st.NgramHash(heads=2, rows=100, vocab_size=50, eos=0, pad=49)
    module = st.NgramEmbedding(ngrams, 4, head_scale=True, std=0.5, dtype=torch.float64, idle="exact", **options)
    torch.nn.init.ones_(module.head_scale)
    opt = torch.optim.AdamW(module.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(1)
    ranks = dist.get_world_size() if options else 1
    for step in range(5):
        tokens = torch.randint(0, 50, (4, 6), generator=draws)
        mine = tokens.chunk(ranks)[dist.get_rank()] if options else tokens
        # Rows in shared memory are not read ahead.
        if step % 2 and options.get("memory") != "shared":
            module.prefetch(mine)
        opt.zero_grad()
        (module(mine) - 1).square().mean().backward()
        if options:
            dist.all_reduce(module.head_scale.grad, op=dist.ReduceOp.SUM)
            module.head_scale.grad /= ranks
        opt.step()
    with torch.no_grad():
        return module(torch.arange(50).view(2, 25))


def sharded(memory: str) -> tuple[torch.Tensor, torch.Tensor]:
    return trained({"process_group": dist.group.WORLD, "memory": memory}), trained({})


@pytest.mark.parametrize("memory", ["pageable", "shared"])
def test_trains_as_one_process_does(two, memory):
    for found, expected in two(sharded, memory):
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
