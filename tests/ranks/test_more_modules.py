"""Several features in one table, and embeddings that are replaced, over processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

import speedtransfer as st

SIZES = (50, 7, 300)


def features(group, ranks: list[int]) -> torch.Tensor:
    torch.manual_seed(1)
    multi = st.MultiEmbedding(SIZES, 4, padding_idx=0, process_group=group, dtype=torch.float64)
    opt = torch.optim.AdamW(multi.parameters(), lr=0.05)
    for step in range(5):
        draw = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        ids = [torch.cat([torch.randint(0, size, (6,), generator=g) for g in draw]) for size in SIZES]
        opt.zero_grad()
        (sum(rows.square().sum() for rows in multi(ids)) / (1 if group else dist.get_world_size())).backward()
        opt.step()
    with torch.no_grad():
        return torch.cat([multi[i](torch.arange(size)) for i, size in enumerate(SIZES)])


def both() -> float:
    ours = features(dist.group.WORLD, [dist.get_rank()])
    return float((ours - features(None, list(range(dist.get_world_size())))).abs().max())


def test_features(ranks):
    assert max(ranks(both)) < 1e-12


def replaced() -> tuple[bool, str, str]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(20_000, 4), torch.nn.Linear(4, 1))
    before = model[0].weight.detach().clone()
    assert list(st.replace_embeddings(model, process_group=dist.group.WORLD)) == ["0"]
    same = torch.equal(model[0](torch.arange(20_000)), before)
    return same, repr(model[0].table), str(st.summary(model))


def test_replaced(two):
    for rank, (same, table, summary) in enumerate(two(replaced)):
        assert same
        assert f"rank {rank} of 2" in table
        assert f"rank {rank} of 2" in summary
        assert "20,000" in summary


def hottest() -> tuple[bool, int, int, str]:
    """A cache of the rows with the largest counts, of those that each process owns."""
    counts = torch.arange(100) % 50
    options = {"process_group": dist.group.WORLD, "memory": "pageable", "cache_rows": 10, "cache_counts": counts}
    emb = st.Embedding(100, 4, **options)
    own = emb.table.local_ids()
    hot = own[counts[own].sort(descending=True, stable=True).indices[:10]]
    emb.table.reset_stats()
    emb(hot)
    stats = emb.table.stats()
    try:
        st.Embedding(100, 4, **{**options, "cache_counts": counts[:7]})
    except st.errors.InvalidValueError as error:
        said = str(error)
    return len(hot) == 10, stats.cache_hits, stats.cache_misses, said


def test_counts_of_a_cache(two):
    for enough, hits, misses, said in two(hottest):
        assert enough
        assert hits == 10
        assert misses == 0
        assert "cache_counts is (7,) but the table has 100 rows" in said
